"""Reads pairs out of a source of any form, a line at a time."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.opening import read_lines
from lingvo_moe.tasks.text.preparing.lines import Fields, ReadLine, Source, bad, pair, pairs_of_item
from lingvo_moe.tasks.text.preparing.tabular_files import read_arrow, read_csv
from lingvo_moe.tasks.text.preparing.tmx import read_tmx

# (number of a line, its text, its language where the source has one) -> its pairs, good and bad.
_Parse = Callable[[int, str, str | None], Iterable[ReadLine]]


def read_source(source: Source, fields: Fields) -> Iterator[ReadLine]:
    """Streams the lines of a source, good and bad.

    Raises DataError: a file cannot be read or is damaged, lacks columns, or two files have different numbers of lines.
    """
    return FORMATS[source.form].read(source, fields)


@dataclasses.dataclass(frozen=True)
class Format:
    """A form of sources."""

    read: Callable[[Source, Fields], Iterator[ReadLine]]
    endings: tuple[str, ...] = ()  # the endings of its files' names
    mixed: bool = True  # whether its lines may name their languages
    texts: bool = False  # whether it holds texts without a translation


def _lines_of(parse_with: Callable[[Fields], _Parse]) -> Callable[..., Iterator[ReadLine]]:
    """Reads a file whose lines each hold what a parser takes."""

    def read(source: Source, fields: Fields) -> Iterator[ReadLine]:
        parse = parse_with(fields)
        for number, text, reason in read_lines(source.path):
            if text is None:
                yield bad(number, source.lang, reason)
                continue
            try:
                yield from parse(number, text, source.lang)
            except DataError as e:
                raise DataError(f"{source.path}:{number}: {e}") from None

    return read


def _of_columns(fields: Fields) -> _Parse:
    at = {name: i for i, name in enumerate(fields.columns) if name != "_"}
    last = max(at.values())

    def parse(number: int, text: str, lang: str | None) -> Iterable[ReadLine]:
        columns = text.split("\t", last + 1)
        if number == 1 and _is_header(text.split("\t"), lang, fields):
            return (bad(number, lang, "header"),)
        if len(columns) <= last:
            return (bad(number, lang, "no_tab"),)
        lang = lang or columns[at["lang"]].strip()
        return (pair(number, lang, columns[at["source"]], columns[at["target"]]),)

    return parse


def _is_header(columns: Sequence[str], lang: str | None, fields: Fields) -> bool:
    """Whether the first line names the columns. Raises DataError: others than those that are read."""
    names = dict.fromkeys((*fields.target, fields.target_lang.lower()), "target")
    names |= dict.fromkeys(fields.lang, "lang") | dict.fromkeys(fields.source, "source")
    names |= {lang.lower(): "source"} if lang else {}
    said = [names.get(column.strip().lower(), "_") for column in columns]
    if not {"source", "target"} <= {*said}:
        return False
    read = [(name, other) for name, other in zip(fields.columns, said) if name != "_"]
    if any(name != other for name, other in read):
        raise DataError(
            f"the first line names the columns {', '.join(columns)}, but they are read as {','.join(fields.columns)}:"
            f" say --columns={','.join(said)}"
        )
    return True


def _of_text(fields: Fields) -> _Parse:
    del fields
    return lambda number, text, lang: (pair(number, lang, text, text),)


def _of_json(fields: Fields) -> _Parse:
    def parse(number: int, text: str, lang: str | None) -> Iterable[ReadLine]:
        try:
            item = json.loads(text)
        except (ValueError, RecursionError):
            item = None
        if isinstance(item, dict):
            return pairs_of_item(number, item, lang, fields)
        return (bad(number, lang, "bad_json"),)

    return parse


def _read_two_files(source: Source, fields: Fields) -> Iterator[ReadLine]:
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


def _read_tfds(source: Source, fields: Fields) -> Iterator[ReadLine]:
    from lingvo_moe.tasks.text.preparing.tfds_source import read_builder

    return read_builder(source.path, fields)


FORMATS = {
    "tsv": Format(_lines_of(_of_columns), ("tsv",), mixed=False),
    "jsonl": Format(_lines_of(_of_json), ("jsonl", "ndjson")),
    "csv": Format(read_csv, ("csv",)),
    "tmx": Format(read_tmx, ("tmx",)),
    "parquet": Format(read_arrow, ("parquet",)),
    "arrow": Format(read_arrow, ("arrow",)),
    "txt": Format(_lines_of(_of_text), ("txt",), mixed=False, texts=True),
    "lines": Format(_read_two_files),  # two files
    "tfds": Format(_read_tfds),  # a builder of TensorFlow Datasets
}
