"""SentencePiece vocabularies: ids pad 0, bos 1, eos 2, unk 3; every character of the sample, and bytes for the rest."""

import io
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.tidying import tidy_text
from lingvo_moe.tasks.text.vocabulary.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import JsonVocabulary

_SPECIAL = 4 + 256  # the ids above and one piece per byte
MIN_SIZE = 280
# Fixed: SentencePiece's sums depend on how many threads share the work, and the same data must give the same model.
_THREADS = 2
_LONGEST_BYTES = 4192  # of a sentence: SentencePiece passes over longer ones
_IGNORED = str.maketrans("\0\u2585", "  ")  # and over all that have one of these


class VocabularyTooLarge(DataError):
    """A vocabulary with more ids than the data can fill.

    Attributes:
        most: the largest size that it can.
    """

    def __init__(self, name: str, size: int, most: int, sentences: int):
        super().__init__(name, size, most, sentences)  # as processes hand it on
        self.most = most

    def __str__(self) -> str:
        name, size, most, sentences = self.args
        return f"{name}={size} is more than this data can fill: at most {most} for {sentences} sampled sentences"


class Vocabulary:
    """A trained model: text to ids and back; JsonVocabulary has the same methods and attributes.

    Attributes:
        size: the number of ids, V.
        pad_id, bos_id, eos_id, unk_id: the ids that are no text; 0, 1, 2, 3 where the vocabulary was trained here.
        model_bytes: the serialized model, for a SavedModel's tokenizer.
        path: where the model lies, or None.
        tidied: the version of tidy_text that texts go through first, as those that it was trained on; 0: none.
    """

    def __init__(self, model_bytes: bytes, path: str | os.PathLike | None = None, tidied: int = 0):
        self.model_bytes, self.tidied = model_bytes, tidied
        self.path = Path(path) if path else None
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model_bytes)
        except (RuntimeError, UnicodeDecodeError) as e:  # the latter of a damaged name of a rule
            raise DataError(
                f"{path or 'vocabulary'}: not a SentencePiece model, or damaged: {e}"
            ) from e
        ids = tuple(
            getattr(self._processor, f"{name}_id")() for name in ("pad", "bos", "eos", "unk")
        )
        if min(ids) < 0:
            raise DataError(
                f"{path or 'vocabulary'}: must have pad, bos, eos and unk, but their ids are {ids}"
            )
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = ids
        self.size: int = self._processor.GetPieceSize()

    @classmethod
    def Load(cls, path: str | os.PathLike) -> "Vocabulary":
        """Reads a model file. Raises DataError when it is missing or damaged."""
        try:
            return cls(Path(path).read_bytes(), path)
        except OSError as e:
            raise DataError(f"vocabulary {path}: {e.strerror or e}") from e

    def Encode(self, text: str) -> list[int]:
        """The ids of a text, without bos or eos."""
        return self._processor.EncodeAsIds(tidy_text(text, self.tidied))

    def EncodeBatch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode for many texts, faster; one thread."""
        tidy = [tidy_text(text, self.tidied) for text in texts]
        return self._processor.Encode(tidy, out_type=int, num_threads=1)

    def Pieces(self, ids: Sequence[int]) -> list[str]:
        """The piece of text that each id stands for."""
        return self._processor.IdToPiece(list(ids))

    def Decode(self, ids: Iterable[int]) -> str:
        """The text of ids; pad, bos and eos say nothing, and what follows the first eos is ignored."""
        tokens: list[int] = []
        for i in ids:
            if i == self.eos_id:
                break
            if i not in (self.pad_id, self.bos_id):
                tokens.append(int(i))
        return self._processor.DecodeIds(tokens)


def open_vocabulary(
    model_bytes: bytes, path: str | os.PathLike | None = None, tidied: int = 0
) -> Vocabulary | JsonVocabulary:
    """The vocabulary of a run, whose bytes are a SentencePiece model's or a JsonVocabulary's. Raises as these."""
    kind = JsonVocabulary if model_bytes.startswith(b"{") else Vocabulary
    return kind(model_bytes, path, tidied)


def check_symbols(symbols: Sequence[str]) -> None:
    """Raises DataError for a symbol that a vocabulary cannot keep as it is."""
    for symbol in symbols:
        if unicodedata.normalize("NFKC", symbol) != symbol or len(symbol.split()) != 1:
            raise DataError(
                f"--user_symbols: {symbol!r} must have no blanks, and be as NFKC writes it"
            )


def train_vocabulary(
    sentences: Sequence[str], size: int, name: str, normalization: str, symbols: Sequence[str] = ()
) -> bytes:
    """Trains a unigram model and returns its bytes; a pure function of its arguments.

    Sentences may be of any length. Every character of them becomes a piece, unless they would fill more than half of
    the vocabulary: then the rarest are left to the byte pieces, which can spell anything.

    Args:
        size: the number of ids, exactly.
        name: what to call the size in errors ("input.source_vocab_size").
        normalization: SentencePiece's rule: "nfkc" or "identity".
        symbols: texts that are a piece each, wherever they stand.

    Raises:
        DataError: `size` is too small to hold the bytes.
        VocabularyTooLarge: it is larger than the sentences can fill.
    """
    if size < (least := MIN_SIZE + len(symbols)):
        raise DataError(
            f"{name}={size} is too small: {_SPECIAL + len(symbols)} ids are special or bytes; use at least {least}"
        )
    if normalization == "nfkc":
        sentences = [unicodedata.normalize("NFKC", sentence) for sentence in sentences]
    parts = [part for sentence in sentences for part in _parts(sentence)]
    model, most = _train(parts, size, name, normalization, symbols), size
    while isinstance(model, int):  # a smaller one has fewer characters, which make fewer pieces
        most = model
        model = _train(parts, most, name, normalization, symbols) if most >= least else b""
    if most < size:
        raise VocabularyTooLarge(name, size, most, len(sentences))
    return model


def _train(
    sentences: Sequence[str], size: int, name: str, normalization: str, symbols: Sequence[str]
) -> bytes | int:
    """The bytes of a model; or, where `size` is too large, how many ids its characters are enough for."""
    sentences = _without_rare_characters(sentences, (size - _SPECIAL - len(symbols)) // 2)
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(sentences),
            model_writer=out,
            model_type="unigram",
            vocab_size=size,
            character_coverage=1.0,
            byte_fallback=True,
            normalization_rule_name=normalization,
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            user_defined_symbols=list(symbols),
            num_threads=_THREADS,
            # Pieces to start from and prune; more of them take longer and end no better on short sentences.
            seed_sentencepiece_size=min(1_000_000, max(20_000, 5 * size)),
            input_sentence_size=0,
            shuffle_input_sentence=False,
            train_extremely_large_corpus=len(sentences) > 5_000_000,
            minloglevel=2,
        )
    except RuntimeError as e:
        if match := re.search(r"Please set it to a value <= (\d+)", str(e)):
            return int(match[1])
        raise DataError(f"cannot train a vocabulary of {name}={size}: {e}") from e
    return out.getvalue()


def _parts(text: str) -> Iterator[str]:
    """A text in parts that SentencePiece reads, cut at blanks, and between characters where there are none."""
    data, at = text.translate(_IGNORED).encode(), 0
    while len(data) - at > _LONGEST_BYTES:
        end = at + _LONGEST_BYTES
        blank = data.rfind(b" ", at + 1, end + 1)
        end = blank if blank > 0 else end
        while data[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        yield data[at:end].decode()
        at = end
    yield data[at:].decode()


def _without_rare_characters(sentences: Iterable[str], most: int) -> list[str]:
    """The sentences with a space for every character that is not among the `most` frequent ones."""
    sentences = list(sentences)
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(sentence)
    counts.pop(" ", None)
    if len(counts) <= most:
        return sentences
    # Ties by code point: which characters stay must not depend on the order of the sentences.
    by_frequency = sorted(counts, key=lambda c: (-counts[c], c))
    rare = dict.fromkeys(map(ord, by_frequency[most:]), " ")
    return [sentence.translate(rare) for sentence in sentences]
