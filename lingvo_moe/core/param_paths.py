"""Parts of a parameter's path that stand in brackets: 'layers[1]'."""

from typing import Any


def parse_indices(part: str) -> tuple[str, list[int]]:
    """The name and the numbers of 'name[1][2]'. Raises AttributeError for any other text."""
    name, *indices = part.split("[")
    try:
        return name, [int(i.removesuffix("]")) for i in indices]
    except ValueError:
        raise AttributeError(f"no parameter {part!r}: expected name or name[number]") from None


def item_at(value: Any, indices: list[int], path: str) -> Any:
    """`value[i][j]...` of nested lists. Raises AttributeError, naming the path, if there is no such item."""
    for i in indices:
        if not isinstance(value, (list, tuple)) or not -len(value) <= i < len(value):
            raise AttributeError(f"no parameter {path!r}: there is no item {i} in {value!r}")
        value = value[i]
    return value


def with_item(value: Any, indices: list[int], item: Any) -> Any:
    """`value` with the existing item at these indices replaced; `item` itself if there are no indices."""
    if not indices:
        return item
    items = list(value)
    items[indices[0]] = with_item(items[indices[0]], indices[1:], item)
    return type(value)(items)
