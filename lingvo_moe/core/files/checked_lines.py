"""Appends rows to files, each as a line of JSON with a checksum, so that a line that a kill cut off is known."""

import json
import os
import re
import zlib
from collections.abc import Mapping
from typing import Any

from lingvo_moe.core.files.files import append, naming

# The last thing in a line: the CRC-32 of the line as it would be without it.
_CHECKED = re.compile(rb'(.*), "crc32": "([0-9a-f]{8})"}')


def append_row(path: str | os.PathLike, row: Mapping[str, Any]) -> None:
    """Appends a row, which is not empty. Raises OSError: e.g. a full disk; it names the file."""
    body = json.dumps(row).encode()
    append(path, b'%s, "crc32": "%08x"}\n' % (body[:-1], zlib.crc32(body)))


def parse(line: bytes, must_be_checked: bool = True) -> dict[str, Any] | None:
    """The row of a line without its line break; None for a damaged one.

    `must_be_checked`: whether a line without checksum counts as damaged.
    """
    match = _CHECKED.fullmatch(line)
    body = match[1] + b"}" if match else line
    if (match and zlib.crc32(body) != int(match[2], 16)) or (must_be_checked and not match):
        return None
    try:
        row = json.loads(body)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def end_last_line(path: str | os.PathLike) -> None:
    """Removes an incomplete last line, which a kill left, before more is appended."""
    if not os.path.exists(path):
        return
    with naming(path), open(path, "rb+") as file:
        end, line = 0, b""
        for line in file:
            end += len(line)
        if not line or line.endswith(b"\n"):
            return
        if parse(line):
            file.write(b"\n")
        else:
            file.truncate(end - len(line))
