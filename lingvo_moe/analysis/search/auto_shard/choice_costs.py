"""The costs of the operators' choices: seconds of a device, and bytes in its memory.

An operator's own cost is its products, its memory traffic, the sums over devices of letters that it reduces, and, where
gradients are wanted, the same of its gradients: each product has one for each operand, and the gradient of a tensor is
summed over the axes along which its copies lie. Between two operators the cost is that of bringing a tensor from one
sharding to the other, and its gradient back. What only says how a tensor is sharded, an annotation or a sharding that
the caller gave, costs nothing itself, so that the same strategy has the same costs whatever of it was given.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.analysis.plans.memory.step_bytes import StateSize
from lingvo_moe.analysis.plans.network.mesh_machine import MeshMachine
from lingvo_moe.analysis.search.auto_shard import exchanges
from lingvo_moe.analysis.search.auto_shard.exchanges import Layout
from lingvo_moe.analysis.search.auto_shard.operators import (
    ANNOTATION,
    Letters,
    Member,
    Operator,
    Operators,
    TracedTensor,
)

# Bytes that the update of a weight with one slot moves, for each byte of the weight: a device does so for its part.
_UPDATED = StateSize(weights=1, gradients=1, slots=1).Updating()

# The letter that each mesh axis shards; None: it holds copies.
Choice = tuple[int | None, ...]


@dataclass(frozen=True)
class Choices:
    """The choices of one operator."""

    choices: tuple[Choice, ...]  # the shardings
    seconds: np.ndarray  # the seconds of each
    # Bytes on a device of each: arguments, their gradients, and what the gradient needs.
    kept: np.ndarray
    working: np.ndarray  # bytes of its own operands and results


@dataclass(frozen=True)
class Edge:
    """Two operators that exchange tensors."""

    ends: tuple[int, int]  # the numbers of both
    classes: tuple[np.ndarray, np.ndarray]  # for each choice of each end, which row or column it is
    seconds: np.ndarray  # [rows, columns]


@dataclass(frozen=True)
class Crossing:
    """A tensor that an operation of one operator reads from another."""

    value: TracedTensor  # the tensor
    # `producer`, `consumer`: numbers of the operators.
    producer: int
    consumer: int
    member: Member  # the operation that reads it
    operand: int  # the number of the operand
    # `held`, `used`: its letters there and here.
    held: Letters
    used: Letters
    summed: tuple[int, ...]  # letters of the operation that the operand lacks


class Costs:
    """The costs of a function's operators over a mesh.

    Attributes:
        axes: the axes of the mesh that have more than one device.
        choices: of each operator.
        number: of the operator that makes or stores a tensor, by the tensor's number.
        crossings: between operators.
        edges: their costs.
    """

    def __init__(self, operators: Operators, on: MeshMachine):
        self._on = on
        self.axes = [a for a, n in zip(on.mesh.axis_names, on.mesh.shape) if n > 1]
        self._sizes = [on.mesh.axis_size(a) for a in self.axes]
        self._operators = operators.operators
        number = {id(operator): i for i, operator in enumerate(self._operators)}
        self.number = {v: number[id(op)] for v, op in operators.home.items()}
        self.crossings = list(self._Crossings())
        self._leaves: dict[int, set[TracedTensor]] = defaultdict(set)
        for crossing in self.crossings:
            if not (crossing.member.is_pin or crossing.value.is_argument):
                self._leaves[crossing.producer].add(crossing.value)
        self._known_choices: dict[tuple, Choices] = {}
        self._known_tables: dict[tuple, tuple[tuple[np.ndarray, np.ndarray], np.ndarray]] = {}
        self.choices = [self._Choices(i, op) for i, op in enumerate(self._operators)]
        self.edges = self._Edges()

    def LayoutOf(self, letters: Letters, choice: Choice) -> Layout:
        """The mesh axes of each dimension."""
        return tuple(
            tuple(a for a, c in zip(self.axes, choice) if c == letter) if letter is not None else ()
            for letter in letters
        )

    def ExchangesOf(self, crossing: Crossing, producer: Choice, consumer: Choice):
        """The collectives of a crossing: forward, and of the gradient."""
        mesh = self._on.mesh
        made, used = self.LayoutOf(crossing.held, producer), self.LayoutOf(crossing.used, consumer)
        forward = exchanges.exchanges(mesh, made, used)
        if not (crossing.value.has_gradient and crossing.member.has_gradient):
            return forward, ()
        partial = self._Along(crossing.summed, consumer)
        return forward, exchanges.gradient_exchanges(mesh, used, made, partial, self._on.scatters)

    def _Crossings(self):
        for i, operator in enumerate(self._operators):
            for member in operator.members:
                for operand, value, used in member.uses:
                    producer = self.number[value.number]
                    if producer != i:
                        made = self._operators[producer].holds[value]
                        summed = tuple(sorted(member.letters.difference(used)))
                        yield Crossing(value, producer, i, member, operand, made, used, summed)

    def _Choices(self, number: int, operator: Operator) -> Choices:
        """The choices of an operator with their costs, which are computed once for operators that look alike."""
        key = self._Look(number, operator)
        if key not in self._known_choices:
            choices = self._AsAnnotated(operator, tuple(self._Enumerate(operator)))
            costs = [self._CostOf(number, operator, choice) for choice in choices]
            seconds, kept, working = (np.array(column, float) for column in zip(*costs))
            self._known_choices[key] = Choices(choices, seconds, kept, working)
        return self._known_choices[key]

    def _Annotated(self, operator: Operator) -> list[tuple[Letters, Layout]]:
        """The annotated layout of each operand of a product; empty unless all of them are annotated."""
        layouts = []
        for member in operator.members:
            for _, value, used in member.uses if member.flops else ():
                home = self._operators[self.number[value.number]]
                if home.kind != ANNOTATION or home.fixed is None:
                    return []
                letters = home.holds[value]
                layouts.append(
                    (used, tuple(home.fixed.get(d, ()) for d in letters if d is not None))
                )
                if None in letters:
                    return []
        return layouts

    def _AsAnnotated(self, operator: Operator, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """Keeps the choices that read a product's operands in their annotated layouts; all choices if none does."""
        wanted = self._Annotated(operator)
        agreeing = tuple(
            choice
            for choice in choices
            if all(self.LayoutOf(used, choice) == layout for used, layout in wanted)
        )
        return agreeing or choices

    def _Look(self, number: int, operator: Operator) -> tuple:
        """All that the costs of an operator depend on: those of equal layers are computed once."""

        def look(value: TracedTensor, letters: Letters) -> tuple:
            home = self.number[value.number]
            here = operator.holds[value] if home == number else None
            of_value = value.num_bytes, value.itemsize, value.has_gradient, value.is_argument
            return *of_value, letters, here

        members = tuple(
            (
                *(m.letters, m.reduced, m.flops, m.has_gradient, m.is_pin),
                tuple(look(v, d) for _, v, d in m.uses),
                tuple(look(v, d) for v, d in m.makes),
            )
            for m in operator.members
        )
        leaves = sorted(self._leaves[number], key=lambda v: v.number)
        numbers = [v.number for m in operator.members for _, v, _ in m.uses]
        return (
            tuple(operator.sizes.values()),
            tuple(self._Annotated(operator)),
            None if operator.fixed is None else tuple(operator.fixed.items()),
            members,
            tuple(look(v, operator.holds[v]) for v in leaves),
            tuple(look(v, operator.holds[v]) for v in operator.arguments),
            tuple(numbers.index(n) for n in numbers),
        )

    def _Enumerate(self, operator: Operator) -> Iterator[Choice]:
        """Yields the choices that divide an operator's letters evenly, or the one that is fixed."""
        if operator.fixed is not None:
            by_axis = {a: letter for letter, axes in operator.fixed.items() for a in axes}
            yield tuple(by_axis.get(a) for a in self.axes)
            return
        for choice in itertools.product((None, *operator.sizes), repeat=len(self.axes)):
            if all(n % self._Parts((letter,), choice) == 0 for letter, n in operator.sizes.items()):
                yield choice

    def _Parts(self, letters: Sequence[int | None], choice: Choice) -> int:
        """The number of parts into which a choice divides a tensor with these letters."""
        return math.prod(n for n, c in zip(self._sizes, choice) if c is not None and c in letters)

    def _Along(self, letters: Sequence[int], choice: Choice) -> tuple[str, ...]:
        """The mesh axes that shard any of these letters."""
        return tuple(a for a, c in zip(self.axes, choice) if c is not None and c in letters)

    def _Bytes(self, value: TracedTensor, letters: Letters, choice: Choice) -> float:
        """The bytes of a tensor on one device."""
        return value.num_bytes / self._Parts(letters, choice)

    def _CostOf(
        self, number: int, operator: Operator, choice: Choice
    ) -> tuple[float, float, float]:
        """The `seconds`, `kept` and `working` of Choices for one choice of an operator."""
        total = 0.0
        traffic = sum(self._Bytes(v, operator.holds[v], choice) for v in self._leaves[number])
        base = sum(self._Bytes(v, d, choice) for v, d in operator.root) or np.inf
        gradients = False
        seen: set[tuple[int, Letters]] = set()
        for member in operator.members:
            total += self._Sums(member, choice)
            backward = sum(v.has_gradient for _, v, _ in member.uses) if member.has_gradient else 0
            gradients |= backward > 0
            moved = 0.0
            for _, value, used in member.uses:
                here = self.number[value.number] == number
                brought = not here and not value.is_argument and (value.number, used) not in seen
                if not member.is_pin and (member.flops or member.reduced or brought):
                    seen.add((value.number, used))
                    # What was computed element by element is computed again from the operator's own result.
                    size = self._Bytes(value, used, choice)
                    moved += min(size, base) if here and not member.flops else size
                if here:
                    total += self._Inside(operator, member, value, used, choice)
            flops = member.flops / self._Parts(tuple(member.letters), choice)
            if member.flops:
                moved += sum(self._Bytes(v, d, choice) for v, d in member.makes)
            itemsize = max((v.itemsize for _, v, _ in member.uses), default=4)
            total += (1 + backward) * self._on.Computing(flops, moved, itemsize)
        passes = 3 if gradients else 1
        total += passes * traffic / self._on.machine.hbm_bandwidth
        arguments = sum(self._Bytes(v, operator.holds[v], choice) for v in operator.arguments)
        wanted = sum(
            self._Bytes(v, operator.holds[v], choice) for v in operator.arguments if v.has_gradient
        )
        # Also so that of equal choices one is taken that stores less.
        total += (_UPDATED * wanted + 0.01 * arguments) / self._on.machine.hbm_bandwidth
        kept = arguments + wanted + (traffic if gradients else 0.0)
        return total, kept, self._Working(operator, choice)

    def _Working(self, operator: Operator, choice: Choice) -> float:
        """The bytes on a device of the operands and results of the operation that has most of them."""
        sizes = [
            sum(self._Bytes(v, d, choice) for _, v, d in m.uses)
            + sum(self._Bytes(v, d, choice) for v, d in m.makes)
            for m in operator.members
        ]
        return max(sizes, default=0.0)

    def _Sums(self, member: Member, choice: Choice) -> float:
        """Seconds to add up (or reduce otherwise) the parts of an operation's results."""
        axes = self._Along(tuple(member.reduced), choice)
        if not axes:
            return 0.0
        return sum(
            self._on.Seconds("all-reduce", self._Bytes(v, d, choice), axes) for v, d in member.makes
        )

    def _Inside(
        self, operator: Operator, member: Member, value: TracedTensor, used: Letters, choice: Choice
    ) -> float:
        """Seconds to bring an operation a tensor that its own operator makes, in the layout in which it reads it."""
        letters = operator.holds[value]
        gradient = value.has_gradient and member.has_gradient
        summed = tuple(member.letters.difference(used)) if gradient else ()
        partial = self._Along(summed, choice)
        before, after = self.LayoutOf(letters, choice), self.LayoutOf(used, choice)
        return self._Bring(before, after, partial, value.num_bytes, gradient)

    def _Edges(self) -> list[Edge]:
        """One for each pair of operators; a tensor that an operator reads twice alike is brought once."""
        pairs: dict[tuple[int, int], dict[tuple, Crossing]] = defaultdict(dict)
        for c in self.crossings:
            key = (c.value.number, c.used, c.summed, c.member.has_gradient)
            pairs[c.producer, c.consumer].setdefault(key, c)
        return [self._Edge(ends, list(crossings.values())) for ends, crossings in pairs.items()]

    def _Edge(self, ends: tuple[int, int], crossings: Sequence[Crossing]) -> Edge:
        first, second = (self.choices[i].choices for i in ends)
        looks = tuple(
            (
                c.value.num_bytes,
                c.held,
                c.used,
                c.summed,
                c.value.has_gradient and c.member.has_gradient,
            )
            for c in crossings
        )
        key = (first, second, looks)
        if key not in self._known_tables:
            rows = [tuple(self.LayoutOf(c.held, a) for c in crossings) for a in first]
            columns = [
                tuple((self.LayoutOf(c.used, b), self._Along(c.summed, b)) for c in crossings)
                for b in second
            ]
            row_of, column_of = _numbered(rows), _numbered(columns)
            table = np.zeros((len(row_of), len(column_of)))
            for row, i in row_of.items():
                for column, j in column_of.items():
                    for look, made, (used, partial) in zip(looks, row, column):
                        table[i, j] += self._Bring(made, used, partial, look[0], look[-1])
            classes = [row_of[row] for row in rows], [column_of[column] for column in columns]
            self._known_tables[key] = (np.array(classes[0]), np.array(classes[1])), table
        return Edge(ends, *self._known_tables[key])

    def _Bring(
        self, made: Layout, used: Layout, partial: tuple[str, ...], num_bytes: int, gradient: bool
    ) -> float:
        """Seconds to bring a tensor from one layout to another, and its gradient back."""
        if made == used and not partial:
            return 0.0
        mesh = self._on.mesh
        total = exchanges.seconds(self._on, exchanges.exchanges(mesh, made, used), num_bytes)
        if gradient:
            back = exchanges.gradient_exchanges(mesh, used, made, partial, self._on.scatters)
            total += exchanges.seconds(self._on, back, num_bytes)
        return total


def _numbered(items: Sequence[Any]) -> dict[Any, int]:
    return {item: i for i, item in enumerate(dict.fromkeys(items))}
