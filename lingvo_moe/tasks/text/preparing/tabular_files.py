"""Reads pairs out of tables, a row at a time: CSV, Parquet, and the Arrow files of saved data sets of Hugging Face."""

import csv
from collections.abc import Iterator, Sequence

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.opening import read_lines
from lingvo_moe.tasks.text.preparing.lines import (
    Fields,
    ReadLine,
    Source,
    bad,
    is_language,
    pairs_of_item,
)

_ROWS = 1000  # that are decoded together
_MOST_BYTES = 1 << 26  # of a batch from which so many are


def read_csv(source: Source, fields: Fields) -> Iterator[ReadLine]:
    """Streams the pairs of a CSV, whose first line names its columns; it has commas, semicolons or tabs between them.

    Raises DataError: no UTF-8, columns are missing, or a quotation mark is not closed.
    """
    lines = read_lines(source.path)
    skipped: list[ReadLine] = []

    def texts() -> Iterator[str]:
        for number, text, reason in lines:
            if text is None:
                skipped.append(bad(number, source.lang, reason))
            else:
                yield f"{text}\n"

    first = next(texts(), "")
    between = max(",;\t", key=first.count)
    (names,) = csv.reader([first], delimiter=between)
    lang = _check_columns(source, names, fields)
    rows = csv.reader(texts(), delimiter=between, strict=True)
    try:
        for row in rows:
            yield from skipped
            skipped.clear()
            if row:
                yield from pairs_of_item(rows.line_num + 1, dict(zip(names, row)), lang, fields)
    except csv.Error as e:
        raise DataError(f"{source.path}:{rows.line_num + 1}: no CSV: {e}") from e
    yield from skipped


def read_arrow(source: Source, fields: Fields) -> Iterator[ReadLine]:
    """Streams the pairs of a Parquet or Arrow file. Raises DataError: it is damaged, or columns are missing."""
    import pyarrow as pa
    import pyarrow.parquet

    number = 0
    try:
        with pa.memory_map(source.path) as file:
            if source.form == "parquet":
                table = pyarrow.parquet.ParquetFile(file)
                names = table.schema_arrow.names
                read = [name for name in names if name in _read_columns(names, fields)]
                batches = table.iter_batches(_ROWS, columns=read)
            else:
                batches = pa.ipc.open_stream(file)
                names = batches.schema.names
            lang = _check_columns(source, names, fields)
            for batch in batches:
                batch.validate(full=True)  # anybody may have written its offsets
                # Many rows may be of one long text.
                rows = _ROWS if batch.nbytes < _MOST_BYTES else 1
                for at in range(0, batch.num_rows, rows):
                    for item in batch.slice(at, rows).to_pylist():
                        number += 1
                        yield from pairs_of_item(number, item, lang, fields)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        where = f"{source.path}, row {number + 1}" if number else source.path
        raise DataError(f"{where}: cannot be read, or damaged: {e}") from e


def _read_columns(names: Sequence[str], fields: Fields) -> set[str]:
    """The columns that may hold a language, or a text in one."""
    columns = {*fields.source, *fields.target, *fields.lang, "translation"}
    return columns | set(filter(is_language, names))


def _check_columns(source: Source, names: Sequence[str], fields: Fields) -> str | None:
    """The language of the sources in a table; None where its rows name it. Raises DataError: it lacks columns."""
    lang, there = source.lang, {*names}
    if lang is None and len(names) == 2 and fields.target_lang in there:
        (other,) = there - {fields.target_lang}
        lang = other if is_language(other) else None
    by_role = there & {*fields.source} and there & {*fields.target}
    if "translation" in there or (by_role and (lang or there & {*fields.lang})):
        return lang
    if lang and {lang, fields.target_lang} <= there:
        return lang
    raise DataError(
        f"{source.path}: its columns are {', '.join(map(repr, names)) or 'none'}; expected source, target and lang, or"
        f" translation, or {lang or 'de'} and {fields.target_lang}; --json_fields names others, as in"
        " --json_fields=SOURCE,TARGET, and the file's name a language, as in de.csv"
    )
