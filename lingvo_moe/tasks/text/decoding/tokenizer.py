"""SentencePiece in TensorFlow graphs."""

import hashlib
from typing import Any

import tensorflow_text as tf_text

from lingvo_moe.core.console.quiet import quiet


def tokenizer(vocab: bytes) -> Any:
    """A tokenizer of a serialised SentencePiece model, with a unique name.

    In a loaded SavedModel, tokenizers of one name are one: the first, whatever their models.
    """
    name = f"sentencepiece_{hashlib.sha256(vocab).hexdigest()[:16]}"
    # It logs that a vocabulary does not normalise text, at no level that could be turned off.
    with quiet():
        return tf_text.SentencepieceTokenizer(model=vocab, name=name)
