"""Finds wrong use of manual regions in a traced graph, before XLA compiles it.

XLA's partitioner crashes the process, without naming a layer, if a program returns a local tensor,
combines a local tensor with a full one, or annotates a local one. This check classifies each tensor of
the graph, and of the graphs of its loops, branches and functions:

* *full*: it depends on an argument of the program;
* *local*: it depends on a result of auto_to_manual;
* neither: it depends on constants only, and combines with both.

A mixture is an error only if a result depends on it, since gradients of loops carry values that nothing
reads. The check is one pass over the operations; the body of a loop is visited at most once more for
each kind that a loop variable may change to.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.sharding.mesh import ShardingError

_OPEN, _CLOSE, _ANNOTATE = "XlaSpmdFullToShardShape", "XlaSpmdShardToFullShape", "XlaSharding"
_CALLS = {"PartitionedCall": "f", "StatefulPartitionedCall": "f"}
_LOOPS = ("While", "StatelessWhile")
_BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}
# Operations whose output i is their input i.
_PAIRWISE = ("IdentityN", "XlaOptimizationBarrier")
# Operations whose results are known before the program runs.
_STATIC = ("Shape", "ShapeN", "Rank", "Size")
# Files that make operations on behalf of the model's code.
_PLUMBING = ("/site-packages/", "/lingvo_moe/core/sharding/", "/lingvo_moe/core/private/")

# The kind of a tensor: NEITHER, FULL, the operation that opened its region (local), or a mixture's error.
NEITHER, FULL = "neither", "full"
_Kind = Any


def check_regions(graph: Any, name: str, num_args: int, result_names: Sequence[str]) -> None:
    """Checks a traced function.

    Args:
        num_args: how many of the graph's inputs are arguments; the others are captured constants.

    Raises:
        ShardingError: a result is a local tensor; an operation combines local and full tensors, or
            local tensors of regions over all axes and over one; a local tensor is annotated or
            opened again; a full tensor is closed, or a local one closed differently than opened; a
            loop in a region of one axis collects local tensors. The message names operation and
            tensors, and the line of the model if it is known.
    """
    if not _has_regions(graph):
        return
    count = len(graph.inputs)
    inputs = [FULL] * min(num_args, count) + [NEITHER] * max(count - num_args, 0)
    kinds = _Walk(name).Function(graph, inputs)
    for result, kind in zip(result_names, kinds):
        if isinstance(kind, ShardingError):
            raise kind
        if _local(kind):
            raise ShardingError(
                f"{name}: {result} is a local tensor of the manual region that {_opened(kind)}, and the "
                "region is left open: a program's results have full shapes. Close it with "
                "manual_to_auto, or use manual_region, which closes itself"
            )


class _Walk:
    """Classifies the tensors of all graphs that a function reaches."""

    def __init__(self, name: str):
        self._name = name
        self._known: dict[tuple, list[_Kind]] = {}

    def Function(self, graph: Any, inputs: list[_Kind]) -> list[_Kind]:
        """The kinds of a graph's outputs, given those of its inputs."""
        key = (id(graph), *map(_word, inputs))
        if key in self._known:
            return self._known[key]
        kinds: dict[int, _Kind] = {id(t): k for t, k in zip(graph.inputs, inputs)}
        for op in _in_order(graph):
            if op.type == "Placeholder":
                kinds.setdefault(id(op.outputs[0]), NEITHER)
                continue
            outputs = self._Op(graph, op, [kinds[id(t)] for t in op.inputs])
            kinds.update(zip(map(id, op.outputs), outputs))
        self._known[key] = [kinds[id(t)] for t in graph.outputs]
        return self._known[key]

    def _Op(self, graph: Any, op: Any, inputs: list[_Kind]) -> list[_Kind]:
        if op.type in _CALLS:
            return self.Function(_inner(op, _CALLS[op.type])[0], inputs)
        if op.type in _LOOPS:
            return self._Loop(graph, op, inputs)
        if op.type in _BRANCHES:
            return self._Branches(graph, op, inputs)
        if op.type == _OPEN:
            if op.get_attr("dim") < 0:
                self._NotLocal(op, inputs[0], "enter a manual region again")
            return [inputs[0] if isinstance(inputs[0], ShardingError) else op]
        if op.type == _CLOSE:
            if inputs[0] == FULL:
                raise ShardingError(
                    f"{self._name}: manual_to_auto closes {op.inputs[0].name}, which is no local tensor "
                    f"but one of full shape{_where(op)}"
                )
            if _local(inputs[0]) and _of_one_axis(inputs[0]) != _of_one_axis(op):
                one, other = ("one axis", "all axes")[:: 1 if _of_one_axis(op) else -1]
                raise ShardingError(
                    f"{self._name}: a manual_to_auto of {one} closes {op.inputs[0].name}, a local tensor "
                    f"of the manual region of {other} that {_opened(inputs[0])}{_where(op)}. Give both the "
                    "same `axis`; device_index, all_reduce and rotate are for regions of all axes"
                )
            return [inputs[0] if isinstance(inputs[0], ShardingError) else FULL]
        if op.type == _ANNOTATE:
            self._NotLocal(op, inputs[0], "be annotated: the partitioner does not shard it")
        if op.type in _PAIRWISE:
            return inputs
        if op.type in _STATIC:
            return [NEITHER] * len(op.outputs)
        return [self._Join(op, list(zip(op.inputs, inputs)))] * len(op.outputs)

    def _Loop(self, graph: Any, op: Any, inputs: list[_Kind]) -> list[_Kind]:
        body, cond = *_inner(op, "body"), *_inner(op, "cond")
        kinds = inputs
        while True:
            after = self.Function(body, kinds)
            joined = [
                self._Join(op, [(t, k), (t, a)])
                for t, k, a in zip(op.inputs, kinds, after, strict=True)
            ]
            if _same(joined, kinds):
                break
            kinds = joined
        kinds = [
            self._Collected(op, t, k) if _local(k) and before == NEITHER else k
            for t, before, k in zip(op.inputs, inputs, kinds)
        ]
        return self._Decided(op, self.Function(cond, kinds)[0], kinds)

    def _Collected(self, op: Any, tensor: Any, kind: _Kind) -> _Kind:
        """The kind of a loop variable that begins as a constant and becomes local."""
        if not _of_one_axis(kind):
            return kind
        return ShardingError(
            f"{self._name}: {op.type} {op.name!r} begins with the constant {tensor.name} and collects "
            f"local tensors of the manual region of one axis that {_opened(kind)}{_where(op)}; XLA cannot "
            "do that, nor the gradients of a loop, which collect its steps. Use a region of all axes, or "
            "have the loop outside of the region"
        )

    def _Branches(self, graph: Any, op: Any, inputs: list[_Kind]) -> list[_Kind]:
        graphs = [g for attr in _BRANCHES[op.type] for g in _inner(op, attr)]
        results = [self.Function(g, inputs[1:]) for g in graphs]
        joined = [
            self._Join(op, [(t, k) for k in kinds]) for t, *kinds in zip(op.outputs, *results)
        ]
        return self._Decided(op, inputs[0], joined)

    def _Decided(self, op: Any, decision: _Kind, kinds: list[_Kind]) -> list[_Kind]:
        """The kinds of a loop's or a branch's results: all local if devices may decide differently."""
        if not _local(decision):
            return kinds
        return [self._Join(op, [(t, k), (t, decision)]) for t, k in zip(op.outputs, kinds)]

    def _Join(self, op: Any, tensors: list[tuple[Any, _Kind]]) -> _Kind:
        for _, kind in tensors:
            if isinstance(kind, ShardingError):
                return kind
        local = next(((t, k) for t, k in tensors if _local(k)), None)
        full = next((t for t, k in tensors if k == FULL), None)
        if local is None:
            return NEITHER if full is None else FULL
        if full is local[0]:
            return ShardingError(
                f"{self._name}: {op.type} {op.name!r} has {full.name} in two ways: as a local tensor of the "
                f"manual region that {_opened(local[1])}, and with its full shape, before and after the "
                f"loop's body or in different branches{_where(op)}. Open and close the region within the "
                "body or the branch, or hold all of the loop or the conditional inside the region"
            )
        another = next(
            (t for t, k in tensors if _local(k) and _of_one_axis(k) != _of_one_axis(local[1])), None
        )
        if another is not None:
            return ShardingError(
                f"{self._name}: {op.type} {op.name!r} mixes {local[0].name} and {another.name}, local tensors "
                f"of a manual region of all axes and of one of one axis{_where(op)}; device_index, "
                "all_reduce and rotate are for regions of all axes"
            )
        if full is not None:
            return ShardingError(
                f"{self._name}: {op.type} {op.name!r} mixes the local tensor {local[0].name} "
                f"{local[0].shape} of the manual region that {_opened(local[1])} with {full.name} "
                f"{full.shape}, which has its full shape{_where(op)}. Take that one into the region by "
                "auto_to_manual (with None for each dimension if every device needs all of it), or close "
                "the region first by manual_to_auto"
            )
        return local[1]

    def _NotLocal(self, op: Any, kind: _Kind, what: str) -> None:
        if _local(kind):
            raise ShardingError(
                f"{self._name}: {op.inputs[0].name} is a local tensor of the manual region that "
                f"{_opened(kind)} and cannot {what}{_where(op)}. Close the region first by manual_to_auto"
            )


def _has_regions(graph: Any) -> bool:
    seen, stack = set(), [graph]
    while stack:
        graph = stack.pop()
        if id(graph) in seen:
            continue
        seen.add(id(graph))
        for op in graph.get_operations():
            if op.type in (_OPEN, _CLOSE):
                return True
            attrs = _attrs(op)
            stack += [g for attr in attrs for g in _inner(op, attr)]
    return False


def _attrs(op: Any) -> Sequence[str]:
    if op.type in _CALLS:
        return (_CALLS[op.type],)
    return ("cond", "body") if op.type in _LOOPS else _BRANCHES.get(op.type, ())


def _inner(op: Any, attr: str) -> list[Any]:
    """The graphs of the functions that an operation calls."""
    return [function.graph for function in private.functions_of(op, attr)]


def _in_order(graph: Any) -> Iterator[Any]:
    """Yields a graph's operations in topological order.

    The order of creation differs: gradients of loops add inputs to their forward loop later.
    """
    done: set[int] = set()
    for root in graph.get_operations():
        stack = [(root, False)]
        while stack:
            op, ready = stack.pop()
            if ready:
                yield op
            elif id(op) not in done:
                done.add(id(op))
                stack.append((op, True))
                stack += [(t.op, False) for t in op.inputs if id(t.op) not in done]


def _local(kind: _Kind) -> bool:
    return isinstance(kind, tf.Operation)


def _of_one_axis(op: Any) -> bool:
    """Whether an operation opens or closes a region of one axis of the mesh."""
    return op.get_attr("dim") >= 0


def _same(a: list[_Kind], b: list[_Kind]) -> bool:
    return list(map(_word, a)) == list(map(_word, b))


def _word(kind: _Kind) -> str:
    if isinstance(kind, str):
        return kind
    if not _local(kind):
        return "mixed"
    return "local along an axis" if _of_one_axis(kind) else "local"


def _opened(op: Any) -> str:
    """Names the call of auto_to_manual that opened a region, with its line."""
    tensor = op.inputs[0]
    if tensor.op.type == _ANNOTATE:
        tensor = tensor.op.inputs[0]
    return f"auto_to_manual({tensor.name}) opened{_where(op)}"


def _where(op: Any) -> str:
    """The innermost line of the model's code that created an operation."""
    for frame in reversed(op.traceback or ()):
        path = frame.filename.replace("\\", "/")
        if not any(part in path for part in _PLUMBING):
            return f" (at {path.rpartition('/')[2]}:{frame.lineno})"
    return ""
