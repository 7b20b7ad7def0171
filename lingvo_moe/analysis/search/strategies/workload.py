"""Reads the work of a training step from its forward pass: each product of tensors, by its einsum letters.

The forward pass is traced once, for one device, with one block of each stack of layers; nothing is compiled. A product
then has letters and sizes, so that its cost under any map from letters to mesh axes follows without tracing again.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from lingvo_moe.analysis.programs.hlo.parts import EXPERTS, Layers
from lingvo_moe.analysis.search.operators.products import einsum_letters, product_flops
from lingvo_moe.core import randomness
from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.tracing import trace
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding.mesh import single_device
from lingvo_moe.core.task.forms import Forms
from lingvo_moe.core.task.step import Step
from lingvo_moe.core.tensors import VIEWS, Collected, Kept, collecting, origin

# Operations through which a weight, or an activation, is followed to where it comes from.
_SAME = VIEWS | {"Cast", "StridedSlice", "Transpose", "Unpack"}

# Operations that may stand between a product and the activation that a layer marks, e.g. the scale of queries.
_NEAR = _SAME | {"AddV2", "ConcatV2", "IdentityN", "Mul", "Neg", "Split", "SplitV", "Sub"}

DISPATCHED, RETURNED = "dispatched", "returned"


@dataclass(frozen=True)
class Operand:
    """An operand or the result of a product."""

    letters: str  # one for each dimension
    weight: bool = False  # whether it is a variable, whose letters are sharded as weights are


@dataclass(frozen=True)
class Product:
    """An einsum of two operands, or a lookup of rows in a table."""

    part: str  # the layer's `BaseLayer.PART`
    stack: str  # the path of the stack of layers that it is in; '' outside of stacks
    operands: tuple[Operand, Operand]  # the two
    result: Operand  # what it makes
    sizes: tuple[tuple[str, int], ...]  # the size of each letter, ordered by letter
    # How many products with weights read the same activation, of which there is one gradient.
    readers: int = 1
    lookup: bool = False  # whether rows are looked up: no arithmetic
    # The name under which a loop can keep the result, as the layer declares it (`BaseLayer.KEEPS`); '' if none can.
    name: str = ""

    @property
    def of_weight(self) -> bool:
        """Whether an operand is a weight."""
        return any(operand.weight for operand in self.operands)

    @property
    def flops(self) -> int:
        """Operations of the forward pass on all devices together: two for each multiply-add."""
        return 0 if self.lookup else product_flops(size for _, size in self.sizes)


@dataclass(frozen=True)
class Workload:
    """The work of a training step."""

    # Each product with the number of times that a step computes it in the forward pass.
    products: Mapping[Product, int]
    blocks: Mapping[str, int]  # how many blocks each stack has, by path
    boundaries: Mapping[str, int]  # elements of the input of one block of each stack, by path
    names: Mapping[str, Kept]  # the activations that loops over blocks can keep
    passes: int  # an update's BaseOptimizer.PASSES
    stages: bool = True  # whether its blocks can be stages of a pipeline


def read_workload(params: Params) -> Workload:
    """The work of an experiment's training step.

    Raises:
        WorkloadError: a task without stacks of equal blocks, or without a product that has letters.
    """
    kind = params.task.cls
    forms = kind.Strategy(kind.Strategy(params.task).Without()).OpenForms()
    if forms is None:
        raise WorkloadError(
            f"{kind.__name__}: strategies are searched for tasks with stacks of equal blocks; xs.auto_shard takes any "
            "function"
        )
    task = forms.one_block.Instantiate()
    state, batch = train_step(task, params.input.Instantiate()).arg_specs

    def loss(theta: NestedMap, batch: NestedMap, step: tf.Tensor) -> tf.Tensor:
        return task.FProp(theta, batch, seed=randomness.make_seed(task.p.seed, step))[0]

    declared = task.DeclaredKeeps()
    with collecting(declared) as marked:
        step = Step("loss", loss, (state.theta, batch, state.step))
        graph = trace(step, single_device()).graph
    layers = Layers(task.DeclaredParts())
    marks = _marked_products(marked, graph)
    specs = dict(zip((x.ref() for x in graph.inputs), state.theta.Flatten(), strict=False))
    traced = [
        (replace(product, name=marks.get(op.name, "")), read)
        for op in graph.get_operations()
        for product, read in _product(op, layers, specs, forms)
    ]
    readers = Counter(read for product, read in traced if product.of_weight)
    products: Counter[Product] = Counter()
    for product, read in traced:
        product = replace(product, readers=max(1, readers[read]))
        products[product] += forms.num_blocks.get(product.stack, 1)
    experts = any(part == EXPERTS for part, _ in task.DeclaredParts().values())
    if experts and not any(product.part == EXPERTS for product in products):
        raise WorkloadError(
            f"{task.path}: its experts compute no einsum whose letters are known; choose other experts or another "
            "task.moe.dispatcher"
        )
    if not products:
        raise WorkloadError(f"{task.path}: its forward pass has no einsum whose letters are known")
    names = {name: kind for name, kind in declared.items() if name in marked.names}
    inputs, passes = task.Costs().BlockInputs(batch), task.optimizer.PASSES
    stages = kind.Strategy(params.task).HasStages()
    return Workload(products, forms.num_blocks, inputs, names, passes, stages)


class WorkloadError(ValueError):
    """A task whose work cannot be read."""


def _marked_products(marked: Collected, graph: tf.Graph) -> dict[str, str]:
    """The names of the activations that layers mark, by the operation of the product nearest before each."""
    names: dict[str, str] = {}
    for name, value in zip(marked.names, marked.values, strict=True):
        before = [value.op] if value.graph is graph else []
        for op in before:  # The list grows while it is read.
            if op.type == "Einsum":
                names.setdefault(op.name, name)
            elif op.type in _NEAR:
                before += [x.op for x in op.inputs]
    return names


def _product(
    op: Any, layers: Layers, specs: Mapping[Any, VariableSpec], forms: Forms
) -> Iterator[tuple[Product, str]]:
    """The product that an operation of the graph is, if it is one, and the name of the activation that it reads."""
    if op.type == "Einsum" and len(op.inputs) == 2:
        letters, result = einsum_letters(op)
        weights = [_weight(x, specs) for x in op.inputs]
        tensors = list(op.inputs)
    elif op.type == "GatherV2" and (table := _weight(op.inputs[0], specs)) is not None:
        rows = "BTSJ"[: op.inputs[1].shape.rank]
        letters, weights = [table.letters, rows], [table, None]
        result, tensors = rows + table.letters[1:], [op.inputs[0], op.inputs[1]]
    else:
        return
    renamed = _letters_of_weights(letters, weights)
    operands = [
        Operand("".join(renamed.get(n, n) for n in of_operand), weight is not None)
        for of_operand, weight in zip(letters, weights, strict=True)
    ]
    sizes = {
        renamed.get(n, n): size
        for of_operand, x in zip(letters, tensors, strict=True)
        for n, size in zip(of_operand, x.shape.as_list(), strict=True)
    }
    read = next((x for x, w in zip(tensors, weights, strict=True) if w is None), tensors[0])
    product = Product(
        part=layers.place(op.name, in_backward_loop=False).part,
        stack=forms.StackOf(op.name),
        operands=(operands[0], operands[1]),
        result=Operand("".join(renamed.get(n, n) for n in result)),
        sizes=tuple(sorted(sizes.items())),
        lookup=op.type == "GatherV2",
    )
    yield product, origin(read, _SAME).name


def _letters_of_weights(
    letters: Sequence[str], weights: Sequence[VariableSpec | None]
) -> dict[str, str]:
    """Maps an equation's letters to those of the spec of the first weight in it; {} for an equation without weights.

    A layer may compute products of different weights with one equation, e.g. 'BTM,MH->BTH' for a weight with the
    letters MF: M to M, H to F.
    """
    for in_equation, weight in zip(letters, weights, strict=True):
        if weight is not None:
            in_spec = weight.letters[weight.stack_dims :]
            if len(in_spec) == len(in_equation):
                return dict(zip(in_equation, in_spec, strict=True))
    return {}


def _weight(x: tf.Tensor, specs: Mapping[Any, VariableSpec]) -> VariableSpec | None:
    """The variable whose elements a tensor holds."""
    return specs.get(origin(x, _SAME).ref())
