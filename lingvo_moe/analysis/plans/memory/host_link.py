"""The bytes that a compiled program keeps in the memory of the hosts, and the seconds that moving them takes.

The compiler writes each move as a start and an end, between which it schedules other work. The program is followed in
the order of its schedule: a move begins when its link is free, and the device waits at the end of a move that is not
done. A device has one link to its host, which carries both directions at the same time. A move that has no start, e.g.
a plain copy, is waited for at once. A move inside a loop takes as long each time, and loops begin with a free link.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lingvo_moe.analysis.plans.machines.base_machine import Machine
from lingvo_moe.analysis.plans.work.costs import Cost
from lingvo_moe.analysis.plans.work.seconds import execution_seconds
from lingvo_moe.analysis.plans.work.traffic import FREE
from lingvo_moe.analysis.programs.hlo.instructions import Array, Computation, Instruction
from lingvo_moe.analysis.programs.hlo.module import Module

HOST_SPACE = 5  # the memory space of the host in a compiled program's text
IN, OUT = "to device", "to host"
_NESTED = ("call", "conditional")


@dataclass(frozen=True)
class HostTransfer:
    """A transfer between a device and its host."""

    direction: str  # either IN or OUT
    bytes: int  # the bytes of one execution, with the padding of tiles


def host_plan(
    module: Module, costs: Sequence[Cost], machine: Machine, reported: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the plan's `host`, as docs/plan_json.md describes it; {} for a program without anything on a host.

    Args:
        reported: the compiler's sizes in bytes: host_arguments and host_temporaries, where there are any.
    """
    uses = {name: int(reported.get(f"host_{name}", 0)) for name in ("arguments", "temporaries")}
    if not any(uses.values()):
        return {}
    reader = _LinkReader(module, costs, machine)
    waiting = reader.Waiting()
    needed = sum(uses.values())
    rows = reader.Rows()
    seconds = sum(row["seconds"] for row in rows)
    return {
        **uses,
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


def move_of(inside: Computation, instruction: Instruction) -> HostTransfer | None:
    """The transfer that an instruction begins, or does at once; None for other instructions.

    From the host the whole result is moved, e.g. a slice. To the host it is the largest operand that is on the device,
    e.g. the update of a slice. An instruction that computes with operands on the host counts as a transfer of its
    result, at least.
    """
    kind = instruction.opcode
    if kind in FREE or kind.endswith("-done") or not (instruction.operands and instruction.arrays):
        return None
    operands = inside.operands(instruction)
    inputs = [array for operand in operands for array in operand.arrays]
    target = _target(instruction, inputs)
    from_host = any(array.memory_space == HOST_SPACE for array in inputs)
    if target.memory_space == HOST_SPACE:
        sources = [array.padded_bytes for array in inputs if array.memory_space != HOST_SPACE]
        return HostTransfer(OUT, max(sources, default=target.padded_bytes))
    return HostTransfer(IN, target.padded_bytes) if from_host else None


def _target(instruction: Instruction, inputs: Sequence[Array]) -> Array:
    """The array that is written; the results of most starts begin with their operands."""
    arrays = instruction.arrays
    if instruction.opcode.endswith("-start") and instruction.opcode != "copy-start":
        arrays = arrays[len(inputs) :] or arrays  # an all-reduce-start has results alone
    return arrays[0]


class _Link:
    """One direction of a link: one move at a time, in the order in which they begin."""

    def __init__(self) -> None:
        self._taken: list[tuple[str, float, float]] = []  # name, from, to

    def Begin(self, name: str, time: float, seconds: float) -> None:
        """Queues a move of so many seconds, which is begun at this time."""
        start = max(time, self._taken[-1][2]) if self._taken else time
        self._taken.append((name, start, start + seconds))

    def Wait(self, name: str, time: float) -> Iterator[tuple[str, float]]:
        """Yields what the link carries from `time` on until this move is done: moves, and the seconds of each."""
        for move, start, end in self._taken:
            if end > time:
                yield move, end - max(start, time)
            if move == name:
                return


class _Spent(NamedTuple):
    """The seconds that an execution of an instruction or a computation takes."""

    seconds: float  # all of them
    waiting: float  # those in which the device waits for moves


class _LinkReader:
    """Follows a program in the order of its schedule."""

    def __init__(self, module: Module, costs: Sequence[Cost], machine: Machine):
        self._module = module
        self._costs = {cost.name: cost for cost in costs}
        self._machine = machine
        self._moves: dict[str, HostTransfer] = {}
        # By the name of a move, in one execution.
        self._waits: dict[str, float] = defaultdict(float)

    def Waiting(self) -> float:
        """Seconds of one run of the program in which the device waits for moves."""
        return self._Follow(self._module.entry).waiting

    def Rows(self) -> list[dict[str, Any]]:
        """The plan's `moves`, after Waiting: the longest first."""
        sums: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for name, move in self._moves.items():
            cost = self._costs[name]
            place = cost.place
            row = sums[move.direction, place.layer, place.part, place.phase, move.bytes]
            row[0] += cost.times
            row[1] += cost.times * self._Seconds(move)
            row[2] += cost.times * self._waits[name]
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

    def _Seconds(self, move: HostTransfer) -> float:
        return move.bytes / self._machine.host_bandwidth

    def _Follow(self, inside: Computation) -> _Spent:
        """Executes a computation once, instruction by instruction."""
        time, waited = 0.0, 0.0
        links = {IN: _Link(), OUT: _Link()}
        begun: dict[str, HostTransfer] = {}
        for instruction in inside.instructions:
            name = instruction.name
            cost = self._costs.get(name)
            if cost is None or not cost.times:  # in a branch that is not taken
                continue
            move = move_of(inside, instruction)
            if move is not None:
                self._moves[name] = begun[name] = move
                links[move.direction].Begin(name, time, self._Seconds(move))
            ended = name if move is not None else (instruction.operands or ("",))[0]
            if ended in begun and not instruction.opcode.endswith("-start"):
                for carried, wait in links[begun.pop(ended).direction].Wait(ended, time):
                    self._waits[carried] += wait
                    time, waited = time + wait, waited + wait
                continue
            spent = self._Work(instruction, cost)
            time, waited = time + spent.seconds, waited + spent.waiting
        return _Spent(time, waited)

    def _Work(self, instruction: Instruction, cost: Cost) -> _Spent:
        """Executes an instruction that is no move: a loop's body as often as it runs, or what a call calls."""
        if instruction.opcode == "while":
            body = self._module.computation(instruction.attribute("body"))
            trips = self._costs[body.root.name].times / cost.times
            trip = self._Follow(body)
            return _Spent(trips * trip.seconds, trips * trip.waiting)
        if instruction.opcode in _NESTED:
            called = map(self._module.computation, instruction.called)
            every = [self._Follow(one) for one in called]
            return _Spent(sum(one.seconds for one in every), sum(one.waiting for one in every))
        return _Spent(execution_seconds(cost, self._machine), 0.0)
