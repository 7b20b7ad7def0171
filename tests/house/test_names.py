"""Names say what a thing is: few point at it (`found`, `of`), no three files and no two classes share one.

Here and not in Bazel, since it looks at the whole source tree.
"""

import ast
import collections
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tools.import_graph import ROOT, repository

_POINTING = {"each", "found", "given", "held", "kept", "known", "now", "of", "own"}
# A comment of a field that begins so says no noun: not "of the stages" but "the order of the stages".
_HEADLESS = {"as", "in", "of", "that"}
_PACKAGES = ("lingvo_moe", "params", "reproduction", "tools")
# How many places there may still be; a lower number replaces one when it is reached.
_LIMITS = {"variables": 40, "parameters": 5, "comments": 3}


def _python_files() -> list[str]:
    return [path for path in repository().files if path.partition("/")[0] in _PACKAGES]


def _bound(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """(kind, line number, name) of each variable, field, target of a loop, and parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield "variables", node.lineno, node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield "variables", node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield "parameters", node.lineno, node.arg


def _pointing(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    return (place for place in _bound(tree) if place[2] in _POINTING)


def _headless_comments(source: str, tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """("comments", line number, comment) of each field of a class whose comment opens without a noun."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}
    for node in ast.walk(tree):
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(field, ast.Assign | ast.AnnAssign):
                comment = comments.get(field.end_lineno or 0, "")
                if comment.strip("# ").partition(" ")[0].strip(",:;") in _HEADLESS:
                    yield "comments", field.lineno, comment


def _shared(paths_of: dict[str, list[str]], most: int) -> list[str]:
    """One line for each name with more than `most` paths."""
    return [f"{name}: {', '.join(paths)}" for name, paths in paths_of.items() if len(paths) > most]


def _assert_few(kind: str, places: Iterable[str]) -> None:
    places = list(places)
    limit = _LIMITS[kind]
    assert len(places) <= limit, "\n".join([f"{kind}: {len(places)}, at most {limit}", *places])


def test_names_and_comments_say_what_a_thing_is():
    places: dict[str, list[str]] = {"variables": [], "parameters": [], "comments": []}
    for path in _python_files():
        source, tree = (ROOT / path).read_text(encoding="utf-8"), repository().Syntax(path)
        for kind, line, text in (*_pointing(tree), *_headless_comments(source, tree)):
            places[kind].append(f"{path}:{line}: {text}")
    for kind, found in places.items():
        _assert_few(kind, found)


def test_files_have_names_of_their_own():
    paths_of = collections.defaultdict(list)
    for path in _python_files():
        if (name := Path(path).name) != "__init__.py":
            paths_of[name].append(path)
    assert not _shared(paths_of, most=2)


def test_classes_have_names_of_their_own():
    paths_of = collections.defaultdict(list)
    for path in _python_files():
        for node in ast.walk(repository().Syntax(path)):
            if isinstance(node, ast.ClassDef):
                paths_of[node.name].append(f"{path}:{node.lineno}")
    assert not _shared(paths_of, most=1)


@pytest.mark.parametrize("source, kind, line", [
    ("def f(x, *, given=1):\n    pass\n", "parameters", 1),
    ("x = 1\nfor each, y in z:\n    pass\n", "variables", 2),
    ("x = [\n    own\n    for own in y\n]\n", "variables", 3),
    ("if (found := f()) is None:\n    pass\n", "variables", 1),
    ("class A:\n    kept: int = 0  # bytes\n", "variables", 2),
    ("class A:\n    order: int  # of the stages\n", "comments", 2),
])  # fmt: skip
def test_pointing_names_are_found_with_their_line(source, kind, line):
    tree = ast.parse(source)
    (complaint,) = [*_pointing(tree), *_headless_comments(source, tree)]
    assert complaint[:2] == (kind, line)


def test_names_and_comments_that_say_what_a_thing_is_are_no_complaint():
    source = "class A:\n    order: int  # the order of the stages\n\n\ndef f(x):\n    return x.found(known=1)\n"
    tree = ast.parse(source)
    assert not [*_pointing(tree), *_headless_comments(source, tree)]
