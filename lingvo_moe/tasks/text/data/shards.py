"""Writes the tokenised pairs of a language into ArrayRecord shards of a bounded number of pairs, with their lengths."""

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from lingvo_moe.core.files.files import append, not_written
from lingvo_moe.core.nested_map import NestedMap

# Some 25 MB of short sentences. Reading a record takes longer the more groups a shard has.
PAIRS_PER_SHARD = 262_144
LENGTHS = np.dtype("<u2")
_TOKENISED_AT_ONCE = 4096
MAX_IDS = 2**16 - 1  # of a side: its number is of 16 bits
# Records of a group are decoded together, and the index holds a place a group. Measured, for 100,000 records of 90
# bytes: a read takes 11 us with groups of 32, 240 us with groups of one (whose index is copied for each read).
_GROUP_SIZE = 32
_WRITER_OPTIONS = f"group_size:{_GROUP_SIZE},uncompressed"


@dataclass
class LanguageShards:
    """The shards that were written for a language."""

    # `records`, `bytes`: of each shard.
    records: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    # `source_tokens`, `target_tokens`: ids in all, without bos and eos.
    source_tokens: int = 0
    target_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # pairs that gave no record, by reason


def shard_file(directory: Path, lang: str, shard: int) -> Path:
    return directory / f"{lang}-{shard:05d}.array_record"


def lengths_file(directory: Path, lang: str) -> Path:
    """The path of the lengths of a language's pairs: LENGTHS [N, 2], the numbers of source and of target ids."""
    return directory / f"{lang}.lengths"


def shard_language(path: str | os.PathLike) -> str | None:
    """The language of a shard_file or a lengths_file; None for another file."""
    match = re.fullmatch(r"(.+)(-\d{5,}\.array_record|\.lengths)", os.path.basename(path))
    return match[1] if match else None


def id_dtype(vocabs: NestedMap) -> np.dtype:
    """The dtype of ids on disk: the narrowest that holds those of both vocabularies."""
    return np.dtype("<u4" if max(vocabs.source.size, vocabs.target.size) > MAX_IDS else "<u2")


def write_shards(
    pairs: Iterable[tuple[str, str]],
    directory: Path,
    lang: str,
    vocabs: NestedMap,
    pairs_per_shard: int = PAIRS_PER_SHARD,
    report: Callable[[int], None] = lambda pairs: None,
) -> LanguageShards:
    """Tokenises `(source, target)` texts and writes their shards and lengths; records.py describes a record.

    Texts alone have '' as their source.

    `report` is called with the number of pairs that were done since the last call.

    Raises:
        OSError: a file cannot be written; it is named.
    """
    out, dropped = LanguageShards(), Counter[str]()
    dtype, pairs = id_dtype(vocabs), iter(pairs)
    writer = None
    try:
        while chunk := list(itertools.islice(pairs, _TOKENISED_AT_ONCE)):
            sources, targets = zip(*chunk)
            lengths: list[tuple[int, int]] = []
            for text, source, target in zip(
                sources, vocabs.source.EncodeBatch(sources), vocabs.target.EncodeBatch(targets)
            ):
                if (text and not source) or not target:
                    dropped["empty_after_tokenising"] += 1
                    continue
                if max(len(source), len(target)) > MAX_IDS:
                    dropped["too_long"] += 1
                    continue
                if writer is None:
                    path = shard_file(directory, lang, len(out.records))
                    out.records.append(0)
                    writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
                writer.write(np.array([len(source), *source, *target], dtype).tobytes())
                out.records[-1] += 1
                lengths.append((len(source), len(target)))
                if out.records[-1] == pairs_per_shard:
                    writer.close()
                    writer = None
            if lengths:
                written = np.array(lengths, LENGTHS)
                append(lengths_file(directory, lang), written.tobytes())
                source_tokens, target_tokens = written.sum(axis=0, dtype=np.int64).tolist()
                out.source_tokens += source_tokens
                out.target_tokens += target_tokens
            report(len(chunk))
        if writer is not None:
            writer.close()
            writer = None
    except RuntimeError as e:
        raise not_written(e, shard_file(directory, lang, len(out.records) - 1)) from e
    finally:
        if writer is not None:  # its shard is of no use any more
            with contextlib.suppress(RuntimeError):
                writer.close()
    out.dropped = dict(dropped)
    out.bytes = [shard_file(directory, lang, i).stat().st_size for i in range(len(out.records))]
    return out
