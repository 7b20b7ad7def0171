"""What a compiled program keeps in the memory of the hosts, and the seconds that moving it takes.

The compiler writes each move as a start and an end, between which it schedules other work. The program is followed in
the order of its schedule: a move begins when its link is free, and the device waits at the end of a move that is not
done. A device has one link to its host, which carries both directions at the same time. A move that has no start, e.g.
a plain copy, is waited for at once. A move inside a loop takes as long each time, and loops begin with a free link.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lingvo_moe.core.hlo.module import Array, Computation, Instruction, Module
from lingvo_moe.core.planner.costs import Cost
from lingvo_moe.core.planner.machine import Machine
from lingvo_moe.core.planner.plan import execution_seconds

HOST_SPACE = 5  # the memory space of the host in a compiled program's text
IN, OUT = "to device", "to host"
_NESTED = ("call", "conditional")


@dataclass(frozen=True)
class Move:
    """A transfer between a device and its host.

    Attributes:
        direction: IN or OUT.
        bytes: of one execution, with the padding of tiles.
    """

    direction: str
    bytes: int


def host_plan(
    module: Module, costs: Sequence[Cost], machine: Machine, reported: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the plan's `host`, as docs/planning.md describes it; {} for a program without anything on a host.

    Args:
        module: the compiled program.
        costs: of its executed instructions.
        machine: its devices, their links to their hosts, and the hosts.
        reported: the compiler's sizes in bytes: host_arguments and host_temporaries, where there are any.
    """
    held = {name: int(reported.get(f"host_{name}", 0)) for name in ("arguments", "temporaries")}
    if not any(held.values()):
        return {}
    reader = _Reader(module, costs, machine)
    waiting = reader.Waiting()
    needed = sum(held.values())
    rows = reader.Rows()
    seconds = sum(row["seconds"] for row in rows)
    return {
        **held,
        "needed": needed,
        "host_devices": machine.host_devices,
        "needed_by_host": needed * machine.host_devices,
        "host_memory": machine.host_memory_bytes,
        "link_bandwidth": machine.host_bandwidth,
        "link_source": machine.host_source,
        "moves": rows,
        "seconds": seconds,
        "waiting_seconds": waiting,
        "hidden_seconds": max(seconds - waiting, 0.0),
    }


def move_of(inside: Computation, instruction: Instruction) -> Move | None:
    """The transfer that an instruction begins, or does at once; None for other instructions."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in ("copy", "dynamic-slice", "dynamic-update-slice"):
        return None
    operands = inside.operands(instruction)
    source = operands[1 if kind == "dynamic-update-slice" else 0].arrays[0]
    target = _target(instruction, operands)
    if (source.memory_space == HOST_SPACE) == (target.memory_space == HOST_SPACE):
        return None
    moved = source if kind == "dynamic-update-slice" else target
    direction = IN if source.memory_space == HOST_SPACE else OUT
    return Move(direction, moved.padded_bytes)


def _target(instruction: Instruction, operands: Iterable[Instruction]) -> Array:
    """The array that is written; the results of most starts begin with their operands."""
    given = sum(len(operand.arrays) for operand in operands)
    skipped = given if instruction.opcode in _STARTS else 0
    return instruction.arrays[skipped]


_STARTS = ("dynamic-slice-start", "dynamic-update-slice-start")


class _Reader:
    """Follows a program in the order of its schedule.

    Args:
        module, costs, machine: as in host_plan.
    """

    def __init__(self, module: Module, costs: Sequence[Cost], machine: Machine):
        self._module = module
        self._costs = {cost.name: cost for cost in costs}
        self._machine = machine
        self._moves: dict[str, Move] = {}
        self._waits: dict[str, float] = defaultdict(float)  # by the name of a move, in one execution

    def Waiting(self) -> float:
        """Seconds of one run of the program in which the device waits for moves."""
        _, waited = self._Follow(self._module.entry)
        return waited

    def Rows(self) -> list[dict[str, Any]]:
        """The plan's `moves`, after Waiting: the longest first."""
        sums: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for name, move in self._moves.items():
            cost = self._costs[name]
            place = cost.place
            found = sums[move.direction, place.layer, place.part, place.phase, move.bytes]
            found[0] += cost.times
            found[1] += cost.times * self._Seconds(move)
            found[2] += cost.times * self._waits[name]
        keys = ("direction", "layer", "part", "phase", "bytes")
        rows = [
            {
                **dict(zip(keys, key, strict=True)),
                "count": int(count),
                "seconds": seconds,
                "waiting_seconds": waited,
            }
            for key, (count, seconds, waited) in sums.items()
        ]
        return sorted(rows, key=lambda row: -row["seconds"])

    def _Seconds(self, move: Move) -> float:
        return move.bytes / self._machine.host_bandwidth

    def _Follow(self, inside: Computation) -> tuple[float, float]:
        """(seconds of one execution of a computation, those of them that are spent waiting)."""
        now, waited = 0.0, 0.0
        free = {IN: 0.0, OUT: 0.0}
        ends: dict[str, float] = {}
        for instruction in inside.instructions:
            name = instruction.name
            cost = self._costs.get(name)
            if cost is None or not cost.times:  # in a branch that is not taken
                continue
            move = move_of(inside, instruction)
            if move is not None:
                self._moves[name] = move
                free[move.direction] = max(now, free[move.direction]) + self._Seconds(move)
                ends[name] = free[move.direction]
            begun = name if move is not None else (instruction.operands or ("",))[0]
            if begun in ends and not instruction.opcode.endswith("-start"):
                wait = max(ends.pop(begun) - now, 0.0)
                self._waits[begun] += wait
                now, waited = now + wait, waited + wait
                continue
            took, of_it = self._Work(instruction, cost)
            now, waited = now + took, waited + of_it
        return now, waited

    def _Work(self, instruction: Instruction, cost: Cost) -> tuple[float, float]:
        """As _Follow, of one execution of an instruction."""
        if instruction.opcode == "while":
            body = self._module.computation(instruction.attribute("body"))
            trips = self._costs[body.root.name].times / cost.times
            took, waited = self._Follow(body)
            return trips * took, trips * waited
        if instruction.opcode in _NESTED:
            called = map(self._module.computation, instruction.called)
            each = [self._Follow(one) for one in called]
            return sum(took for took, _ in each), sum(waited for _, waited in each)
        return execution_seconds(cost, self._machine), 0.0
