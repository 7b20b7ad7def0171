"""The package by pyproject.toml: its ranges of versions, its extras, and the packages of the wheel."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lingvo_moe.tasks.text.corpus.gettext_catalogs import PACKAGES as CORPUS_PACKAGES
from tools.import_graph import PACKAGES, ROOT

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
_EXTRAS = _PROJECT["optional-dependencies"]
_ALL = [
    Requirement(text) for group in (_PROJECT["dependencies"], *_EXTRAS.values()) for text in group
]


def _pinned(file: str) -> dict[str, str]:
    """The versions of a requirements file, by package."""
    lines = re.findall(
        r"^([\w.-]+)(?:\[\w+\])?==(\S+)", (ROOT / file).read_text("utf-8"), re.MULTILINE
    )
    return {canonicalize_name(name): version for name, version in lines}


def _ranges() -> dict[str, Requirement]:
    """The requirements that allow more than one version."""
    found = {canonicalize_name(r.name): r for r in _ALL}
    return {name: r for name, r in found.items() if not str(r.specifier).startswith("==")}


def test_the_lowest_versions_are_those_that_are_tested():
    lowest = {
        name: s.version for name, r in _ranges().items() for s in r.specifier if s.operator == ">="
    }
    assert lowest.keys() == _ranges().keys()
    assert _pinned("requirements-low.txt") == lowest


@pytest.mark.parametrize("requirement", _ALL, ids=str)
def test_a_checkout_has_versions_in_the_ranges(requirement):
    optional = (f"requirements-{name}.txt" for name in ("gpu", "beam", "tokenizers", "smollm2"))
    files = "requirements.lock.txt", *optional
    pinned = {name: version for file in files for name, version in _pinned(file).items()}
    assert pinned[canonicalize_name(requirement.name)] in requirement.specifier


def test_what_the_code_imports_is_in_the_package_and_nothing_else():
    names = ("gpu", "beam", "tokenizers", "smollm2")
    optional = (f"requirements-{name}.txt" for name in names)
    files = "requirements.txt", *optional
    wanted = {name for file in files for name in _pinned(file)}
    assert {canonicalize_name(r.name) for r in _ALL} == wanted


def test_the_packages_of_the_corpus_are_those_that_are_installed():
    expected = {canonicalize_name(name): version for name, version in CORPUS_PACKAGES.items()}
    assert _pinned("requirements-corpus.txt") == expected
    assert expected.items() <= _pinned("requirements.lock.txt").items()


def test_every_directory_of_sources_is_a_package_of_the_wheel():
    """setup.py finds those with an __init__.py."""
    for top in set(PACKAGES) - {"benchmarks"}:
        for source in (ROOT / top).rglob("*.py"):
            assert (source.parent / "__init__.py").is_file(), source
