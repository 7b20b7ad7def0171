"""Parts of a parameter's path that stand in brackets: 'layers[1]'."""

from typing import Any


def parse_indices(part: str) -> tuple[str, list[int]]:
    """The name and the numbers of 'name[1][2]'. Raises AttributeError for any other text."""
    name, *indices = part.split("[")
    try:
        return name, [int(i.removesuffix("]")) for i in indices]
    except ValueError:
        raise AttributeError(f"no parameter {part!r}: expected name or name[number]") from None


def with_item(value: Any, indices: list[int], item: Any) -> Any:
    """`value` with the item at these indices of its lists replaced; `item` itself where there are none.

    Raises:
        TypeError: no list where one is indexed. IndexError: an index past its end.
    """
    if not indices:
        return item
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{value!r} is no list, and has no item {indices[0]}")
    items = list(value)
    if not -len(items) <= indices[0] < len(items):
        raise IndexError(f"there is no item {indices[0]} in a list of {len(items)}")
    items[indices[0]] = with_item(items[indices[0]], indices[1:], item)
    return type(value)(items)
