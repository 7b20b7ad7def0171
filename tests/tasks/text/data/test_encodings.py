"""Text that is no UTF-8 is refused with the command that converts it."""

import gzip
import io
import random
import shutil
import subprocess

import pytest
import zstandard

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.opening import read_lines
from lingvo_moe.tasks.text.decoding.line_stream import read_lines as read_stream

_MALTESE = "Il-kelb ħa ż-żarbun\tThe dog took the shoes\n" * 60
_RUSSIAN = "Дом у реки был старый\tThe house by the river was old\n" * 60
_CHINESE = "河边的老房子非常漂亮，我们都很喜欢它。\n" * 60


@pytest.mark.parametrize("packer", ["", "gz", "zst"])
@pytest.mark.parametrize("text, encoding, said", [
    (_MALTESE, "utf-16", "is UTF-16; convert it to UTF-8: {}iconv -f UTF-16 -t UTF-8"),
    (_MALTESE, "utf-32", "is UTF-32; convert it to UTF-8: {}iconv -f UTF-32 -t UTF-8"),
    (_MALTESE, "utf-16-le", "looks like UTF-16; convert it to UTF-8: {}iconv -f UTF-16LE -t UTF-8"),
    (_RUSSIAN, "utf-16-be", "looks like UTF-16; convert it to UTF-8: {}iconv -f UTF-16BE -t UTF-8"),
    (_CHINESE, "utf-16-le", "looks like UTF-16; convert it to UTF-8: {}iconv -f UTF-16LE -t UTF-8"),
    (_CHINESE, "utf-32-be", "looks like UTF-32; convert it to UTF-8: {}iconv -f UTF-32BE -t UTF-8"),
    (_RUSSIAN, "cp1251", "is no UTF-8, in 60 of 60 lines beyond ASCII, .*iconv -f WINDOWS-1251 -t UTF-8"),
])  # fmt: skip
def test_the_command_converts_the_file(text, encoding, said, packer, tmp_path):
    pack = {"": bytes, "gz": gzip.compress, "zst": zstandard.compress}[packer]
    path = tmp_path / ("ru.tsv" + bool(packer) * f".{packer}")
    path.write_bytes(pack(text.encode(encoding)))
    with pytest.raises(DataError, match=said.format(".*" if packer else "")) as error:
        list(read_lines(path))
    command = str(error.value).split("convert it to UTF-8: ")[1]
    if packer != "zst" or shutil.which("zstd"):
        subprocess.run(command, shell=True, check=True)
        assert [line for _, line, _ in read_lines(path)] == text.splitlines()


def test_an_older_encoding_is_named_by_the_language(tmp_path):
    for name, encoding in (("Europarl.de-en.de", "WINDOWS-1252"), ("pl.txt", "WINDOWS-1250")):
        (tmp_path / name).write_bytes(b"\xbf\xf3\xb3ty\n" * 12)
        with pytest.raises(DataError, match=f"but perhaps {encoding}"):
            list(read_lines(tmp_path / name))


def test_a_few_damaged_lines_and_odd_characters_are_no_other_encoding(tmp_path):
    lines = [b"caf\xe9\n"] * 9 + ["café\n".encode()] * 4 + [b"a\0b\n", b"plain\n"]
    random.Random(0).shuffle(lines)
    (tmp_path / "fr.tsv").write_bytes(b"".join(lines))
    assert [reason for *_, reason in read_lines(tmp_path / "fr.tsv")].count("invalid_utf8") == 9
    (tmp_path / "fr.tsv").write_bytes(b"".join([b"caf\xe9\n"] * 400 + ["café\n".encode()] * 500))
    assert len(list(read_lines(tmp_path / "fr.tsv"))) == 900
    for content in (b"", b"\n", b"a", b"\0", b"\0\0\0\0a\tb\n", b"\xff\n"):
        (tmp_path / "fr.tsv").write_bytes(content)
        list(read_lines(tmp_path / "fr.tsv"))


def test_a_large_file_is_refused_before_its_end(tmp_path):
    (tmp_path / "de.tsv").write_bytes(b"Stra\xdfe\tstreet\n" * 3000)
    lines = read_lines(tmp_path / "de.tsv")
    with pytest.raises(DataError, match="in 1,000 of 1,000 lines"):
        list(lines)


def test_a_stream_of_lines_is_refused_too():
    assert len(list(read_stream(io.BytesIO(_RUSSIAN.encode())))) == 60
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(DataError, match=r"the input .*UTF-"):
            list(read_stream(io.BytesIO(_RUSSIAN.encode(encoding))))
