"""The Params of a run, from the text that was stored when it began, params.txt.

The code may have changed since: an experiment, the default of a class, or its parameters. A text is compared with
today's Params, or today's get its values. It is data: its values are literals, and its classes are found by the caller.
"""

import ast
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.config.param_text import classes_first, leaves, to_text

_SHOWN, _NONE = 3, "nothing"  # parameters in a message, and what one is that is not there


class StoredParamsError(ValueError):
    """A stored parameter that the code of today cannot have. The message names it, its value then and now."""


def stored_values(text: str) -> dict[str, str]:
    """The values, as text, by path, of a text by Params.ToText; lines of another form are left out."""
    parts = (line.partition(" : ") for line in text.splitlines())
    return {path: value for path, colon, value in parts if colon}


def restore(params: Params, text: str, find_class: Callable[[str], type]) -> None:
    """Gives the Params of an experiment the values that they had when the text was stored.

    A parameter that the text lacks did not exist then, and gets its default. Those of `train` are taken over where they
    are still there: they do not change results. `find_class` gives the class that 'type/module/Class' names, for those
    that `params` do not name.

    Raises StoredParamsError: a parameter, or its class, is gone, or its value is no longer accepted.
    """
    then, today = stored_values(text), dict(leaves(params, ""))
    named = {to_text(value): value for value in today.values() if isinstance(value, type)}

    def find(name: str) -> type:
        return named[name] if name in named else find_class(name)

    why = {}
    for path in sorted(then, key=classes_first):
        with contextlib.suppress(AttributeError):
            if to_text(params.Get(path)) == then[path]:
                continue
        try:
            _set(params, path, then[path], find)
        except (AttributeError, ValueError) as e:
            why[path] = str(e).removeprefix(f"{path}={then[path]}: ")
    for path in stored_values(params.ToText()).keys() - then.keys():
        with contextlib.suppress(AttributeError):  # it went with another one
            _reset(params, path, then)
    wrong = sorted(difference(then, params), key=lambda path: (*classes_first(path), path))
    items = [
        f"{path}={then.get(path, _NONE)} then, {to_text(today[path]) if path in today else _NONE} now"
        + (f": {why[path]}" if path in why else "")
        for path in wrong[:_SHOWN]
    ]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise StoredParamsError("; ".join(items) + more)


def difference(then: Mapping[str, str], params: Params) -> list[str]:
    """The paths of `task.` and `input.` parameters that differ, sorted, but for those that a run may change.

    A parameter that `then` lacks and that has its default in `params` is none of them: it did not exist then. Nor is
    one that has no effect: older versions listed, and took, such parameters.
    """
    values = stored_values(params.ToText())
    free = {
        f"{part}.{name}"
        for part in ("task", "input")
        # A text may name any class here.
        for name in getattr(params.Get(part).cls, "MAY_CHANGE", ())
    }
    return [
        path
        for path in sorted({*then, *values} - free)
        if path.startswith(("task.", "input."))
        and then.get(path) != values.get(path)
        and (path in then or not params.IsDefault(path))
        and has_effect(params, path)
    ]


def has_effect(params: Params, path: str) -> bool:
    """Whether a parameter does something, as the others are; True for one that is not there."""
    try:
        return not (params.WhyDerived(path) or params.WhyUnused(path))
    except AttributeError:
        return True


def _set(params: Params, path: str, text: str, find_class: Callable[[str], type]) -> None:
    """Sets a parameter as Params.ToText wrote it, whatever is there now. Raises AttributeError, ValueError."""
    if text.startswith("type/"):
        params.SetFromText(path, text, find_class=find_class)
        return
    value: Any
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("is no literal of Python") from None
    params.Set(**{path: value})


def _reset(params: Params, path: str, then: Mapping[str, str]) -> None:
    """Gives a parameter, or a part, that did not exist then its default."""
    parts = path.split(".")
    prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
    new = next(p for p in prefixes if not any(f"{q}.".startswith((f"{p}.", f"{p}[")) for q in then))
    params.Set(**{new: params.Default(new)})
