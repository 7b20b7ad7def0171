"""Reads pairs out of a source, a line at a time: TSV, JSON lines, two files side by side, texts, a TFDS builder."""

import itertools
import json
from collections.abc import Iterator

from lingvo_moe.tasks.mt.input.errors import DataError
from lingvo_moe.tasks.mt.input.opening import read_lines
from lingvo_moe.tasks.mt.input.preparing.lines import Line, bad, pair, pairs_of_item
from lingvo_moe.tasks.mt.input.preparing.sources import Fields, Source


def read_source(source: Source, fields: Fields) -> Iterator[Line]:
    """Streams the lines of a source, good and bad.

    Raises DataError: a file cannot be read or is damaged, or two files have different numbers of lines.
    """
    if source.form == "tfds":
        from lingvo_moe.tasks.mt.input.preparing.tfds_source import read_builder

        return read_builder(source.path, fields)
    readers = {"tsv": _read_tsv, "jsonl": _read_json, "lines": _read_two_files, "txt": _read_texts}
    return readers[source.form](source, fields)


def _read_tsv(source: Source, fields: Fields) -> Iterator[Line]:
    at = {name: fields.columns.index(name) for name in fields.columns}
    last = max(i for name, i in at.items() if name != "_")
    for number, text, reason in read_lines(source.path):
        if text is None:
            yield bad(number, source.lang, reason)
            continue
        columns = text.split("\t", last + 1)
        if len(columns) <= last:
            yield bad(number, source.lang, "no_tab")
            continue
        lang = source.lang or columns[at["lang"]].strip()
        yield pair(number, lang, columns[at["source"]], columns[at["target"]])


def _read_two_files(source: Source, fields: Fields) -> Iterator[Line]:
    del fields
    lines = read_lines(source.path), read_lines(source.target or "")
    for ours, theirs in itertools.zip_longest(*lines):
        if ours is None or theirs is None:
            done = (ours or theirs)[0]
            longer = done + sum(1 for _ in lines[ours is None])
            counts = (longer, done - 1) if theirs is None else (done - 1, longer)
            raise DataError(
                f"{source.path} has {counts[0]:,} lines and {source.target} has {counts[1]:,}: the lines of a pair"
                " of files must belong together, one by one"
            )
        number, text, reason = ours
        if text is None or theirs[1] is None:
            yield bad(number, source.lang, reason or theirs[2])
        else:
            yield pair(number, source.lang, text, theirs[1])


def _read_texts(source: Source, fields: Fields) -> Iterator[Line]:
    del fields
    for number, text, reason in read_lines(source.path):
        if text is None:
            yield bad(number, source.lang, reason)
        else:
            yield pair(number, source.lang, text, text)


def _read_json(source: Source, fields: Fields) -> Iterator[Line]:
    for number, text, reason in read_lines(source.path):
        if text is None:
            yield bad(number, source.lang, reason)
            continue
        try:
            item = json.loads(text)
        except (ValueError, RecursionError):
            item = None
        if not isinstance(item, dict):
            yield bad(number, source.lang, "bad_json")
            continue
        yield from pairs_of_item(number, item, source.lang, fields)
