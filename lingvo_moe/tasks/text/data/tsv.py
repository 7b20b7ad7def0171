"""Reads directories of parallel text: `<lang>.tsv`, `.tsv.gz` or `.tsv.zst`, and `dev/<lang>...` for held-out pairs.

A line is `source<TAB>english`, UTF-8; further columns are ignored. Bad lines are skipped and counted; on request the
first few of a file are reported with their numbers. A directory without any usable line is an error.

Where texts will do, files may also be `<name>.txt`, with a text a line, or `<name>.jsonl`, with an object a line, which
has a text in one field. A text is a pair without a source. TSVs come first: beside them such files are not read.
"""

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from lingvo_moe.tasks.text.data.errors import DataError, NoDataError
from lingvo_moe.tasks.text.data.opening import MAX_LINE_BYTES, read_lines

BAD_LINES_TOLD = 3
LANGUAGE = r"[A-Za-z]{2,3}(?:[_-][A-Za-z0-9]+)*"
_FILE = re.compile(rf"({LANGUAGE})\.tsv(?:\.gz|\.zst)?\Z")
_DATA = re.compile(r"\.(tsv|txt|jsonl|ndjson)(\.gz|\.zst)?\Z")  # the endings of data
_LAYOUT = "expected files such as de.tsv.gz with lines of source<TAB>english"
_TEXTS = re.compile(r"(.+?)\.(txt|jsonl)(?:\.gz|\.zst)?\Z")
_TEXTS_LAYOUT = ", or of texts alone: NAME.txt, NAME.jsonl, plain, .gz or .zst"
MAX_TEXT_BYTES = 1 << 20  # of a line


# The reasons for which lines are skipped.
_REASONS = ("no_tab", "empty_side", "invalid_utf8", "too_long", "no_json", "no_text")


def skipped_of(counts: Mapping[str, int]) -> dict[str, int]:
    """The reasons that occurred, with their counts, from those of read_pairs."""
    return {reason: counts[reason] for reason in _REASONS if counts.get(reason)}


def language_of(path: str | os.PathLike) -> str | None:
    """The language that a file is of by its name; None for one that is no `<lang>.tsv`, compressed or not."""
    match = _FILE.match(Path(path).name)
    return match[1] if match else None


def text_name(path: str | os.PathLike) -> str | None:
    """The name of a file of texts, without endings; None for another file."""
    match = _TEXTS.match(Path(path).name)
    return match[1] if match else None


def language_files(data_dir: str | os.PathLike, texts: bool = False) -> dict[str, Path]:
    """`{lang: file}` of a directory, by language; of one without such files, if `texts` will do, those by name.

    Raises:
        NoDataError: no file of that layout.
        DataError: no such directory, or two files of one language.
    """
    data_dir, layout = Path(data_dir), _LAYOUT + _TEXTS_LAYOUT * texts
    if not data_dir.is_dir():
        what = "is not a directory" if data_dir.exists() else "does not exist"
        raise DataError(f"data directory {str(data_dir)!r} {what}; {layout}")
    files: dict[str, Path] = {}
    paths = [p for p in sorted(data_dir.iterdir()) if p.is_file() and not p.name.startswith(".")]
    name_of = text_name if texts and not any(map(language_of, paths)) else language_of
    for path in paths:
        lang = name_of(path)
        if lang is None:
            continue
        if lang in files:
            raise DataError(
                f"{data_dir}: both {files[lang].name} and {path.name}; keep one of them"
            )
        files[lang] = path
    if not files:
        raise NoDataError(f"no data in {str(data_dir)!r}: {layout}")
    return files


def hidden_files(directory: Path) -> str:
    """A warning of the hidden files that would be data by their endings, as `._de.tsv`; '' if there are none."""
    names = [name for name, _ in _by_ending(directory) if name.startswith(".")]
    return f"{directory}: hidden files are not read: {', '.join(names)}" if names else ""


def unread_files(directory: Path, read: Iterable[Path], texts: bool = False) -> str:
    """A warning of the other files that would be data by their endings, as `mine.tsv`; '' if there are none.

    `read` are those that language_files gives.
    """
    taken = {path.name for path in read}
    names = [
        name
        for name, ending in _by_ending(directory)
        if name not in taken and not name.startswith(".") and (texts or ending == "tsv")
    ]
    layout = _LAYOUT + _TEXTS_LAYOUT * texts
    return f"{directory}: these files are not read: {', '.join(names)}; {layout}" if names else ""


def _by_ending(directory: Path) -> list[tuple[str, str]]:
    """The names of the files with an ending of data, and that ending, such as 'tsv'."""
    names = (path.name for path in sorted(directory.iterdir()) if path.is_file())
    return [(name, match[1]) for name in names if (match := _DATA.search(name))]


def read_pairs(
    path: str | os.PathLike,
    counts: Counter[str] | None = None,
    warn: Callable[[str], None] | None = None,
    field: str = "text",
) -> Iterator[tuple[str, str]]:
    """Streams the `(source, english)` pairs of a file, stripped; of a file of texts `("", text)`, of JSON that `field`.

    `counts` gets the number of good lines, and of others by reason; `warn` is called for each of the first bad lines
    and, at the end, with their number.

    Raises:
        DataError: the file cannot be read, or its compressed data is damaged (naming the last good line).
    """
    counts = counts if counts is not None else Counter()
    parsed, most = parse, MAX_LINE_BYTES
    if text_name(path):
        is_json = ".jsonl" in Path(path).suffixes
        parsed, most = functools.partial(_text, field=field if is_json else ""), MAX_TEXT_BYTES
    for number, text, reason in read_lines(path, most):
        pair = None
        if text is not None:
            reason, pair = parsed(text)
        reason, _, detail = reason.partition(": ")
        counts[reason] += 1
        if pair:
            yield pair
        elif warn and counts.total() - counts["good"] <= BAD_LINES_TOLD:
            warn(f"{path}:{number}: skipped: {reason.replace('_', ' ')}{detail and ': ' + detail}")
    if warn and (skipped := skipped_of(counts)):
        number = sum(skipped.values())
        warn(f"{path}: skipped {number} of {counts.total()} lines ({reasons(skipped)})")


def parse(line: str) -> tuple[str, tuple[str, str] | None]:
    """`("good", pair)` of a line, or `(reason, None)`; see _REASONS."""
    source, tab, rest = line.partition("\t")
    if not tab:
        return "no_tab", None
    source, english = source.strip(), rest.partition("\t")[0].strip()
    if not source or not english:
        return "empty_side", None
    return "good", (source, english)


def _text(line: str, field: str) -> tuple[str, tuple[str, str] | None]:
    """Parses a line that is a text, or with a field a JSON object; a reason may say more after a colon."""
    try:
        text = text_of(line, field) if field else line
    except ValueError as e:
        return str(e), None
    return ("good", ("", text.strip())) if text.strip() else ("empty_side", None)


def text_of(line: str | bytes, field: str) -> str:
    """The text in a field of a JSON object; halves of surrogate pairs, which UTF-8 lacks, are U+FFFD.

    Raises ValueError: 'no_json: ' or 'no_text: ', with what would be right.
    """
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        item = None
    if not isinstance(item, dict):
        raise ValueError("no_json: a line must be an object")
    if not isinstance(item.get(field), str):
        there = ", ".join(repr(name) for name, value in item.items() if isinstance(value, str))
        raise ValueError(f"no_text: no string in field {field!r}; strings are in {there or 'none'}")
    return item[field].encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def fits(source: str, target: str) -> bool:
    """Whether the line of a pair is one that read_pairs takes: of at most MAX_LINE_BYTES."""
    if 4 * (len(source) + len(target) + 2) <= MAX_LINE_BYTES:  # a character has four bytes at most
        return True
    return len(f"{source}\t{target}\n".encode()) <= MAX_LINE_BYTES


def reasons(skipped: Mapping[str, int]) -> str:
    """Counts by reason, for people: '2 no tab, 1 empty side'."""
    return ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in skipped.items())
