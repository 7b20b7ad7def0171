"""Docs, docstrings, comments and messages use the field's words: no private vocabulary, no headless openings.

Here and not in Bazel, since it looks at the whole source tree.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.import_graph import ROOT

# A pattern, and what to write instead.
_INSTEAD = {
    r"\banew\b": "again",
    r"\bwholly\b": "entirely",
    r"\bhushed\b": "silenced",
    r"\bto the bit\b": "bit for bit, bit-identical",
    r"\bop by op\b": "with TensorFlow's kernels",
    r"\bin panels\b": "pre-packed weights",
    r"\brows of company\b|\bother company\b|\bits company\b": "padding rows; other rows of the batch",
    r"\bseats?\b": "slot, slot assignment",
    r"\btold\b": "derived, reported, printed, given",
    r"\bcut (?:over|along|otherwise|differently|anew)\b|\buncut\b": "sharded over, sharded differently, unsharded",
    r"\bwhole on (?:every|each|all|its|a)\b": "replicated, unsharded",
    r"\bwhole or not at all\b|\bnot there at all\b": "atomically",
    r"\bas (?:it|they|XLA|the partitioner) likes?\b": "the partitioner chooses",
    r"\bwhat is held out\b": "held-out data, held-out pairs",
    r"\bthere are as many \w+ as\b": "N = ...",
    r"\bfor who\b|\bof who\b": "a noun: for callers that ..., of the process that ...",
}
_HEADLESS = re.compile(
    r'\A[rRbBfFuU]*"""(?:(?:As|At|By|For|From|How|In|Of|On|So|That|Those|What|When|Where|Which|Why|With|Without)\b'
    r"|The same(?:,| (?:for|in|of|over|with)\b))"
)
_HEADLESS_INSTEAD = 'a subject or a verb: "The bytes that ...", "Returns ..."; of a bool "Whether"'
_PACKAGES = ("lingvo_moe", "params", "reproduction", "benchmarks", "tools", "tests")


def _python_files() -> list[Path]:
    """All sources except this file, which contains the forbidden words."""
    found = (p for package in _PACKAGES for p in (ROOT / package).rglob("*.py"))
    return sorted(set(found) - {Path(__file__).resolve()})


def _prose(source: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of each line of a comment, a docstring, or a text of several words."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING and token.string.count(" ") > 1
        if token.type == tokenize.COMMENT or is_text:
            yield from enumerate(token.string.splitlines(), token.start[0])


def _complaints(name: str, lines: Iterator[tuple[int, str]]) -> list[str]:
    return [
        f"{name}:{number}: {found[0]!r}; write: {instead}"
        for number, line in lines
        for pattern, instead in _RULES
        if (found := pattern.search(line))
    ]


_RULES = [(re.compile(pattern), instead) for pattern, instead in _INSTEAD.items()]
_RULES.append((_HEADLESS, _HEADLESS_INSTEAD))


def test_docstrings_comments_and_messages_have_no_private_words():
    complaints = []
    for path in _python_files():
        name = path.relative_to(ROOT).as_posix()
        complaints += _complaints(name, _prose(path.read_text(encoding="utf-8")))
    assert not complaints, "\n" + "\n".join(complaints)


def test_pages_have_no_private_words():
    complaints = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        complaints += _complaints(path.relative_to(ROOT).as_posix(), lines)
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("source, line", [
    ('def f():\n    """Of one layer, in bytes."""\n', 2),
    ('"""Reads\n\nthe file anew."""\n', 3),
    ('"""How often it runs: what a step needs."""\n', 1),
    ('"""The same with other weights."""\n', 1),
    ("x = 1\ny = 2  # equal to the bit\n", 2),
    ('raise ValueError(f"{x}: make the file anew")\n', 1),
])  # fmt: skip
def test_private_words_are_found_with_their_line(source, line):
    (complaint,) = _complaints("file.py", _prose(source))
    assert complaint.startswith(f"file.py:{line}: ") and "write: " in complaint
