"""Forms: two ways to build a task whose parameters leave the choice open (analysis/plans/recomputing.py chooses)."""

from collections.abc import Mapping
from dataclasses import dataclass

from lingvo_moe.core.config.hyperparams import InstantiableParams


@dataclass(frozen=True)
class Forms:
    """Two forms of a task, whose results are equal up to rounding, but which differ in memory and speed."""

    parameter: str  # the path of the parameter that chooses one, e.g. 'task.repeat'
    # Params of the task that recomputes blocks of layers in the backward pass.
    recomputing: InstantiableParams
    # Params of the task that keeps their activations, and whose blocks are unrolled.
    keeping: InstantiableParams
    one_block: InstantiableParams  # like `keeping`, but with one block in each stack
    # How many blocks each stack of `keeping` has, by their path, e.g. 'm4.encoder.blocks'.
    num_blocks: Mapping[str, int]

    def StackOf(self, operation: str) -> str:
        """The path of the stack that an operation of `one_block` belongs to, by its name; '' outside of stacks."""
        inside = (p for p in self.num_blocks if operation.startswith(p.replace(".", "/") + "/"))
        return next(inside, "")
