"""Parameters as text: values, and the parts of a path that stand in brackets, as in 'layers[1]'."""

import ast
import contextlib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lingvo_moe.core.config.checks import did_you_mean


def shown(value: Any) -> str:
    """A value in a message."""
    try:
        return to_text(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"an integer of {value.bit_length()} bits"


def to_text(value: Any) -> str:
    """A value as ToText writes it."""
    if isinstance(value, type):
        return f"type/{value.__module__}/{value.__qualname__}"
    if isinstance(value, dict):
        return repr(dict(value))
    return repr(value)


def as_comment(text: str) -> str:
    """Comment lines, which FromText passes over."""
    return textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="# ") + "\n"


def chosen(text: str, choices: Mapping[str, type], by_name: bool) -> Any:
    """The Params of the class of that name, or the name itself; None for 'None'. Raises ValueError: no such choice."""
    name = text.strip("'\"")
    if name == "None":
        return None
    if name not in choices:
        near = did_you_mean(name, choices)
        listing = "" if "known: " in near else f"; known: {', '.join(sorted(choices))}"
        raise ValueError(
            f"no such choice: {name!r}{near}{listing}; a class of your own goes to .cls, as type/module/Class"
        )
    return name if by_name else choices[name].Params()  # type: ignore[attr-defined]


def from_text(text: str, current: Any, find_class: Callable[[str], type]) -> Any:
    """A text as a value of the current one's type; see Params.SetFromText. Raises ValueError where it is none."""
    if isinstance(current, type) or text.startswith("type/"):
        return find_class(text)
    if isinstance(current, str) and text[:1] not in "'\"":
        return text
    if isinstance(current, bool) and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if current is None:
            return text
        hint = ""
        if isinstance(current, (list, tuple)):
            parts = [part.strip(" '\"[]()") for part in text.split(",")]
            hint = f"; did you mean {[part for part in parts if part]}?".replace("', '", "','")
        raise ValueError(f"does not read as {type(current).__name__}{hint}") from None
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer that no float holds is refused below
            return float(value)
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    if current is not None and type(value) is not type(current):
        raise ValueError(f"is of type {type(value).__name__}, expected {type(current).__name__}")
    return value


def no_parameter(path: str, names: Iterable[str], choices: Mapping[str, Any] | None = None) -> str:
    """The message about a parameter that does not exist.

    Args:
        path: of the parameter; its last part may have indices.
        choices: the classes that its parent may configure, by name; None where the parent has no choice.
    """
    parent, _, last = path.rpartition(".")
    name = last.partition("[")[0]
    having = [choice for choice, cls in (choices or {}).items() if name in cls.Params()]
    if having:
        needed = " or ".join(f"{parent}={choice}" for choice in having)
        return f"no parameter {path!r}; it needs {needed} before it"
    return f"no parameter {path!r}{did_you_mean(name, names)}"


def parse_indices(part: str) -> tuple[str, list[int]]:
    """The name and the numbers of 'name[1][2]'. Raises AttributeError for any other text."""
    name, *indices = part.split("[")
    try:
        return name, [int(i.removesuffix("]")) for i in indices]
    except ValueError:
        raise AttributeError(f"no parameter {part!r}: expected name or name[number]") from None


def item_at(value: Any, indices: list[int], path: str) -> Any:
    """`value[i][j]...` of lists in lists. Raises AttributeError, naming the path, where there is no such item."""
    for i in indices:
        if not isinstance(value, (list, tuple)) or not -len(value) <= i < len(value):
            raise AttributeError(f"no parameter {path!r}: there is no item {i} in {value!r}")
        value = value[i]
    return value


def with_item(value: Any, indices: list[int], item: Any) -> Any:
    """`value` with the item at these indices, which is there, replaced; `item` itself where there are none."""
    if not indices:
        return item
    items = list(value)
    items[indices[0]] = with_item(items[indices[0]], indices[1:], item)
    return type(value)(items)


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Parameters as text sees them: nested Params opened, lists that hold Params opened too."""
    if _is_params(value):
        for name, inner in value.IterParams():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, (list, tuple)) and any(map(_is_params, value)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def nested_params(value: Any) -> Iterator[Any]:
    """The Params that a value is or holds."""
    if _is_params(value):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from nested_params(item)


def _is_params(value: Any) -> bool:
    return hasattr(type(value), "IterParams")


def classes_first(path: str) -> tuple[bool, int]:
    """A key by which classes sort before what is in them, the outermost first."""
    return not path.endswith(".cls"), path.count(".") if path.endswith(".cls") else 0
