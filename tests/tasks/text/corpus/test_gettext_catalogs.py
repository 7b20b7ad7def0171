import struct

import pytest
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po

from lingvo_moe.tasks.text.corpus import gettext_catalogs
from lingvo_moe.tasks.text.data.errors import DataError

_PO = r"""
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"
"Plural-Forms: nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 ? 1 : 2);\n"

#: here.py:1
msgid "House"
msgstr "Дом"

msgctxt "to open"
msgid "Open \"%s\""
msgstr ""
"Открыть "
"\"%s\""

#, fuzzy
msgid "Tree"
msgstr "Дуб"

msgid "River"
msgstr ""

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d файл"
msgstr[1] "%d файла"
msgstr[2] "%d файлов"

#~ msgid "Old"
#~ msgstr "Старый"
"""
_PAIRS = {
    ("Дом", "House"),
    ('Открыть "%s"', 'Open "%s"'),
    ("%d файл", "%d file"),
    ("%d файла", "%d files"),
    ("%d файлов", "%d files"),
}


def test_po_and_mo_give_the_same_pairs(tmp_path):
    po, mo = tmp_path / "x.po", tmp_path / "x.mo"
    po.write_text(_PO, "utf-8")
    with open(po, "rb") as source, open(mo, "wb") as compiled:
        write_mo(compiled, read_po(source))
    assert set(gettext_catalogs.catalog_pairs(po)) == _PAIRS
    assert set(gettext_catalogs.catalog_pairs(mo)) == _PAIRS


def test_a_single_plural_form_translates_both_numbers(tmp_path):
    po = tmp_path / "ja.po"
    po.write_text(
        'msgid ""\nmsgstr "Plural-Forms: nplurals=1; plural=0;\\n"\n\n'
        'msgid "%d day"\nmsgid_plural "%d days"\nmsgstr[0] "%d日"\n',
        "utf-8",
    )
    assert list(gettext_catalogs.catalog_pairs(po)) == [("%d日", "%d day"), ("%d日", "%d days")]


def _mo(order: str, *pairs: tuple[bytes, bytes]) -> bytes:
    """A compiled catalog by the format's description: header, two tables of sizes and places, texts."""
    at = 28 + 16 * len(pairs)
    tables, body = [], b""
    for texts in zip(*pairs):
        for text in texts:
            tables += [len(text), at + len(body)]
            body += text + b"\0"
    head = 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0
    return struct.pack(f"{order}{7 + len(tables)}I", *head, *tables) + body


@pytest.mark.parametrize("order", ["<", ">"])
def test_compiled_catalogs_of_both_byte_orders_and_other_charsets(tmp_path, order):
    header = (
        b"PO-Revision-Date: YEAR-MO-DA HO:MI+ZONE\n"  # as in some that are published
        b"Content-Type: text/plain; charset=KOI8-R\nPlural-Forms: nplurals=2; plural=n > 1;\n"
    )
    path = tmp_path / "x.mo"
    path.write_bytes(_mo(
        order,
        (b"", header),
        (b"menu\4House", "Дом".encode("koi8-r")),
        (b"%d tree\0%d trees", "%d дуб\0%d дуба".encode("koi8-r")),
    ))  # fmt: skip
    assert list(gettext_catalogs.catalog_pairs(path)) == [
        ("Дом", "House"),
        ("%d дуб", "%d tree"),
        ("%d дуба", "%d trees"),
    ]


def test_a_rule_of_plurals_that_is_none_matters_where_there_are_plurals(tmp_path):
    header = b"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\n"
    path = tmp_path / "x.mo"
    path.write_bytes(_mo("<", (b"", header), (b"House", b"Haus")))
    assert list(gettext_catalogs.catalog_pairs(path)) == [("Haus", "House")]
    path.write_bytes(_mo("<", (b"", header), (b"%d tree\0%d trees", b"%d Baum\0%d Bume")))
    with pytest.raises(DataError, match=r"x\.mo: not a gettext catalog"):
        list(gettext_catalogs.catalog_pairs(path))


def test_packages_that_are_missing_are_named_as_pip_takes_them(monkeypatch):
    monkeypatch.setattr(gettext_catalogs, "PACKAGES", {"Django": "1.0", "no-such-one": "2.3"})
    with pytest.raises(DataError, match=r"run `pip install --no-deps no-such-one==2\.3`, or name"):
        gettext_catalogs.catalogs("no-such-one")


@pytest.mark.parametrize(
    "content", [b"", b"not a catalog at all", b"\xde\x12\x04\x95" + b"\xff" * 30]
)
def test_a_broken_catalog_is_named(tmp_path, content):
    path = tmp_path / "x.mo"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.mo: not a gettext catalog"):
        list(gettext_catalogs.catalog_pairs(path))


def test_django_has_catalogs_in_many_languages():
    found = gettext_catalogs.catalogs("Django")
    languages = {lang for lang, _ in found}
    assert {"de", "no", "zh", "sw"} <= languages
    assert not {"en", "nb", "nn"} & languages
    assert len(languages) > 60
    paths = [path for _, path in found]
    assert len(set(paths)) == len(paths)
    assert all(path.suffix == ".mo" for path in paths)
