"""Derives the part of the model that an instruction belongs to from its `op_name`.

Each layer runs in a TensorFlow name scope equal to its path. So an `op_name` consists of the program's
wrapper, a scope and an operation: `jit(f)/call_tensorflow/m4/encoder/blocks/body/layers_1/ffn/router/Softmax`.
The rules below use the names of layers (attention, router, a norm), never the name of a model.
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
    "convolution",
    "pooling",
    "classifier",
    "normalization",
    "residual",
    "loss",
    "optimizer",
    "loop",
    "other",
)
PHASES = ("forward", "recompute", "backward", "optimizer")

_WRAPPER = re.compile(
    r"^(?:(?:Stateful)?PartitionedCall(?:_\d+)?|call_tensorflow|call_exported|call(?:\.\d+)?|jit\(.*\))$"
)
_LAST_CALL = re.compile(r"/(?:Stateful)?PartitionedCall(?:_\d+)?/(?=[^/]*$)")
_LAYER = re.compile(r"^layers_\d+$")
_LOOP = re.compile(r"^while(?:_\d+)?$")
_MASK = re.compile(r"^Logical(?:And|Or|Not)(?:_\d+)?$")
_SUM = re.compile(r"/(?:AddN|add)(?:_\d+)?$")
_GATHER_GRADIENT = re.compile(r"^UnsortedSegmentSum(?:_\d+)?$")
# Names of scopes, innermost first: the first that matches decides.
_SCOPES = (
    ("gating", re.compile(r"^router$")),
    ("dispatch_combine", re.compile(r"^(?:inference_)?dispatcher$")),
    ("experts", re.compile(r"^experts$")),
    ("normalization", re.compile(r"^(?:.*_)?norm$")),
    ("attention", re.compile(r"^(?:.*_)?atten(?:tion)?$")),
    ("dense_ffn", re.compile(r"^ffn$|^feed_forward$")),
    ("embedding", re.compile(r"^(?:.*_)?embedding$|^position$")),
    ("softmax", re.compile(r"^softmax$")),
    ("convolution", re.compile(r"^(?:.*_)?conv$")),
    ("pooling", re.compile(r"^(?:.*_)?pool$|^average$")),
    ("classifier", re.compile(r"^head$")),
)
_OF_EXPERTS = ("gating", "dispatch_combine", "experts")


@dataclasses.dataclass(frozen=True)
class Place:
    """The part of the model that an instruction belongs to.

    Attributes:
      part: one of PARTS.
      layer: e.g. 'encoder.moe'; '' if unknown.
      phase: one of PHASES.
      path: the dotted name scope; '' if unknown.
    """

    part: str
    layer: str
    phase: str
    path: str = ""

    @property
    def is_clear(self) -> bool:
        """Whether it names a part of the model, and not only the loop around it."""
        return self.part not in ("other", "loop")


NOWHERE = Place("other", "", "forward")


def moe_layers(op_names: Iterable[str]) -> frozenset[str]:
    """Returns the dotted paths of the layers whose feed-forward sublayer is a mixture of experts.

    Args:
      op_names: the names of all operations of a program; an MoE layer is recognised by its router,
        dispatcher or experts.
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
    """Splits each of the names joined in `op_name` at '/', without the wrapper; the operation is last."""
    return tuple(tuple(_unwrap(name.split("/"))) for name in _joined(op_name) if name)


def operations(op_name: str) -> tuple[str, ...]:
    """The TensorFlow operations that an instruction came from, e.g. m4/encoder/body/ffn/transpose.

    Several if the compiler merged operations; none for an instruction outside the model.
    """
    return tuple(dict.fromkeys("/".join(names) for names in _scopes(op_name) if names))


def _joined(op_name: str) -> list[str]:
    """Splits `a/b;c` (one operation with two names) and `a/(b;c:d)` (operations that were combined)."""
    prefix, opened, combined = op_name.partition("/(")
    if opened and combined.endswith(")"):
        return [f"{prefix}/{name}" for name in re.split("[;:]", combined[:-1])]
    return op_name.split(";")


def _unwrap(parts: list[str]) -> list[str]:
    """Drops everything up to the last part that belongs to the program's wrapper."""
    wrapped = [i for i, part in enumerate(parts) if _WRAPPER.match(part)]
    return parts[wrapped[-1] + 1 :] if wrapped else parts


def scope_of_call(op_name: str) -> str:
    """An operation's name without the call directly around it: `layer/PartitionedCall/Sum` becomes `layer/Sum`.

    `place` takes a call for the program's wrapper. Where only the operation follows the call, what precedes it is the
    layer's scope.
    """
    return _LAST_CALL.sub("/", op_name)


def is_sum(op_name: str) -> bool:
    """Whether an operation is a sum of tensors of one shape."""
    return _SUM.search(op_name) is not None


def place(op_name: str, in_backward_loop: bool, moe: Collection[str] | None = None) -> Place:
    """Returns the part of the model that an operation belongs to.

    Args:
      op_name: from the instruction's metadata; if it joins several names, the first one that names a
        part of the model counts.
      in_backward_loop: whether it runs in a loop that computes gradients; an operation there with a
        forward name is a recomputation.
      moe: the result of `moe_layers` for the program. Without it, only routers, dispatchers and
        experts are recognised as parts of an MoE layer.
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
            return Place("loss", "", phase)  # The check that gradients are finite.
    if scope and _GATHER_GRADIENT.match(scope[0]):
        return Place("embedding", "", "backward")
    part, layer = _place_scope(scope, moe)
    return Place(part, layer, phase, _path(scope[:-1]))


def _layers_only(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in ("optimizer", "gradient_tape")]


def _place_scope(scope: Sequence[str], moe: frozenset[str]) -> tuple[str, str]:
    """Returns (part, layer) for a scope whose last name is the operation."""
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
            part = "dispatch_combine"  # Grouping of tokens, directly in the MoE layer's scope.
        return part or "residual", layer
    if part:
        return part, _stack(scope)
    if any(map(_LOOP.match, scope)):
        return "loop", _stack(scope)
    if "body" in above:
        return "residual", _stack(scope)
    if len(above) == 1 and _MASK.match(scope[-1]):
        return "attention", ""  # The attention mask, computed once for all layers.
    if len(above) == 1 or (len(above) == 2 and above[1][:1].isupper()):
        return "loss", ""  # Directly in the model's own scope.
    return "other", _stack(scope)


def _layer_number(scope: Sequence[str]) -> int | None:
    return next((i for i, name in enumerate(scope) if _LAYER.match(name)), None)


def _stack(scope: Sequence[str]) -> str:
    """The name of the layer stack, e.g. 'encoder': the name before its blocks or its own sublayer."""
    named = (i for i, part in enumerate(scope) if part == "blocks" or _is_named(part))
    place = next(named, 0)
    return scope[place - 1] if place > 1 else ""


def _is_named(part: str) -> bool:
    return any(name.match(part) for _, name in _SCOPES)


def _path(scope: Sequence[str]) -> str:
    return ".".join(scope)
