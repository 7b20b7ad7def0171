"""Groups the operations of a traced function into operators, for each of which one choice is made.

A product, a convolution or a look-up is an operator. What is computed from its result element by element, and what is
reduced, normalized, transposed or reshaped, follows it: all of its tensors are sharded alike. An argument is stored as
its first operator wants it. Annotations are operators of their own, with one choice. An operation without a rule keeps
all of its tensors whole.

Each dimension of a tensor has a letter of its operator, or None where it stays whole.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lingvo_moe.analysis.search.operators import RULES
from lingvo_moe.analysis.search.operators.rule import Rule, known_shape
from lingvo_moe.core.sharding.letters import DimsMapping, axes_of
from lingvo_moe.core.sharding.mesh import Mesh

ANNOTATION = "XlaSharding"
_NO_GRADIENT = frozenset({"OneHot", "OnesLike", "StopGradient", "ZerosLike"})
_STATIC = frozenset({"Rank", "Shape", "ShapeN", "Size"})  # shapes are static

Letters = tuple[int | None, ...]


@dataclass(frozen=True)
class TracedTensor:
    """A tensor."""

    number: int  # counted in the order in which tensors are made, arguments first
    op: int  # the number of the operation that makes it; -1 for an argument
    index: int  # the index of the result, or of the argument
    name: str  # for people
    # `shape`, `itemsize`: elements, and bytes of each.
    shape: tuple[int, ...]
    itemsize: int
    has_gradient: bool  # whether its gradient is computed
    is_argument: bool = False  # whether the function takes it, or an annotation of it

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Member:
    """An operation of an operator."""

    op: int  # its number
    type: str  # the operation's type
    letters: frozenset[int]  # all that it runs over
    # (number of the operand, the tensor, its letters) of each operand that is no constant.
    uses: tuple[tuple[int, TracedTensor, Letters], ...]
    makes: tuple[tuple[TracedTensor, Letters], ...] = ()  # (the tensor, its letters)
    reduced: frozenset[int] = frozenset()  # those over which its results are reduced
    flops: int = 0  # the FLOPs of products, over all devices

    @property
    def is_pin(self) -> bool:
        """Whether it only says how a tensor is sharded."""
        return self.type in (ANNOTATION, "result")

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back through it."""
        return not self.makes or any(v.has_gradient for v, _ in self.makes)


@dataclass
class Operator:
    """Operations for which one choice is made."""

    name: str  # the name of the operation that names it
    kind: str  # the type of that operation; 'argument' where there is none
    # The size of each letter, which every number of parts divides.
    sizes: dict[int, int] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)  # its operations, in order
    # The tensors that it makes or stores, with their letters.
    holds: dict[TracedTensor, Letters] = field(default_factory=dict)
    # Those arguments of the function that it stores.
    arguments: list[TracedTensor] = field(default_factory=list)
    # The mesh axes of each letter where an annotation says so.
    fixed: dict[int, tuple[str, ...]] | None = None

    @property
    def root(self) -> tuple[tuple[TracedTensor, Letters], ...]:
        """The results that its other tensors follow: those of its first product, else of its first operation."""
        products = (m.makes for m in self.members if m.flops)
        return next(products, self.members[0].makes if self.members else ())


@dataclass(frozen=True)
class _Node:
    """An operation of the trace: its number, and the values of its operands (None for constants) and results."""

    number: int
    op: Any
    used: Sequence[TracedTensor | None]
    made: Sequence[TracedTensor]


@dataclass(frozen=True)
class Argument:
    """A tensor argument of the function."""

    tensor: Any  # the traced tensor
    path: str  # its name
    mapping: DimsMapping | None  # its sharding where the caller gave one
    has_gradient: bool  # whether the gradient by it is wanted


class Operators:
    """The operators of a function.

    Attributes:
        operators: in the order in which they are first computed.
        home: the operator of each tensor, by the tensor's number; without constants.
        values: all tensors but constants, by number.
        without_rule: the types of operations that have no rule, with the name of the first.
    """

    def __init__(
        self,
        arguments: Sequence[Argument],
        operations: Sequence[Any],
        mesh: Mesh,
        mapping_of: Callable[[Any], DimsMapping],
        results: Sequence[tuple[Any, str, DimsMapping | None]] = (),
    ):
        """`operations` are those of the trace, in order, of which `mapping_of` reads the annotations. Each of `results`
        has its path, and its sharding where the caller gave one."""
        self.operators: list[Operator] = []
        self.home: dict[int, Operator] = {}
        self.values: list[TracedTensor] = []
        self.without_rule: dict[str, str] = {}
        self._mesh, self._mapping_of = mesh, mapping_of
        self._by_tensor: dict[Any, TracedTensor] = {}
        self._dims: dict[int, Letters] = {}
        self._pending: set[int] = set()  # ids of operators that no other operator has taken yet
        self._parents: list[int | None] = []  # of letters: the one that replaces it; None: whole
        self._sizes: list[int] = []  # of letters
        for index, argument in enumerate(arguments):
            self._Argument(index, argument)
        for number, op in enumerate(operations):
            self._Operation(number, op)
        for tensor, path, mapping in results:
            self._Result(tensor, path, mapping)
        self._Finish()

    def ValueOf(self, tensor: Any) -> TracedTensor | None:
        """The value of a tensor of the trace; None for a constant."""
        return self._by_tensor.get(tensor.ref())

    def _NewValue(
        self, op: int, index: int, tensor: Any, name: str, gradient: bool, passed: bool = False
    ) -> TracedTensor:
        """`passed`: whether it is what an annotation passes on of an argument."""
        value = TracedTensor(
            len(self.values),
            op,
            index,
            name,
            tuple(known_shape(tensor)),
            tensor.dtype.size or 1,
            gradient and (tensor.dtype.is_floating or tensor.dtype.is_complex),
            passed or op < 0,
        )
        self.values.append(value)
        self._by_tensor[tensor.ref()] = value
        return value

    def _Argument(self, index: int, argument: Argument) -> None:
        value = self._NewValue(-1, index, argument.tensor, argument.path, argument.has_gradient)
        operator = self._NewOperator(argument.path, "argument")
        letters = self._NewLetters(operator, value.shape)
        operator.arguments.append(value)
        self._Hold(operator, value, letters)
        if argument.mapping is None:
            self._pending.add(id(operator))
        else:
            self._Fix(operator, letters, argument.mapping)

    def _Operation(self, number: int, op: Any) -> None:
        used = [self._by_tensor.get(x.ref()) for x in op.inputs]
        if not any(used) or op.type in _STATIC:
            return  # a constant: every device computes it
        if op.type == "FusedBatchNormV3":
            # The workspace of cuDNN: XLA leaves it empty, and TensorFlow states no shape.
            op.outputs[5].set_shape([0])
        for y in op.outputs:
            if not y.shape.is_fully_defined():
                if not any(z.consumers() for z in op.outputs):
                    return  # nothing reads it
                raise ValueError(
                    f"{op.name}: {y.name} has shape {y.shape}; shapes have to be static"
                )
        gradient = op.type not in _NO_GRADIENT and any(
            v is not None and v.has_gradient for v in used
        )
        passed = op.type == ANNOTATION and used[0] is not None and used[0].is_argument
        made = [
            self._NewValue(number, i, y, y.name, gradient, passed) for i, y in enumerate(op.outputs)
        ]
        if op.type == "IdentityN":  # also what a custom gradient is made of
            for x, y in zip(used, made, strict=True):
                if x is not None:
                    self._Hold(self.home[x.number], y, self._dims[x.number])
                else:
                    del self._by_tensor[op.outputs[y.index].ref()]
            return
        at = _Node(number, op, used, made)
        if op.type == ANNOTATION:
            self._Annotation(at)
            return
        rule_of = RULES.get(op.type)
        rule = rule_of(op) if rule_of else None
        if rule is None:
            self._WithoutRule(at)
        elif rule.heavy:
            self._Lead(at, rule)
        else:
            self._Follow(at, rule)

    def _Annotation(self, at: _Node) -> None:
        operator = self._NewOperator(at.op.name, ANNOTATION)
        (read, *_), (made, *_) = at.used, at.made
        assert read is not None  # else it is a constant
        letters = self._NewLetters(operator, made.shape)
        mapping = self._mapping_of(at.op)
        self._Fix(operator, letters, mapping)
        argument = self.home[read.number]
        if id(argument) in self._pending and is_even(read.shape, mapping, self._mesh):
            self._Absorb(operator, argument, self._dims[read.number], letters)
        uses, makes = ((0, read, letters),), ((made, letters),)
        self._Append(operator, Member(at.number, ANNOTATION, _some(letters), uses, makes))

    def _Result(self, tensor: Any, path: str, mapping: DimsMapping | None) -> None:
        value = self.ValueOf(tensor)
        if mapping is None or value is None:
            return
        operator = self._NewOperator(path, "result")
        letters = self._NewLetters(operator, value.shape)
        self._Fix(operator, letters, mapping)
        self._Append(operator, Member(-1, "result", _some(letters), ((0, value, letters),)))

    def _WithoutRule(self, at: _Node) -> None:
        self.without_rule.setdefault(at.op.type, at.op.name)
        operator = self._NewOperator(at.op.name, at.op.type)
        uses = ((i, v, (None,) * len(v.shape)) for i, v in enumerate(at.used) if v is not None)
        makes = ((v, (None,) * len(v.shape)) for v in at.made)
        self._Append(
            operator, Member(at.number, at.op.type, frozenset(), tuple(uses), tuple(makes))
        )

    def _Lead(self, at: _Node, rule: Rule) -> None:
        """Makes an operation an operator of its own."""
        operator = self._NewOperator(at.op.name, at.op.type)
        letters = {letter: self._NewLetter(operator, size) for letter, size in rule.sizes.items()}
        self._Join(operator, at, rule, letters)

    def _Follow(self, at: _Node, rule: Rule) -> None:
        """Puts an operation where the operand is that determines the result's sharding."""
        full = [
            v
            for v, dims in zip(at.used, rule.inputs, strict=True)
            if v is not None and dims is not None and set(rule.sizes) <= set(dims)
        ]
        if not full:
            self._Lead(at, rule)
            return
        # The one that was computed last; an argument has no sharding of its own yet.
        leader = max(full, key=lambda v: (id(self.home[v.number]) not in self._pending, v.number))
        place = next(i for i, v in enumerate(at.used) if v is leader)
        dims = rule.inputs[place]
        assert dims is not None
        of_leader = dict(zip(dims, self._dims[leader.number]))
        letters = {letter: of_leader.get(letter) for letter in rule.sizes}
        for letter, size in rule.sizes.items():
            self._Limit(letters[letter], size)
        self._Join(self.home[leader.number], at, rule, letters)

    def _Join(
        self,
        operator: Operator,
        at: _Node,
        rule: Rule,
        letters: Mapping[str, int | None],
    ) -> None:
        """Makes an operation a member; arguments that no operator has yet come along."""

        def named(dims: Sequence[str | None]) -> Letters:
            return tuple(None if d is None else letters[d] for d in dims)

        uses = []
        for i, (v, dims) in enumerate(zip(at.used, rule.inputs, strict=True)):
            if v is None:
                continue
            wanted = (None,) * len(v.shape) if dims is None else named(dims)
            home = self.home[v.number]
            if home is not operator and id(home) in self._pending:
                self._Absorb(operator, home, self._dims[v.number], wanted)
            uses.append((i, v, wanted))
        makes = [(v, named(dims)) for v, dims in zip(at.made, rule.outputs, strict=True)]
        runs_over = _some(letters[letter] for letter in rule.sizes)
        reduced = _some(letters[letter] for letter in rule.reduced)
        # Worth a sharding of its own, as a normalization of the function's argument is.
        if rule.reduced:
            self._pending.discard(id(operator))
        self._Append(
            operator,
            Member(
                at.number, at.op.type, runs_over, tuple(uses), tuple(makes), reduced, rule.flops
            ),
        )

    def _Append(self, operator: Operator, member: Member) -> None:
        operator.members.append(member)
        for value, dims in member.makes:
            self._Hold(operator, value, dims)

    def _Absorb(self, operator: Operator, other: Operator, dims: Letters, wanted: Letters) -> None:
        """Makes what `other` holds part of `operator`: its letters `dims` become `wanted`, all others whole."""
        self._pending.discard(id(other))
        target = {self._Find(d): w for d, w in zip(dims, wanted)}
        for letter in other.sizes:
            goal = self._Find(target.get(letter)) if self._Find(letter) == letter else None
            if self._Find(letter) == letter:
                self._parents[letter] = goal
                self._Limit(goal, self._sizes[letter])
        operator.members = other.members + operator.members
        operator.arguments += other.arguments
        for value in other.holds:
            self._Hold(operator, value, self._dims[value.number])
        other.holds, other.members, other.arguments = {}, [], []
        self.operators.remove(other)

    def _NewOperator(self, name: str, kind: str) -> Operator:
        self.operators.append(Operator(name, kind))
        return self.operators[-1]

    def _NewLetters(self, operator: Operator, shape: Sequence[int]) -> Letters:
        return tuple(None if n == 1 else self._NewLetter(operator, n) for n in shape)

    def _NewLetter(self, operator: Operator, size: int) -> int:
        letter = len(self._parents)
        self._parents.append(letter)
        self._sizes.append(size)
        operator.sizes[letter] = size
        return letter

    def _Find(self, letter: int | None) -> int | None:
        """The letter that stands for one now."""
        while letter is not None and self._parents[letter] != letter:
            letter = self._parents[letter]
        return letter

    def _Limit(self, letter: int | None, size: int) -> None:
        """Lets only such numbers of parts divide a letter as divide a dimension of this size too."""
        letter = self._Find(letter)
        if letter is not None:
            self._sizes[letter] = math.gcd(self._sizes[letter], size)

    def _Hold(self, operator: Operator, value: TracedTensor, letters: Letters) -> None:
        """Makes an operator the home of a tensor, with these letters."""
        self.home[value.number], self._dims[value.number] = operator, letters
        operator.holds[value] = letters

    def _Fix(self, operator: Operator, letters: Letters, mapping: DimsMapping) -> None:
        """Leaves an operator one choice: that of a mapping, which an annotation or the caller gave."""
        operator.fixed = {}
        for letter, axis in zip(letters, mapping, strict=True):
            if letter is not None and axis is not None:
                operator.fixed[letter] = axes_of(axis)

    def _Finish(self) -> None:
        """Numbers the letters of each operator from 0, so that equal layers look alike."""
        for operator in self.operators:
            remaining = [d for d in operator.sizes if self._Find(d) == d]
            number: dict[int | None, int | None] = {d: i for i, d in enumerate(remaining)} | {
                None: None
            }

            def now(letters: Letters, number=number) -> Letters:
                return tuple(number[self._Find(d)] for d in letters)

            operator.sizes = {i: self._sizes[d] for i, d in enumerate(remaining)}
            operator.holds = {v: now(d) for v, d in operator.holds.items()}
            if operator.fixed is not None:
                numbers = zip(now(tuple(operator.fixed)), operator.fixed.values(), strict=True)
                operator.fixed = {d: axes for d, axes in numbers if d is not None}
            operator.members = [
                replace(
                    m,
                    letters=_some(now(tuple(sorted(m.letters)))),
                    reduced=_some(now(tuple(sorted(m.reduced)))),
                    uses=tuple((i, v, now(d)) for i, v, d in m.uses),
                    makes=tuple((v, now(d)) for v, d in m.makes),
                )
                for m in operator.members
            ]


def _some(letters: Iterable[int | None]) -> frozenset[int]:
    """The letters among these, without the Nones of dimensions that stay whole."""
    return frozenset(d for d in letters if d is not None)


def is_even(shape: Sequence[int], mapping: DimsMapping, mesh: Mesh) -> bool:
    """Whether each dimension is a multiple of the number of its parts."""
    return all(
        n % mesh.axis_size(axes_of(axis)) == 0 for n, axis in zip(shape, mapping, strict=True)
    )
