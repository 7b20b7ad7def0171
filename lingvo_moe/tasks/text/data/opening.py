"""Opens text files, plain or compressed with gzip or Zstandard, and reads their lines with bounded memory."""

import codecs
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import zstandard

from lingvo_moe.tasks.text.data.encodings import START, Utf8Lines, check_start
from lingvo_moe.tasks.text.data.errors import DataError

COMPRESSIONS = (".gz", ".zst")
MAX_LINE_BYTES = 20_000
_BLOCK = 8192  # of compressed bytes: what they become is held in memory


def open_binary(path: str | os.PathLike) -> io.BufferedReader:
    """A file for reading, decompressed on the way as its name says: .gz, .zst or neither.

    What is wrong with the compressed bytes is raised while reading: OSError, EOFError or zlib.error.
    """
    suffix = Path(path).suffix
    if suffix == ".gz":
        return cast(io.BufferedReader, gzip.open(path))
    if suffix == ".zst":
        return io.BufferedReader(_ZstandardFile(path), 1 << 17)
    return open(path, "rb")


def read_lines(
    path: str | os.PathLike, most: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, str | None, str]]:
    """Streams the lines of a file, also one without line ends, in bounded memory; those of up to `most` bytes.

    Yields:
        `(number, text, "")`, numbers from 1, the text without its line end and a leading byte order mark; or
        `(number, None, reason)` for what cannot be used: 'too_long' or 'invalid_utf8'.

    Raises:
        DataError: the file cannot be read, its compressed data is damaged (naming the line), or it is no UTF-8.
    """
    number, lines = 0, Utf8Lines(path)
    try:
        with open_binary(path) as file:
            check_start(path, file.peek(START)[:START])
            while line := file.readline(most + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if len(line) > most:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(most + 1)
                    yield number, None, "too_long"
                    continue
                if (text := lines.Decode(line)) is None:
                    yield number, None, "invalid_utf8"
                    continue
                yield number, text.rstrip("\r\n"), ""
        lines.Check()
    except (OSError, EOFError, zlib.error) as e:
        where = f"{path}:{number + 1}" if number else str(path)
        raise DataError(f"{where}: cannot be read, damaged or cut short: {e}") from e


class _ZstandardFile(io.RawIOBase):
    """The text of a Zstandard file of any number of frames; a file cut short is an error, as gzip's is."""

    def __init__(self, path: str | os.PathLike):
        self._raw = io.FileIO(path)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._compressed = self._text = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer) -> int:
        while not self._text:
            self._compressed = self._compressed or self._raw.read(_BLOCK)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("compressed file ended within a frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                self._text = self._frame.decompress(self._compressed)
            except zstandard.ZstdError as e:
                raise OSError(str(e)) from e
            self._compressed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        n = min(len(buffer), len(self._text))
        buffer[:n], self._text = self._text[:n], self._text[n:]
        return n
