"""Notices text that is no UTF-8, and says how to convert it. A file with a few damaged lines is read all the same."""

import codecs
import os
import re
import shlex
from pathlib import Path

from lingvo_moe.tasks.text.data.errors import DataError

START = 8192  # bytes of a file that are looked at first
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # which begins as UTF-16 does
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_PACKERS = {".gz": "gzip", ".zst": "zstd"}
# What languages were written in before UTF-8, most often; others in WINDOWS-1252.
_OLDER = {
    "WINDOWS-1250": "bs cs hr hu pl ro sk sl sq",
    "WINDOWS-1251": "be bg kk ky mk mn ru sr tg uk",
    "WINDOWS-1253": "el",
    "WINDOWS-1254": "az tr",
    "WINDOWS-1255": "he yi",
    "WINDOWS-1256": "ar fa ps ur",
    "WINDOWS-1257": "et lt lv",
    "WINDOWS-1258": "vi",
    "SHIFT_JIS": "ja",
    "GB18030": "zh",
    "EUC-KR": "ko",
    "TIS-620": "th",
}
_ENOUGH, _MANY = 10, 1000  # lines


def check_start(path: str | os.PathLike, start: bytes) -> None:
    """Raises DataError where a file's first bytes are UTF-16 or UTF-32: by a mark, or by zeros in each unit."""
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            raise _other_encoding(path, name, f"is {name}")
    zeros = [start[at::4].count(0) for at in range(4)]
    for order, at in (("BE", 0), ("LE", 1)):
        some, of_unit = zeros[at] + zeros[at + 2], zeros[2 * at : 2 * at + 2]
        if min(of_unit) > len(start) // 4 * 0.9 > 0:
            raise _other_encoding(path, f"UTF-32{order}", "looks like UTF-32")
        if some > 2 and some > sum(zeros) * 0.95 and some > len(start) / 400:
            raise _other_encoding(path, f"UTF-16{order}", "looks like UTF-16")


class Utf8Lines:
    """Counts the lines of a file that are UTF-8, of those with more than ASCII."""

    def __init__(self, path: str | os.PathLike):
        self._path, self._good, self._bad = path, 0, 0

    def Decode(self, line: bytes) -> str | None:
        """The text of a line; None of one that is no UTF-8. Raises DataError after many of these, as Check."""
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            self._bad += 1
            if self._bad == _MANY:
                self.Check()
            return None
        self._good += not line.isascii()
        return text

    def Check(self) -> None:
        """Raises DataError where more lines are no UTF-8 than are: the file is in another encoding."""
        if self._bad >= _ENOUGH and self._bad > self._good:
            names = re.split(r"[.\-_]", Path(self._path).name.lower())
            older = (name for name, langs in _OLDER.items() if {*names} & {*langs.split()})
            name = next(older, "WINDOWS-1252")
            what = f"is no UTF-8, in {self._bad:,} of {self._bad + self._good:,} lines beyond ASCII, but perhaps {name}"
            raise _other_encoding(self._path, name, what)


def _other_encoding(path: str | os.PathLike, encoding: str, what: str) -> DataError:
    name, new = shlex.quote(str(path)), shlex.quote(f"{path}.new")
    command = f"iconv -f {encoding} -t UTF-8 {name} >{new}"
    if packer := _PACKERS.get(Path(path).suffix):
        command = f"{packer} -dc {name} | iconv -f {encoding} -t UTF-8 | {packer} >{new}"
    return DataError(f"{path} {what}; convert it to UTF-8: {command} && mv {new} {name}")
