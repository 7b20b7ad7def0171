"""Trees of nested dicts, lists and tuples, and NestedMap, a dict with attribute access: the shape of
every theta, batch, state and set of metrics.

All functions take leaves in the order of `tf.nest`: keys sorted, lists in order. `None` is a leaf. The
module needs neither TensorFlow nor JAX, so that programs can be run where neither is installed.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lingvo_moe.core.config.checks import did_you_mean

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class NestedMap(dict):
    """A dict whose keys are identifiers, readable and writable as attributes, nested at will.

    Leaves are anything that is not a `dict`, `list` or `tuple`. The order of leaves is that of
    `tf.nest`: keys sorted, lists in order. `None` is a leaf.

    Example:
        >>> m = NestedMap(a=1, b=NestedMap(c=2))
        >>> m.b.c, m.GetItem("b.c"), m.FlattenItems()
        (2, 2, [('a', 1), ('b.c', 2)])
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for key in self:
            self._check_key(key)

    @classmethod
    def _check_key(cls, key: Any) -> None:
        if not isinstance(key, str) or not _KEY.match(key):
            raise KeyError(f"NestedMap keys are identifiers, got {key!r}")
        if hasattr(cls, key):
            raise KeyError(f"NestedMap key {key!r} is the name of a NestedMap method")

    def __setitem__(self, key: str, value: Any) -> None:
        self._check_key(key)
        super().__setitem__(key, value)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"NestedMap has no {key!r}{did_you_mean(key, self)}") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __delattr__(self, key: str) -> None:
        try:
            del self[key]
        except KeyError:
            raise AttributeError(f"NestedMap has no {key!r}{did_you_mean(key, self)}") from None

    def copy(self) -> "NestedMap":
        """A shallow copy."""
        return type(self)(self)

    @classmethod
    def FromNestedDict(cls, value: Any) -> Any:
        """Turns plain dicts, at any depth (also inside lists and tuples), into NestedMaps."""
        if isinstance(value, Mapping):
            return cls({k: cls.FromNestedDict(v) for k, v in value.items()})
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(cls.FromNestedDict(v) for v in value))
        if isinstance(value, (list, tuple)):
            return type(value)(cls.FromNestedDict(v) for v in value)
        return value

    def GetItem(self, path: str) -> Any:
        """Reads `a.b[2].c`. Raises KeyError naming the path and the part that is missing."""
        value: Any = self
        for part in _split_path(path):
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                names = value if isinstance(value, Mapping) else ()
                hint = did_you_mean(str(part), names)
                raise KeyError(f"no {path!r}: {part!r} is missing{hint}") from None
        return value

    def Get(self, path: str, default: Any = None) -> Any:
        """`GetItem` with a default."""
        try:
            return self.GetItem(path)
        except KeyError:
            return default

    def Set(self, path: str, value: Any) -> None:
        """Writes `a.b.c`, making the maps on the way. Lists are not extended."""
        parts = _split_path(path)
        where: Any = self
        for part in parts[:-1]:
            if isinstance(where, Mapping) and part not in where:
                where[part] = NestedMap()  # type: ignore[index]
            where = where[part]
        where[parts[-1]] = value

    def FlattenItems(self) -> list[tuple[str, Any]]:
        """All leaves as `(dotted path, value)`, in `tf.nest` order."""
        return flatten_items(self)

    def Flatten(self) -> list[Any]:
        """All leaves, in `tf.nest` order."""
        return flatten(self)

    def Zip(self, *others: Any) -> list[tuple[Any, ...]]:
        """The leaves with those of other trees in the same places, e.g. `specs.Zip(theta)`.

        Raises ValueError: when a structure differs, naming the first path that does.
        """
        return zip_leaves(self, *others)

    def Pack(self, leaves: list[Any]) -> "NestedMap":
        """A map of this structure that holds `leaves`. Raises ValueError when their number
        differs."""
        return pack_as(self, leaves)

    def Transform(self, fn: Callable[[Any], Any]) -> "NestedMap":
        """A map of this structure with `fn(leaf)` for each leaf."""
        return _map(self, fn)

    def Filter(self, fn: Callable[[Any], bool]) -> "NestedMap":
        """The leaves for which `fn` holds; maps left empty are dropped."""
        out = NestedMap()
        for key in sorted(self):
            value = self[key]
            if isinstance(value, NestedMap):
                part = value.Filter(fn)
                if part:
                    out[key] = part
            elif fn(value):
                out[key] = value
        return out


def flatten_items(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    """The leaves of a tree as (path, leaf); `name` is the root's path."""
    return list(_walk(tree, name))


def flatten(tree: Any) -> list[Any]:
    """The leaves of a tree."""
    return [leaf for _, leaf in _walk(tree, "")]


def pack_as(tree: Any, leaves: Sequence[Any]) -> Any:
    """A tree of the structure and types of `tree` that holds `leaves`. Raises ValueError when their number
    differs."""
    expected = len(flatten(tree))
    if len(leaves) != expected:
        raise ValueError(f"{len(leaves)} values for a structure of {expected} leaves")
    rest = iter(leaves)
    return _map(tree, lambda _leaf: next(rest))


def map_structure(fn: Callable[..., Any], first: Any, *rest: Any) -> Any:
    """A tree of the first one's structure with `fn(leaf of each)`.

    Raises ValueError: as zip_leaves.
    """
    return pack_as(first, [fn(*leaves) for leaves in zip_leaves(first, *rest)])


def zip_leaves(first: Any, *rest: Any) -> list[tuple[Any, ...]]:
    """The leaves of trees of one structure, those in the same place together.

    Raises ValueError: when a structure differs from the first's, naming the first path that does.
    """
    paths = [path for path, _ in _walk(first, "")]
    for other in rest:
        theirs = [path for path, _ in _walk(other, "")]
        if theirs != paths:
            raise ValueError(f"structures differ: {first_difference(paths, theirs)}")
    return list(zip(*(flatten(tree) for tree in (first, *rest)), strict=True))


def skeleton(tree: Any) -> Any:
    """The structure of a tree as plain dicts, lists and leaf numbers, as a program file stores it."""
    numbers = iter(range(len(flatten(tree))))
    return _map_plain(tree, lambda _leaf: next(numbers), dict)


def pack(structure: Any, leaves: Sequence[Any] | Mapping[int, Any]) -> Any:
    """A tree with the leaves in the places that `skeleton` numbered; dicts become NestedMaps, tuples lists."""
    return _map_plain(structure, lambda number: leaves[number], NestedMap)


def first_difference(expected: Sequence[str], paths: Sequence[str]) -> str:
    """A phrase naming the first path that only one of two structures has."""
    expected_paths, all_paths = set(expected), set(paths)
    missing = [path for path in expected if path not in all_paths]
    extra = [path for path in paths if path not in expected_paths]
    if missing:
        return f"{missing[0]!r} is missing" + (f", {extra[0]!r} is unknown" if extra else "")
    return f"{extra[0]!r} is unknown" if extra else "the order of leaves differs"


def _split_path(path: str) -> list[str | int]:
    parts: list[str | int] = []
    for part in path.split("."):
        name, *indices = part.split("[")
        if name:
            parts.append(name)
        parts.extend(int(i.rstrip("]")) for i in indices)
    return parts


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _walk(value[key], f"{path}.{key}" if path else key)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _walk(item, f"{path}[{i}]")
    else:
        yield path, value


def _map(value: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return type(value)({k: _map(value[k], fn) for k in sorted(value)})  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        items = [_map(item, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return fn(value)


def _map_plain(tree: Any, fn: Callable[[Any], Any], map_type: type) -> Any:
    if isinstance(tree, Mapping):
        return map_type({key: _map_plain(tree[key], fn, map_type) for key in sorted(tree)})
    if isinstance(tree, (list, tuple)):
        return [_map_plain(item, fn, map_type) for item in tree]
    return fn(tree)


def updates_of(*extras: NestedMap) -> NestedMap:
    """NestedMap(updates=...) for a task's metrics, joined from layers' extras; empty where none has any."""
    updates = NestedMap()
    for layer in extras:
        for path, value in layer.get("updates", NestedMap()).FlattenItems():
            updates.Set(path, value)
    return NestedMap(updates=updates) if updates else NestedMap()
