"""Makes a shortlist from pairs, and measures how many tokens of the held-out references it contains."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lingvo_moe.core.input.base_input import Progress, quiet
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding.lexical_table import TokenPairs, lexical_table
from lingvo_moe.tasks.mt.decoding.shortlist import Shortlist
from lingvo_moe.tasks.text.data.scan import scan
from lingvo_moe.tasks.text.vocabulary.special_ids import EOS_ID
from lingvo_moe.tasks.text.vocabulary.vocab_cache import sample_pairs
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # how SentencePiece calls the piece of a byte
_LONGEST = 256  # tokens of a side that are looked at
_AT_ONCE = 4096  # lines that are tokenised
# Between rounds model 1 keeps more of a source piece than the shortlist will: what is rare at first may grow.
_KEPT_BETWEEN = 4


@dataclass(frozen=True)
class ShortlistOptions:
    """The size of a shortlist, and the pairs that it is made from."""

    # The largest number of target pieces for a source piece, the likeliest by model 1.
    per_piece: int = 100
    frequent: int = 200  # how many of the most frequent target pieces are in every line's list
    max_pairs: int = 300_000  # the largest number of pairs to draw
    temperature: float = 5.0  # the temperature of the draw, as in training


@dataclass(frozen=True)
class Coverage:
    """Counts of the held-out references' tokens that the shortlists contain."""

    lines: int  # number of references
    tokens: int  # number of their tokens
    inside: int  # number of tokens that are in their line's shortlist
    size: float  # mean size of a line's shortlist


def make_shortlist(
    vocabs: NestedMap,
    data_dir: str | os.PathLike,
    languages: Sequence[str] = (),
    options: ShortlistOptions | None = None,
    progress: Progress = quiet,
) -> Shortlist:
    """Makes a shortlist from the training pairs in a directory, by model 1 and counts.

    The pieces of single bytes are in every line's list, so that any text can be spelt.

    Args:
        vocabs: NestedMap(source, target) of Vocabulary.
        data_dir: holds <lang>.tsv.gz, prepared or not.
        languages: the languages to use; empty for all.

    Raises:
        DataError: see scan.
    """
    o = options or ShortlistOptions()
    scanned = scan(data_dir, languages, progress)
    progress("drawing pairs")
    texts = sample_pairs(scanned, o.temperature, o.max_pairs)
    ids = {side: _tokenised(vocabs[side], texts[side], side, progress) for side in texts}
    pairs = TokenPairs.Join(ids["source"], ids["target"])
    keep = _KEPT_BETWEEN * o.per_piece
    table = lexical_table(pairs, vocabs.source.size, vocabs.target.size, keep, progress=progress)
    counts = np.bincount(pairs.targets, minlength=vocabs.target.size)
    frequent = np.argsort(-counts, kind="stable")[: o.frequent]
    pieces = vocabs.target.Pieces(range(vocabs.target.size))
    spelling = [i for i, piece in enumerate(pieces) if _BYTE.fullmatch(piece)]
    return Shortlist.Make(
        [ids[: o.per_piece] for ids in np.split(table.indices, table.indptr[1:-1])],
        [*frequent[counts[frequent] > 0], *spelling],
        {side: vocabs[side].model_bytes for side in ("source", "target")},
    )


def coverage(
    shortlist: Shortlist,
    vocabs: NestedMap,
    held_out: Iterable[tuple[str, Sequence[tuple[str, str]]]],
    progress: Progress = quiet,
) -> Coverage:
    """Counts the tokens of held-out references that are in their line's shortlist.

    Args:
        vocabs: NestedMap(source, target) of Vocabulary.
        held_out: `(language, pairs)`, as DevSet.items() gives them.
    """
    lines = tokens = inside = size = 0
    for lang, pairs in held_out:
        progress(f"held-out pairs of {lang}")
        sources, references = zip(*pairs)
        for source, reference in zip(
            vocabs.source.EncodeBatch(sources), vocabs.target.EncodeBatch(references)
        ):
            pieces = shortlist.Of([*source, EOS_ID])
            lines, size = lines + 1, size + len(pieces)
            tokens, inside = tokens + len(reference), inside + int(np.isin(reference, pieces).sum())
    return Coverage(lines, tokens, inside, size / max(lines, 1))


def _tokenised(
    vocab: Vocabulary, texts: Sequence[str], side: str, progress: Progress
) -> list[np.ndarray]:
    """The ids of each text, as narrow arrays: lists of Python's take ten times the memory."""
    out: list[np.ndarray] = []
    for start in range(0, len(texts), _AT_ONCE):
        progress(f"tokenising the {side}: {start:,} of {len(texts):,}")
        encoded = vocab.EncodeBatch(texts[start : start + _AT_ONCE])
        out += [np.array(ids[:_LONGEST], np.int32) for ids in encoded]
    return out
