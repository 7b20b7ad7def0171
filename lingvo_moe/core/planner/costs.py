"""What every executed instruction of a compiled program costs, and for which part of the model.

Floating-point operations are those of matrix products; bytes are traffic to main memory; collectives
carry what a model of the network needs.
"""

import dataclasses
from collections.abc import Sequence

from lingvo_moe.core.hlo import attributes, parts
from lingvo_moe.core.hlo import module as hlo
from lingvo_moe.core.hlo.collectives import CollectiveUse, collective_use
from lingvo_moe.core.hlo.module import Computation, Executed, Instruction, Module
from lingvo_moe.core.hlo.parts import Place
from lingvo_moe.core.planner import traffic
from lingvo_moe.core.planner.flops import MatmulFlops

_FAR = 12  # How many instructions away a nameless one looks for a name.
_NO_CYCLES = ("while", "conditional", "call", "async-start", "async-done")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one instruction; `flops`, `bytes` and `estimated_cycles` are those of one execution."""

    place: Place
    opcode: str
    name: str
    times: int
    flops: int
    bytes: int
    estimated_cycles: int
    collective: CollectiveUse | None = None


def costs(module: Module, once: bool = False) -> list[Cost]:
    """The cost of every executed instruction, in the order of the schedule.

    Args:
      module: a scheduled program for one device.
      once: count a loop's body once, as a compiler's own cost analysis does.

    Raises:
      PlanError: a loop's trips or a collective's groups cannot be told.
    """
    flops = MatmulFlops(module)
    placer = Placer(module)
    found = []
    for executed in module.executions(once):
        instruction, inside = executed.instruction, executed.computation
        products = flops.products(instruction, inside)
        found.append(
            Cost(
                place=placer.place(executed, _by_weight(products)),
                opcode=instruction.opcode,
                name=instruction.name,
                times=executed.times,
                flops=sum(count for count, _ in products),
                bytes=traffic.hbm_bytes(module, inside, instruction),
                estimated_cycles=_cycles(instruction),
                collective=collective_use(instruction, inside, module.attributes),
            )
        )
    return found


def _by_weight(products: list[tuple[int, Instruction]]) -> list[str]:
    """Names of matrix products, the heaviest first."""
    return [i.op_name for _, i in sorted(products, key=lambda product: -product[0])]


def _cycles(instruction: Instruction) -> int:
    return 0 if instruction.opcode in _NO_CYCLES else attributes.estimated_cycles(instruction)


@dataclasses.dataclass(frozen=True)
class _At:
    """An instruction, where it is, and whether gradients are computed there."""

    inside: Computation
    instruction: Instruction
    backward: bool

    @property
    def op_name(self) -> str:
        return self.instruction.op_name


class Placer:
    """Places executed instructions, those without a name by what they are made of or made for."""

    def __init__(self, module: Module):
        self._module = module
        names = {i.op_name for c in module.computations.values() for i in c.instructions}
        self._moe = parts.moe_layers(names)

    def place_name(self, op_name: str, in_backward_loop: bool) -> Place:
        """`parts.place` in this module, whose layers with experts are known."""
        return parts.place(op_name, in_backward_loop, self._moe)

    def place(self, executed: Executed, products: Sequence[str] = ()) -> Place:
        """By its products, heaviest first, its own name, its insides or its neighbours.

        Args:
          executed: of `Module.executions`.
          products: names of the matrix products that it does.
        """
        instruction = executed.instruction
        at = _At(executed.computation, instruction, executed.in_backward_loop)
        own = self.place_name(at.op_name, at.backward)
        if instruction.opcode in ("parameter", "constant", "tuple", "while"):
            return own
        for op_name in [*products, at.op_name]:
            found = self.place_name(op_name, at.backward)
            if found.is_clear:
                return self._named_embedding(at, found)
        near = self._by_insides(instruction, at.backward)
        if near is None and own.part != "loop":
            near = self._by_neighbours(at)
        return near or own

    def _named_embedding(self, at: _At, found: Place) -> Place:
        """The gradient of a look-up has no scope: who reads it tells whose table it is for."""
        if found.part != "embedding" or found.layer:
            return found
        reached = [at]
        for here in reached:
            for user in self._users(here):
                layer = self.place_name(user.op_name, user.backward).layer
                if layer.endswith("embedding"):
                    return dataclasses.replace(found, layer=layer)
                if len(reached) < _FAR:
                    reached.append(user)
        return found

    def _by_insides(self, instruction: Instruction, backward: bool) -> Place | None:
        """A fusion's place by the largest thing that it computes on the way."""
        if instruction.opcode != "fusion":
            return None
        called = self._module.computation(instruction.called[0])
        for inner in sorted(called.instructions, key=lambda i: -i.num_bytes):
            found = self.place_name(inner.op_name, backward)
            if found.is_clear:
                return found
            if inner.opcode == "fusion" and (deeper := self._by_insides(inner, backward)):
                return deeper
        return None

    def _by_neighbours(self, at: _At) -> Place | None:
        """The nearest place that what it is made of has; if none has, that who reads it have."""
        for look in (self._makers, self._users):
            reached = [at]
            for here in reached:  # Grows while it runs: the nearest come first.
                if len(reached) > _FAR:
                    break
                for neighbour in look(here):
                    found = self.place_name(neighbour.op_name, neighbour.backward)
                    if found.part != "other":
                        return found
                    if inner := self._by_insides(neighbour.instruction, neighbour.backward):
                        return inner
                    reached.append(neighbour)
        return None

    def _makers(self, at: _At) -> list[_At]:
        """What an instruction is made of; arguments of the program or a loop's body say nothing."""
        makers = at.inside.operands(at.instruction)
        silent = ("parameter", "constant", "while")
        return [dataclasses.replace(at, instruction=m) for m in makers if m.opcode not in silent]

    def _users(self, at: _At) -> list[_At]:
        """Who reads it; of what goes into a loop, who reads that element in the loop's body."""
        found = []
        for user in at.inside.users.get(at.instruction.name, ()):
            if user.opcode != "tuple":
                found.append(dataclasses.replace(at, instruction=user))
                continue
            index = str(user.operands.index(at.instruction.name))
            for loop in at.inside.users.get(user.name, ()):
                if loop.opcode != "while":
                    continue
                body = self._module.computation(loop.attribute("body"))
                backward = at.backward or hlo.is_backward(body)
                found += [
                    _At(body, i, backward)
                    for i in body.users.get(body.parameters[0].name, ())
                    if i.opcode == "get-tuple-element" and i.attribute("index") == index
                ]
        return found
