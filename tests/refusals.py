"""Tables of what is refused. A row is a cause and a part of the message, and a test that is named after the message.

    test_meshes = refusals(
        ShardingError,
        (lambda: Mesh.parse("expert"), "expected axis:size"),
        (lambda: Mesh.parse(8), TypeError, "got an int"),
    )

Where all rows cause it in one way, that way is the test, and a row has its first arguments:

    @refuses(ShardingError, ("expert", "expected axis:size"), ("expert:0", "at least one device"))
    def test_meshes(text):
        Mesh.parse(text)
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

Errors = type[BaseException] | tuple[type[BaseException], ...]


def refuses(error: Errors, *rows: tuple[Any, ...], plain: bool = False) -> Callable:
    """Makes a test of each row: the decorated function must raise.

    Args:
        error: what is raised, where the row does not say another error before its message.
        rows: the function's first arguments, then a regular expression that the error's message has to match.
        plain: whether messages are plain text instead.
    """
    table = [row if _names_an_error(row) else (*row[:-1], error, row[-1]) for row in rows]
    table = [(*row[:-1], re.escape(row[-1])) for row in table] if plain else table

    def decorate(cause: Callable) -> Callable:
        arguments = list(inspect.signature(cause).parameters.values())

        @functools.wraps(cause)
        def test(refused_with: Errors, message: str, **named: Any) -> None:
            with pytest.raises(refused_with, match=message):
                cause(**named)

        first = list(inspect.signature(test, follow_wrapped=False).parameters.values())[:2]
        test.__signature__ = inspect.Signature([*first, *arguments])  # type: ignore[attr-defined]
        names = [a.name for a in arguments[: len(table[0]) - 2]] + [a.name for a in first]
        return pytest.mark.parametrize(names, table, ids=[row[-1][:60] for row in rows])(test)

    return decorate


def _names_an_error(row: tuple[Any, ...]) -> bool:
    return len(row) > 2 and isinstance(row[-2], type) and issubclass(row[-2], BaseException)


def refusals(error: Errors, *rows: tuple[Any, ...], plain: bool = False) -> Callable:
    """Makes a test of rows of calls without arguments; see `refuses`."""

    @refuses(error, *rows, plain=plain)
    def test(call: Callable[[], object]) -> None:
        call()

    return test
