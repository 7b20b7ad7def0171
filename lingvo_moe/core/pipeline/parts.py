"""The parts of a task: its stacks of equal blocks, and what stands before, between and after them.

A task runs them in order, and a pipeline in stages.

Letters: K stages, M micro-batches, L blocks of a stack, B rows of a micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import tensorflow as tf

from lingvo_moe.core.layers.repeat import ALL, Chunk
from lingvo_moe.core.nested_map import NestedMap

# Weights outside of the stacks: theta without them.
Rest = NestedMap


@dataclass(frozen=True)
class Context:
    """The arguments that a function of a micro-batch gets beside weights and activations."""

    batch: NestedMap  # the micro-batch
    seed: tf.Tensor | None = None  # int32 [2], of the micro-batch; None: nothing is random
    # Its Units divided by those of the whole batch (see BaseTask.MicroBatchTerms); None: it is all of it.
    shares: NestedMap | None = None


class StageWork(Protocol):
    """The work of all stages in a tick, of a stack whose blocks compute different things (cell_stack.py)."""

    def Forward(self, args: NestedMap, shared: NestedMap) -> NestedMap:
        """See stage.Programs.Forward."""
        ...

    def Backward(self, args: NestedMap, shared: NestedMap, carry: bool, weights: bool) -> NestedMap:
        """See stage.Programs.Gradients."""
        ...


@dataclass(frozen=True)
class Stack:
    """L blocks, of which each stage has consecutive ones. They are equal, or cells that are packed to look equal."""

    name: str  # e.g. 'encoder'; operations carry it
    weights: str  # the path in theta of the stacked weights [L, ...], e.g. 'encoder.blocks'
    num_blocks: int  # L
    # The letters of the tensors that pass from stage to stage, by name, e.g. {'x': 'BTM'}.
    carry: Mapping[str, str]
    # (rest, context) -> what enters the first stage: the entries of `carry` except those in `takes`.
    enter: Callable[[Rest, Context], NestedMap]
    # (weights [n, ...], rest, carry, context, which blocks they are) -> the carry after these blocks; the loss that
    # they add, a float32 scalar; what else they return, float32, [n, ...] each, which micro-batches add up.
    run: (
        Callable[
            [NestedMap, Rest, NestedMap, Context, Chunk], tuple[NestedMap, tf.Tensor, NestedMap]
        ]
        | None
    ) = None
    # Entries of `carry` that the stack before it gives, by their names there, e.g. {'memory': 'x'}.
    takes: Mapping[str, str] = field(default_factory=dict)
    cells: StageWork | None = None  # the work of the stages in place of `run`, if blocks differ


@dataclass(frozen=True)
class Parts:
    """A task, as its stacks, its loss and its metrics."""

    stacks: tuple[Stack, ...]  # the stacks in order; the first takes nothing
    takes: tuple[str, ...]  # the entries of the last stack's carry that the loss depends on
    # (rest, these entries, context) -> the loss of a micro-batch, a float32 scalar, and metrics, both terms that
    # micro-batches add up.
    loss: Callable[[Rest, NestedMap, Context], tuple[tf.Tensor, NestedMap]]
    # (sums of the metrics of `loss`, the sum of all losses, what stacks return by their names, [L, ...]) -> metrics of
    # the step, with `updates` if there are any.
    metrics: Callable[[NestedMap, tf.Tensor, NestedMap], NestedMap]
    # For entries of `takes` of whose last dimension the loss depends on the first elements alone: their number.
    cut: Mapping[str, int] = field(default_factory=dict)

    def Traced(self, rest: Rest, first: Callable[[], Context], num: int, devices: int) -> "Parts":
        """These parts; see CellParts.Traced."""
        return self

    def Run(
        self, theta: NestedMap, context: Context
    ) -> tuple[NestedMap, list[tf.Tensor], NestedMap]:
        """Runs all blocks of all stacks.

        Returns:
            The carry after the last stack; the loss that each stack adds; what else each returns, by its name.
        """
        carry, losses, extras = NestedMap(), list[tf.Tensor](), NestedMap()
        for stack in self.stacks:
            taken = {name: carry[before] for name, before in stack.takes.items()}
            carry = NestedMap(stack.enter(theta, context), **taken)
            weights = theta.Get(stack.weights)
            assert stack.run is not None
            carry, loss, extras[stack.name] = stack.run(weights, theta, carry, context, ALL)
            losses.append(loss)
        return carry, losses, extras

    def Terms(self, theta: NestedMap, context: Context) -> tuple[tf.Tensor, NestedMap]:
        """The loss and the metrics of a batch, or the terms of a micro-batch (see BaseTask.MicroBatchTerms)."""
        carry, losses, extras = self.Run(theta, context)
        left = NestedMap({name: carry[name] for name in self.takes})
        loss, metrics = self.loss(theta, left, context)
        loss += tf.add_n(losses)
        return loss, self.metrics(metrics, loss, extras)

    @property
    def paths(self) -> list[str]:
        """The path in theta of the weights of each stack."""
        return [stack.weights for stack in self.stacks]

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """The name of each stack and its number of blocks."""
        return [(stack.name, stack.num_blocks) for stack in self.stacks]
