"""Computes what each executed instruction of a compiled program costs, and which layer it belongs to.

FLOPs count matrix products; bytes count traffic to main memory (HBM); a collective carries what the
model of network/interconnect.py needs.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from lingvo_moe.analysis.plans.work import traffic
from lingvo_moe.analysis.plans.work.flops import MatmulFlops, MatrixProduct, in_tiles, number_format
from lingvo_moe.analysis.programs.hlo import attributes, module as hlo, parts
from lingvo_moe.analysis.programs.hlo.collectives import (
    CollectiveUse,
    collective_kind,
    executed_collective,
)
from lingvo_moe.analysis.programs.hlo.instructions import Computation, Instruction
from lingvo_moe.analysis.programs.hlo.loops import expected_trips
from lingvo_moe.analysis.programs.hlo.module import Executed, Module
from lingvo_moe.analysis.programs.hlo.parts import (
    ATTENTION,
    EXPERTS,
    LOOP,
    NO_LAYERS,
    Layers,
    Place,
)

_SEARCH_LIMIT = 12  # How many neighbours to visit for an instruction without a name.
_NO_CYCLES = ("while", "conditional", "call", "async-start", "async-done")


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one instruction."""

    place: Place  # the layer, part and phase that it belongs to
    # `opcode`, `name`: as in the compiled text.
    opcode: str
    name: str
    times: int  # how often one run of the program executes it
    flops: int  # FLOPs of its matrix products in one execution
    bytes: int  # HBM traffic of one execution
    estimated_cycles: int  # the compiler's own estimate of one execution, in clock cycles
    collective: CollectiveUse | None = None  # what it sends, if it is a collective
    # The FLOPs by number format, one of `flops.FORMATS`.
    formats: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # The same with sizes rounded up to whole tiles of the matrix unit.
    tiled: Mapping[str, int] = dataclasses.field(default_factory=dict)
    loops: tuple[str, ...] = ()  # the names of the loops in whose bodies it runs, outermost first
    # Of one execution of a loop whose length depends on data, as the program states it.
    turns: int = 0


def costs(
    module: Module, layers: Layers = NO_LAYERS, once: bool = False, tile: int = 1
) -> list[Cost]:
    """Returns the cost of every executed instruction, in schedule order.

    Of a conditional's branches, that with the most FLOPs counts. Where devices take different branches at the same
    time, e.g. the stages of a pipeline, the others wait for it.

    A loop of an attention layer over blocks of queries and keys, and one of experts over the rows that they received,
    count as the one kernel that accelerators have for it: its products, and each array that it carries once, where that
    is less than the traffic of all its trips.

    Args:
      module: a scheduled program for one device.
      once: count a loop's body once, as XLA's own cost analysis does.
      tile: rows and columns of the matrix unit.

    Raises:
      HloError: a loop's trip count or a collective's replica groups cannot be read from the text.
    """
    flops = MatmulFlops(module)
    placer = Placer(module, layers)
    priced: list[Cost] = []
    carried: dict[str, int] = {}  # bytes of the loops that may count as one kernel
    for executed in module.executions(once, branches=_LongestBranch(module, flops)):
        instruction, inside = executed.instruction, executed.computation
        products = flops.products(instruction, inside)
        by_weight = sorted(products, key=lambda product: -product.flops)
        place = placer.place(executed, [p.instruction.op_name for p in by_weight])
        turns = expected_trips(instruction) if instruction.opcode == "while" else None
        if instruction.opcode == "while" and carried.keys().isdisjoint(executed.loops):
            if turns is not None and not place.is_clear:
                # A gradient's loop has no layer's scope; only experts have such loops.
                place = dataclasses.replace(place, part=EXPERTS)
            if place.part == ATTENTION or (turns is not None and place.part == EXPERTS):
                carried[instruction.name] = sum(map(traffic.in_hbm, instruction.arrays))
        counts = instruction.opcode not in _NO_CYCLES
        priced.append(
            Cost(
                place=place,
                opcode=instruction.opcode,
                name=instruction.name,
                times=executed.times,
                flops=sum(product.flops for product in products),
                bytes=traffic.hbm_bytes(module, inside, instruction),
                estimated_cycles=attributes.estimated_cycles(instruction) if counts else 0,
                collective=executed_collective(instruction, inside, module),
                formats=_by_format(products),
                tiled=_by_format(products, tile),
                loops=executed.loops,
                turns=turns or 0,
            )
        )
    return _with_kernels(priced, carried)


def _with_kernels(priced: Sequence[Cost], carried: Mapping[str, int]) -> list[Cost]:
    """The costs in which loops are kernels; one of experts only where it carries less than its trips move.

    Products of experts count with the loop, whose rows stream through them; those of attention stay where they are.
    """
    kernels: dict[str, Cost] = {}
    merged: set[str] = set()  # whose products count with the loop
    for loop in (cost for cost in priced if cost.name in carried):
        inside = [cost for cost in priced if loop.name in cost.loops]
        once = dataclasses.replace(loop, bytes=carried[loop.name])
        if loop.place.part == ATTENTION:
            kernels[loop.name] = once
        elif loop.times * once.bytes < sum(cost.times * cost.bytes for cost in inside):
            merged.add(loop.name)
            kernels[loop.name] = dataclasses.replace(
                once,
                flops=sum(cost.times * cost.flops for cost in inside) // loop.times,
                formats=_of_one_run(loop, inside, "formats"),
                tiled=_of_one_run(loop, inside, "tiled"),
            )
    return [kernels.get(cost.name) or _inside_kernels(cost, kernels, merged) for cost in priced]


def _of_one_run(loop: Cost, inside: Sequence[Cost], field: str) -> dict[str, int]:
    """The FLOPs by number format of all instructions in one run of a loop."""
    sums: dict[str, int] = {}
    for cost in inside:
        for kind, flops in getattr(cost, field).items():
            sums[kind] = sums.get(kind, 0) + cost.times * flops // loop.times
    return sums


def _inside_kernels(cost: Cost, kernels: Mapping[str, Cost], merged: set[str]) -> Cost:
    """The cost without what the kernel that it is in, if any, counts."""
    if kernels.keys().isdisjoint(cost.loops):
        return cost
    cost = dataclasses.replace(cost, bytes=0, estimated_cycles=0)
    if merged.isdisjoint(cost.loops):
        return cost
    return dataclasses.replace(cost, flops=0, formats={}, tiled={})


@dataclasses.dataclass
class _LongestBranch:
    """Finds the branch of a conditional with the most FLOPs; of several, that with the most instructions."""

    module: Module
    flops: MatmulFlops
    work: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def __call__(self, conditional: Instruction) -> list[str]:
        return [max(conditional.called, key=self._Work)]

    def _Work(self, name: str) -> tuple[int, int]:
        if name not in self.work:
            flops, count = 0, 0
            start = self.module.computation(name)
            for executed in self.module.executions(branches=self, start=start):
                products = self.flops.products(executed.instruction, executed.computation)
                flops += executed.times * sum(product.flops for product in products)
                count += 1
            self.work[name] = flops, count
        return self.work[name]


def _by_format(products: list[MatrixProduct], tile: int = 1) -> dict[str, int]:
    sums: dict[str, int] = {}
    for product in products:
        kind = number_format(product.instruction, product.inside)
        sums[kind] = sums.get(kind, 0) + (in_tiles(product, tile) if tile > 1 else product.flops)
    return sums


class Placer:
    """Finds the `Place` of an executed instruction: its layer, part of the model, and phase.

    The place follows from the name scope of the layer that traced the instruction. An instruction without such a scope
    gets the place of its nearest producer, else that of its nearest consumer. One in the scope of a loop over layers
    stays the loop's, but a sum of gradients gets the place of its addends if they have the same.
    """

    def __init__(self, module: Module, layers: Layers):
        self._module, self._layers = module, layers
        self.place_name = layers.place

    def place(self, at: Executed, products: Sequence[str] = ()) -> Place:
        """Returns where an instruction belongs.

        Uses the first of these that names a layer: its matrix products, its own name, the
        instructions inside it (for a fusion), its producers and consumers.

        Args:
          products: names of the matrix products that it computes, the largest first.
        """
        instruction = at.instruction
        named = self.place_name(at.op_name, at.in_backward_loop)
        if instruction.opcode in ("parameter", "constant", "tuple", "while"):
            return named
        if instruction.opcode == "send" and (sent := self._of_sent(at)):
            return sent
        if combined := self._combined(at):
            return combined
        for op_name in [*products, at.op_name]:
            place = self.place_name(op_name, at.in_backward_loop)
            if place.is_clear:
                return place
        near = self._by_insides(instruction, at.in_backward_loop)
        if near is None:
            near = self._of_sum(at) if named.part == LOOP else self._by_neighbours(at)
        return near or named

    def _of_sent(self, at: Executed) -> Place | None:
        """Place of the value that is sent to another TPU slice: that of its nearest named producer.

        The compiler leaves out the names of what it sends, and may have combined it with other values before.
        """
        inside, piece = at.computation, at.instruction
        nearest = None
        for _ in range(_SEARCH_LIMIT):
            sources = inside.operands(piece)
            if not sources:
                break
            index = int(piece.attribute("index") or 0)
            piece = max(sources, key=lambda source: source.num_bytes)
            if collective_kind(piece) is not None and len(piece.operands) > index:
                piece = inside.operands(piece)[index]
            place = self.place_name(piece.op_name, at.in_backward_loop)
            if not place.is_clear:  # inside a fusion an index may have another's name
                place = self._by_insides(piece, at.in_backward_loop) or place
                nearest = nearest or (place if place.is_clear else None)
            if place.is_clear and (place.layer or piece.op_name):
                return place
        return nearest

    def _combined(self, at: Executed) -> Place | None:
        """Place of the largest tensor in a collective that the GPU compiler combined from several; None for others.

        That compiler joins the tensors of small collectives to one array first, which has no name.
        """
        instruction, inside = at.instruction, at.computation
        if instruction.op_name or collective_kind(instruction) is None:
            return None
        joins = [o for o in inside.operands(instruction) if self._joins(o)]
        if not joins:
            return None
        pieces = inside.operands(joins[0])
        for piece in sorted(pieces, key=lambda i: -i.num_bytes):
            place = self._of_piece(dataclasses.replace(at, instruction=piece))
            if place.is_clear:
                return place
        return None

    def _joins(self, operand: Instruction) -> bool:
        if operand.opcode == "fusion":
            operand = self._module.computation(operand.called[0]).root
        return operand.opcode == "concatenate"

    def _of_piece(self, piece: Executed) -> Place:
        source = _uncopied(piece.computation, piece.instruction)
        piece = dataclasses.replace(piece, instruction=source)
        op_name = piece.instruction.op_name
        scope = parts.scope_of_call(op_name)
        place = self.place_name(scope, piece.in_backward_loop)
        if scope != op_name and place.is_clear and place.layer:
            return place
        # The instructions inside a fusion may decide here, which need not be those of its result.
        near = self.place(piece)
        return near if near.is_clear else place

    def _of_sum(self, at: Executed) -> Place | None:
        """Place of the addends of a sum of gradients in a loop's own scope, where they have the same; None for others.

        The gradient of a value that a layer uses several times, e.g. for queries, keys and values, is summed outside of
        the layer's scope. One addend may be the sum over the loop's earlier steps.
        """
        named = self.place_name(at.op_name, at.in_backward_loop)
        if (named.part, named.phase) != (LOOP, "backward") or not parts.is_sum(at.op_name):
            return None
        addends = [_uncopied(at.computation, o) for o in at.computation.operands(at.instruction)]
        places = {
            dataclasses.replace(
                self.place_name(addend.op_name, at.in_backward_loop), path=named.path
            )
            for addend in addends
            if not _carries(at.computation, addend, at.instruction)
        }
        place = places.pop() if len(places) == 1 else None
        return place if place and place.is_clear else None

    def _of_sum_over_loop(self, at: Executed) -> Place | None:
        """Place of a sum of gradients that `at` extracts from the result of a loop; None for others."""
        if at.instruction.opcode != "get-tuple-element":
            return None
        (loop,) = at.computation.operands(at.instruction)
        if loop.opcode != "while":
            return None
        body = self._module.computation(loop.attribute("body"))
        computed = _next_value(body, at.instruction)
        if computed is None:
            return None
        return self._of_sum(
            Executed(computed, body, 1, at.in_backward_loop or hlo.is_backward(loop, body))
        )

    def _by_insides(self, instruction: Instruction, backward: bool) -> Place | None:
        """Place of the largest intermediate result inside a fusion that has one; None for other opcodes."""
        if instruction.opcode != "fusion":
            return None
        called = self._module.computation(instruction.called[0])
        for inner in sorted(called.instructions, key=lambda i: -i.num_bytes):
            place = self.place_name(inner.op_name, backward)
            if place.is_clear:
                return place
            if inner.opcode == "fusion" and (deeper := self._by_insides(inner, backward)):
                return deeper
        return None

    def _by_neighbours(self, at: Executed) -> Place | None:
        """Place of the nearest producer that has one; failing that, of the nearest consumer."""
        for look in (self._producers, self._consumers):
            reached = [at]
            for here in reached:  # Breadth first: the list grows while it is read.
                if len(reached) > _SEARCH_LIMIT:
                    break
                for neighbour in look(here):
                    if summed := self._of_sum_over_loop(neighbour):
                        return summed
                    place = self.place_name(neighbour.op_name, neighbour.in_backward_loop)
                    if place.part != "other":
                        return place
                    if inner := self._by_insides(neighbour.instruction, neighbour.in_backward_loop):
                        return inner
                    reached.append(neighbour)
        return None

    def _producers(self, at: Executed) -> list[Executed]:
        """Its operands, except parameters, constants and loops, which name no layer."""
        operands = at.computation.operands(at.instruction)
        silent = ("parameter", "constant", "while")
        return [dataclasses.replace(at, instruction=o) for o in operands if o.opcode not in silent]

    def _consumers(self, at: Executed) -> list[Executed]:
        """Returns the instructions that use the value of `at`, in the same computation.

        Tuples and while loops are left out. For a value that enters a loop, the get-tuple-elements that extract it in
        the loop's body are returned.
        """
        consumers = []
        for user in at.computation.users.get(at.instruction.name, ()):
            if user.opcode != "tuple":
                consumers.append(dataclasses.replace(at, instruction=user))
                continue
            index = str(user.operands.index(at.instruction.name))
            for loop in at.computation.users.get(user.name, ()):
                if loop.opcode != "while":
                    continue
                body = self._module.computation(loop.attribute("body"))
                backward = at.in_backward_loop or hlo.is_backward(loop, body)
                consumers += [
                    Executed(i, body, 1, backward)
                    for i in body.users.get(body.parameters[0].name, ())
                    if i.opcode == "get-tuple-element" and i.attribute("index") == index
                ]
        return consumers


def _uncopied(inside: Computation, instruction: Instruction) -> Instruction:
    """The instruction that computes a value, behind those that only copy it or change its shape."""
    while instruction.opcode in ("bitcast", "copy", "reshape"):
        (instruction,) = inside.operands(instruction)
    return instruction


def _carries(body: Computation, value: Instruction, result: Instruction) -> bool:
    """Whether a value in a loop's body is what `result` was in the loop's earlier step."""
    if value.opcode != "get-tuple-element":
        return False
    (source,) = body.operands(value)
    return source.opcode == "parameter" and _next_value(body, value) is result


def _next_value(body: Computation, element: Instruction) -> Instruction | None:
    """The instruction of a loop's body that computes an element of the loop's tuple; None if it is not to be seen."""
    if body.root.opcode != "tuple":
        return None
    return _uncopied(body, body.by_name[body.root.operands[int(element.attribute("index"))]])
