"""Derives the part of the model that an instruction belongs to from its `op_name`.

Each layer runs in a TensorFlow name scope equal to its path. So an `op_name` consists of the program's
wrapper, a scope and an operation: `jit(f)/call_tensorflow/m4/encoder/blocks/body/layers_1/ffn/router/Softmax`.
`Layers` has what each layer declares, by its path; a task declares its loss and its masks in the same way.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

# The parts that rules here and in the planner know; a layer may declare any other.
ATTENTION, EMBEDDING, EXPERTS, LOOP, LOSS = "attention", "embedding", "experts", "loop", "loss"
PHASES = ("forward", "recompute", "backward", "optimizer")

_WRAPPER = re.compile(
    r"^(?:(?:Stateful)?PartitionedCall(?:_\d+)?|call_tensorflow|call_exported|call(?:\.\d+)?|jit\(.*\))$"
)
_MODULE = "XlaCallModule"  # an operation that is a program of JAX
_LAST_CALL = re.compile(r"/(?:Stateful)?PartitionedCall(?:_\d+)?/(?=[^/]*$)")
_LOOP = re.compile(r"^while(?:_\d+)?$")
_SUM = re.compile(r"/(?:AddN|add)(?:_\d+)?$")


@dataclasses.dataclass(frozen=True)
class Place:
    """The part of the model that an instruction belongs to."""

    part: str  # the `BaseLayer.PART` of its layer or task, or optimizer, loop, other
    layer: str  # e.g. 'encoder.moe'; '' if unknown
    phase: str  # one of PHASES
    path: str = ""  # the dotted name scope; '' if unknown

    @property
    def is_clear(self) -> bool:
        """Whether it names a part of the model, and not only the loop around it."""
        return self.part not in ("other", LOOP)


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
    """Drops the program's wrapper, up to the last part that belongs to it, and the names inside of JAX's kernels."""
    if _MODULE in parts:
        parts = parts[: parts.index(_MODULE) + 1]
    wrapped = [i for i, part in enumerate(parts) if _WRAPPER.match(part)]
    return parts[wrapped[-1] + 1 :] if wrapped else parts


def scope_of_call(op_name: str) -> str:
    """An operation's name without the call directly around it: `layer/PartitionedCall/Sum` becomes `layer/Sum`.

    `Layers.place` takes a call for the program's wrapper. Where only the operation follows the call, what precedes it
    is the layer's scope.
    """
    return _LAST_CALL.sub("/", op_name)


def is_sum(op_name: str) -> bool:
    """Whether an operation is a sum of tensors of one shape."""
    return _SUM.search(op_name) is not None


def phase(op_name: str, in_backward_loop: bool) -> str:
    """Returns the phase of an operation, one of PHASES; arguments as for `Layers.place`.

    Of joined names, the first one counts whose operation is in a scope, and not only in that of a loop.
    """
    scopes = _scopes(op_name)
    if not scopes:
        return "backward" if in_backward_loop else "forward"
    scoped = (names for names in scopes if len(names) > 1 and not any(map(_LOOP.match, names)))
    return _phase(next(scoped, scopes[0]), in_backward_loop)


def _phase(names: Sequence[str], in_backward_loop: bool) -> str:
    if names[:1] == ("optimizer",):
        return "optimizer"
    if "gradient_tape" in names or names[:1] == ("backward",):
        return "backward"
    return "recompute" if in_backward_loop else "forward"


class Layers:
    """The layers of a model: they give an operation its place.

    Args:
        declared: the part and the name of each layer by its path, the model's own first: `BaseLayer.DeclaredParts`.
    """

    def __init__(self, declared: Mapping[str, tuple[str, str]]):
        self._declared = {path.replace(".", "/"): place for path, place in declared.items()}
        self.root = next(iter(self._declared), "")
        self._place = functools.cache(self._Find)

    def place(self, op_name: str, in_backward_loop: bool) -> Place:
        """Returns the part of the model that an operation belongs to.

        Args:
          op_name: from the instruction's metadata; if it joins several names, the first one that names a
            part of the model counts.
          in_backward_loop: whether it runs in a loop that computes gradients; an operation there with a
            forward name is a recomputation.
        """
        return self._place(op_name, in_backward_loop)

    def _Find(self, op_name: str, in_backward_loop: bool) -> Place:
        places = [self._PlaceOne(names, in_backward_loop) for names in _scopes(op_name)]
        clear = [place for place in places if place.is_clear]
        return (clear or places or [Place("other", "", phase(op_name, in_backward_loop))])[0]

    def _PlaceOne(self, names: tuple[str, ...], in_backward_loop: bool) -> Place:
        when = _phase(names, in_backward_loop)
        scope = [name for name in names if name not in ("optimizer", "gradient_tape")]
        if when == "optimizer":
            _, layer = self._PlaceScope(scope)
            return Place("optimizer", layer, when, ".".join(scope[:-1]))
        if scope[:1] == ["backward"]:
            scope = scope[1:]
            if len(scope) == 1:
                return Place(LOOP, "", when)  # The zeros that its sums of gradients start from.
        part, layer = self._PlaceScope(scope)
        return Place(part, layer, when, ".".join(scope[:-1]))

    def _PlaceScope(self, scope: Sequence[str]) -> tuple[str, str]:
        """Returns (part, layer) for a scope whose last name is the operation."""
        above = scope[:-1]
        part, layer = self._Nearest(above)
        if part not in ("", LOOP):
            return part, layer
        if any(map(_LOOP.match, scope)):
            return LOOP, layer
        return "other", layer

    def _Nearest(self, above: Sequence[str]) -> tuple[str, str]:
        """The part and name of the innermost layer in whose scope an operation is."""
        start = above.index(self.root) if self.root in above else len(above)
        for end in range(len(above), start, -1):
            if declared := self._declared.get("/".join(above[start:end])):
                return declared
        return "", ""


NO_LAYERS = Layers({})
