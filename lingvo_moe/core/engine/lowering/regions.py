"""Keeps manual regions apart from the rest of a lowered program.

Lowering to StableHLO merges equal constants into one value, e.g. the zero that sums begin with. If one
user of it is inside a manual region and another is not, XLA's propagation marks the constant as manual,
then the sum outside, then its operand, and the process crashes. So every value that a region uses and
that depends on no argument of the program is made to enter the region as a replicated tensor.
"""

from collections.abc import Iterator
from typing import Any

from lingvo_moe.core.private.jax import ir

OPEN, _CLOSE = "SPMDFullToShardShape", "SPMDShardToFullShape"
_NEITHER, _FULL, _LOCAL = 0, 1, 2
_CONTROL = ("stablehlo.while", "stablehlo.case", "stablehlo.if")
# Operations that forward values.
_PASSING = (*_CONTROL, "stablehlo.return", "func.return")


def isolate_regions(module: Any, tensors: int) -> None:
    """Changes a StableHLO module so that its manual regions share no constant with the rest.

    The first `tensors` arguments of its `main` are tensors of the program; others hold constants.

    Regions of one axis of several are left as they are.
    """
    with module.context, ir.Location.unknown():
        _Program(module, tensors).Isolate()


class _Program:
    """Classifies the values of a module, and changes it.

    Functions are analysed at their calls, with the kinds of their arguments: the body of a loop may be a
    function with local and other tensors among its arguments.
    """

    def __init__(self, module: Any, tensors: int):
        functions = [f.operation for f in module.body.operations if f.operation.name == "func.func"]
        self._blocks = {
            ir.StringAttr(f.attributes["sym_name"]).value: f.regions[0].blocks[0]
            for f in functions
            if len(f.regions[0].blocks)
        }
        self._reached = [self._blocks["main"]]
        arguments = list(self._reached[0].arguments)
        self._kinds: dict[Any, int] = dict.fromkeys(arguments[:tensors], _FULL)

    def Isolate(self) -> None:
        while self._Read(self._reached[0]):
            pass
        for block in self._reached:
            for op in list(_nested(block)):
                self._Enter(op)

    def _Read(self, block: Any) -> bool:
        """One pass over a block and its inner blocks; returns whether any kind changed."""
        learnt = [self._ReadOp(op.operation) for op in block.operations]
        return any(learnt)

    def _ReadOp(self, op: Any) -> bool:
        target = _target(op)
        if target == OPEN:
            manual = ir.StringAttr(op.attributes["mhlo.sharding"]).value == "{manual}"
            return self._Raise(op.results[0], _LOCAL if manual else _FULL)
        if target == _CLOSE:
            return self._Raise(op.results[0], _FULL)
        callee = self._Callee(op)
        if callee is not None:
            if callee not in self._reached:
                self._reached.append(callee)
            learnt_there = [
                self._Raise(a, self._Kind(v)) for a, v in zip(callee.arguments, op.operands)
            ]
            learnt = any(learnt_there)
            learnt |= self._Read(callee)
            return self._RaiseFrom(op.results, callee) or learnt
        if op.name not in _CONTROL:
            kind = max((self._Kind(v) for v in op.operands), default=_NEITHER)
            learnt_here = [self._Raise(v, kind) for v in op.results]
            return any(learnt_here)
        learnt = False
        for region in op.regions:
            block = region.blocks[0]
            if op.name == "stablehlo.while":
                for i, argument in enumerate(block.arguments):
                    learnt |= self._Raise(argument, self._Kind(op.results[i]))
            learnt |= self._Read(block)
            if not _is_condition(block):
                learnt |= self._RaiseFrom(op.results, block)
        if op.name == "stablehlo.while":
            for result, value in zip(op.results, op.operands):
                learnt |= self._Raise(result, self._Kind(value))
        return learnt

    def _Callee(self, op: Any) -> Any:
        """The block of the function that an operation calls, or None."""
        if op.name != "func.call":
            return None
        return self._blocks.get(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)

    def _RaiseFrom(self, results: Any, block: Any) -> bool:
        """The results are the operands of the block's terminator."""
        ends = block.operations[len(block.operations) - 1].operands
        learnt = [self._Raise(r, self._Kind(v)) for r, v in zip(results, ends, strict=True)]
        return any(learnt)

    def _Kind(self, value: Any) -> int:
        return self._kinds.get(value, _NEITHER)

    def _Raise(self, value: Any, kind: int) -> bool:
        if kind <= self._Kind(value):
            return False
        self._kinds[value] = kind
        return True

    def _Enter(self, op: Any) -> None:
        """Makes an operation's operands enter its region, unless they have another kind."""
        kinds = [self._Kind(v) for v in op.operands]
        callee = self._Callee(op)
        if op.name == "stablehlo.while":
            local = [self._Kind(v) == _LOCAL for v in op.results]
        elif op.name == "stablehlo.return" and not _is_condition(op.block):
            local = [self._Kind(v) == _LOCAL for v in op.parent.results]
        elif callee is not None:
            local = [self._Kind(v) == _LOCAL for v in callee.arguments]
        elif op.name in _PASSING or _target(op) == OPEN:
            return
        else:
            local = [_LOCAL in kinds or _target(op) == _CLOSE] * len(kinds)
        for i, (kind, inside) in enumerate(zip(kinds, local)):
            if inside and kind == _NEITHER:
                op.operands[i] = _enter(op.operands[i], op)


def _nested(block: Any) -> Iterator[Any]:
    """The operations of a block and of the blocks of its loops and branches."""
    for op in block.operations:
        yield op.operation
        if op.operation.name in _CONTROL:
            for region in op.operation.regions:
                yield from _nested(region.blocks[0])


def _is_condition(block: Any) -> bool:
    """Whether this is the block of a loop that computes its condition."""
    owner = block.owner
    return (
        owner.operation.name == "stablehlo.while" and owner.operation.regions[0].blocks[0] == block
    )


def _enter(value: Any, before: Any) -> Any:
    for target, sharding in (("Sharding", "{replicated}"), (OPEN, "{manual}")):
        attributes = {
            "call_target_name": ir.StringAttr.get(target),
            "mhlo.sharding": ir.StringAttr.get(sharding),
        }
        value = ir.Operation.create(
            "stablehlo.custom_call",
            results=[value.type],
            operands=[value],
            attributes=attributes,
            ip=ir.InsertionPoint(before),
        ).results[0]
    return value


def _target(op: Any) -> str:
    if op.name != "stablehlo.custom_call":
        return ""
    return ir.StringAttr(op.attributes["call_target_name"]).value
