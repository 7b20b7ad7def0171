"""SentencePiece in TensorFlow graphs."""

import hashlib
from typing import Any

import tensorflow as tf
import tensorflow_text as tf_text

from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.tasks.text.data.tidying import CONTROL, INVISIBLE, SPACES


def tokenizer(vocab: bytes) -> Any:
    """A tokenizer of a serialised SentencePiece model, with a unique name.

    In a loaded SavedModel, tokenizers of one name are one: the first, whatever their models.
    """
    name = f"sentencepiece_{hashlib.sha256(vocab).hexdigest()[:16]}"
    # It logs that a vocabulary does not normalise text, at no level that could be turned off.
    with quiet():
        return tf_text.SentencepieceTokenizer(model=vocab, name=name)


def tidy_strings(text: tf.Tensor, version: int) -> tf.Tensor:
    """tidy_text of strings of any shape, in a graph; bytes that are not UTF-8 become U+FFFD."""
    # SentencePiece normalizes U+FFFD, but not what it reads an invalid byte as: here both become the same.
    text = tf.strings.unicode_transcode(text, "UTF-8", "UTF-8")
    if not version:
        return text
    text = tf.strings.regex_replace(text, INVISIBLE[version], "")
    text = tf.strings.regex_replace(text, CONTROL, " ")
    text = tf.strings.strip(tf.strings.regex_replace(text, SPACES, " "))
    return tf_text.normalize_utf8(text, "NFC")
