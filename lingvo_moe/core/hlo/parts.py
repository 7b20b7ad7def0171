"""Which part of the model an instruction belongs to, told by its `op_name`.

Layers run in TensorFlow name scopes of their own path, so that an instruction's `op_name` is the
program's wrapper, a scope and an operation: `jit(f)/call_tf/m4/encoder/blocks/body/layers_1/ffn/
router/Softmax`. Rules look at the names of layers (attention, router, a norm), never at a model's.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Sequence

PARTS = (
    "attention",
    "dense_ffn",
    "experts",
    "gating",
    "dispatch_combine",
    "softmax",
    "embedding",
    "normalization",
    "residual",
    "loss",
    "optimizer",
    "loop",
    "other",
)
PHASES = ("forward", "recompute", "backward", "optimizer")

_WRAPPER = re.compile(
    r"^(?:(?:Stateful)?PartitionedCall(?:_\d+)?|call_tf|call_exported|call(?:\.\d+)?|jit\(.*\))$"
)
_LAYER = re.compile(r"^layers_\d+$")
_LOOP = re.compile(r"^while(?:_\d+)?$")
_MASK = re.compile(r"^Logical(?:And|Or|Not)(?:_\d+)?$")
_GATHER_GRADIENT = re.compile(r"^UnsortedSegmentSum(?:_\d+)?$")
# Names of scopes, the deepest first: what decides is the first that a name has.
_SCOPES = (
    ("gating", re.compile(r"^router$")),
    ("dispatch_combine", re.compile(r"^(?:inference_)?dispatcher$")),
    ("experts", re.compile(r"^experts$")),
    ("normalization", re.compile(r"^(?:.*_)?norm$")),
    ("attention", re.compile(r"^(?:.*_)?atten(?:tion)?$")),
    ("dense_ffn", re.compile(r"^ffn$|^feed_forward$")),
    ("embedding", re.compile(r"^(?:.*_)?embedding$|^position$")),
    ("softmax", re.compile(r"^softmax$")),
)
_OF_EXPERTS = ("gating", "dispatch_combine", "experts")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where work belongs: `layer` e.g. encoder.moe, `path` the dotted scope, '' where unknown."""

    part: str
    layer: str
    phase: str
    path: str = ""

    @property
    def is_clear(self) -> bool:
        """Whether it is a part of the model, not of the loop around it."""
        return self.part not in ("other", "loop")


NOWHERE = Place("other", "", "forward")


def moe_layers(op_names: Iterable[str]) -> frozenset[str]:
    """Dotted paths of the layers whose feed-forward sublayer is a mixture of experts.

    The names of a program's operations tell: such a layer holds a router.
    """
    found = set()
    for names in {names for op_name in op_names for names in _scopes(op_name)}:
        scope = _layers_only(names)
        part, _ = _place_scope(scope, frozenset())
        number = _layer_number(scope)
        if part in _OF_EXPERTS and number is not None:
            found.add(_path(scope[: number + 1]))
    return frozenset(found)


@functools.cache
def _scopes(op_name: str) -> tuple[tuple[str, ...], ...]:
    """The parts of every joined name, without the wrapper, with the operation at the end."""
    return tuple(tuple(_unwrap(name.split("/"))) for name in _joined(op_name) if name)


def operations(op_name: str) -> tuple[str, ...]:
    """The TensorFlow operations that an instruction stands for, e.g. m4/encoder/body/ffn/transpose.

    Several where the compiler made one of several; none for what belongs to the program around the
    model.
    """
    return tuple(dict.fromkeys("/".join(names) for names in _scopes(op_name) if names))


def _joined(op_name: str) -> list[str]:
    """`a/b;c` joins two names of one operation, `a/(b;c:d)` those of what was combined."""
    prefix, opened, combined = op_name.partition("/(")
    if opened and combined.endswith(")"):
        return [f"{prefix}/{name}" for name in re.split("[;:]", combined[:-1])]
    return op_name.split(";")


def _unwrap(parts: list[str]) -> list[str]:
    """What follows the last part that is of the program's wrapper."""
    wrapped = [i for i, part in enumerate(parts) if _WRAPPER.match(part)]
    return parts[wrapped[-1] + 1 :] if wrapped else parts


def place(op_name: str, in_backward_loop: bool, moe: Collection[str] | None = None) -> Place:
    """Where an operation belongs.

    Args:
      op_name: of the instruction's metadata; of several joined with ';' the first clear one counts.
      in_backward_loop: whether a loop that holds gradients runs it: then an operation with a forward
        name is a recomputation.
      moe: what `moe_layers` found in the program; without it, a layer is taken for a mixture of
        experts only by the names of its router, dispatcher and experts.
    """
    return _place(op_name, in_backward_loop, frozenset(moe or ()))


@functools.cache
def _place(op_name: str, in_backward_loop: bool, moe: frozenset[str]) -> Place:
    found = [_place_one(scope, in_backward_loop, moe) for scope in _scopes(op_name)]
    clear = [place for place in found if place.is_clear]
    nameless = dataclasses.replace(NOWHERE, phase="backward" if in_backward_loop else "forward")
    return (clear or found or [nameless])[0]


def _place_one(names: tuple[str, ...], in_backward_loop: bool, moe: frozenset[str]) -> Place:
    phase = "recompute" if in_backward_loop else "forward"
    scope = _layers_only(names)
    if names[:1] == ("optimizer",):
        _, layer = _place_scope(scope, moe)
        return Place("optimizer", layer, "optimizer", _path(scope[:-1]))
    if "gradient_tape" in names:
        phase = "backward"
    if scope[:1] == ["backward"]:
        phase = "backward"
        scope = scope[1:]
        if len(scope) == 1 and not _LOOP.match(scope[0]):
            return Place("loss", "", phase)  # Whether gradients are finite.
    if scope and _GATHER_GRADIENT.match(scope[0]):
        return Place("embedding", "", "backward")
    part, layer = _place_scope(scope, moe)
    return Place(part, layer, phase, _path(scope[:-1]))


def _layers_only(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in ("optimizer", "gradient_tape")]


def _place_scope(scope: Sequence[str], moe: frozenset[str]) -> tuple[str, str]:
    """(part, layer) of a scope with its operation at the end."""
    above = scope[:-1] if len(scope) > 1 else []
    number = _layer_number(scope)
    part = next((part for part, name in _SCOPES if any(map(name.match, above))), "")
    if part in ("embedding", "softmax"):
        pattern = dict(_SCOPES)[part]
        return part, next(name for name in above if pattern.match(name))
    if number is not None:
        is_moe = part in _OF_EXPERTS or _path(scope[: number + 1]) in moe
        layer = f"{_stack(scope)}.{'moe' if is_moe else 'dense'}"
        if part == "dense_ffn" and is_moe:
            part = "dispatch_combine"  # Grouping of tokens, directly in the mixture's own scope.
        return part or "residual", layer
    if part:
        return part, _stack(scope)
    if any(map(_LOOP.match, scope)):
        return "loop", _stack(scope)
    if "body" in above:
        return "residual", _stack(scope)
    if len(above) == 1 and _MASK.match(scope[-1]):
        return "attention", ""  # Who may look at whom, the same for all layers.
    if len(above) == 1 or (len(above) == 2 and above[1][:1].isupper()):
        return "loss", ""  # Directly in the model's own scope.
    return "other", _stack(scope)


def _layer_number(scope: Sequence[str]) -> int | None:
    return next((i for i, name in enumerate(scope) if _LAYER.match(name)), None)


def _stack(scope: Sequence[str]) -> str:
    """The stack of layers, e.g. encoder: the name before its blocks or its own sublayer."""
    named = (i for i, part in enumerate(scope) if part == "blocks" or _is_named(part))
    place = next(named, 0)
    return scope[place - 1] if place > 1 else ""


def _is_named(part: str) -> bool:
    return any(name.match(part) for _, name in _SCOPES)


def _path(scope: Sequence[str]) -> str:
    return ".".join(scope)
