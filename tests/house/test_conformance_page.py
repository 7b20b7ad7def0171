"""docs/spmd_conformance.md names tests that exist, and has a row for every topic."""

import re

import pytest

from tools.import_graph import ROOT

_PAGE = (ROOT / "docs/spmd_conformance.md").read_text(encoding="utf-8")
_TEST = re.compile(r"`([a-z_0-9]+)/([^`/]+)`")
_NODE = re.compile(r"^tests/spmd/test_(\w+)\.py::(\w+)(?:\[(.*)\])?$", re.MULTILINE)


@pytest.fixture(scope="module")
def nodes() -> set[tuple[str, str]]:
    """(topic, name) of every test and of every case under tests/spmd."""
    listed: list[str] = []

    class Lists:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            listed.extend(item.nodeid for item in session.items)

    flags = ["--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    assert pytest.main([*flags, f"--rootdir={ROOT}", str(ROOT / "tests/spmd")], [Lists()]) == 0
    collected = "\n".join(listed)
    found = set()
    for topic, function, case in _NODE.findall(collected):
        found |= {(topic, function.removeprefix("test_"))} | ({(topic, case)} if case else set())
    return found


def test_tests_that_the_page_names_are_there(nodes):
    topics = {path.name[5:-3] for path in (ROOT / "tests/spmd").glob("test_*.py")}
    named = {(topic, name) for topic, name in _TEST.findall(_PAGE) if topic in topics}
    assert named
    assert sorted(named - nodes) == []


def test_every_topic_has_a_row(nodes):
    named = {topic for topic, _ in _TEST.findall(_PAGE)}
    assert sorted({topic for topic, _ in nodes} - named) == []


def test_rows_say_what_was_found():
    rows = [line for line in _PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    assert rows
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").split("|")[1:]), row
