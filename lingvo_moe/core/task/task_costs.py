"""TaskCosts: what a step of a task costs, counted from the ArraySpecs of a full batch."""

from collections.abc import Callable

from lingvo_moe.core.nested_map import NestedMap


class TaskCosts:
    """The costs of a task, which its `Costs` returns. Counts that are not known are empty or 0.

    Args:
        unit: BaseTask.UNIT of the task.
        flops: computes FlopsByPart, for a task that counts nothing else.
    """

    def __init__(self, unit: str, flops: Callable[[NestedMap], dict[str, int]] = lambda batch: {}):
        self._unit, self._flops = unit, flops

    def BatchCounts(self, batch: NestedMap) -> dict[str, int]:
        """Counts what a batch holds, by name. The last count is of UNITs, with padding."""
        return {self._unit: batch.Flatten()[0].shape[0]}

    def FlopsByPart(self, batch: NestedMap) -> dict[str, int]:
        """FLOPs of a forward pass, by part of the model.

        A part `*.dispatch` is what no token needs: products with dispatch masks, and those of empty slots of experts.
        """
        return self._flops(batch)

    def StageFlops(self, batch: NestedMap) -> list[int]:
        """FLOPs of a forward pass, by pipeline stage, where the stages differ."""
        return []

    def StepFlops(self, batch: NestedMap) -> int:
        """Model FLOPs of a training step, as MFU counts them (Chowdhery et al. 2022, appendix B).

        Each product of the forward pass has two in the backward pass: six for each active parameter and token, and
        those of attention, as if every token saw all of its row. Recomputation and dispatch do not count.
        """
        parts = self.FlopsByPart(batch).items()
        return 3 * sum(flops for part, flops in parts if not part.endswith("dispatch"))

    def BlockInputs(self, batch: NestedMap) -> dict[str, int]:
        """Elements of the inputs of all blocks, by the path of their stack."""
        return {}

    def LargestInside(self, batch: NestedMap) -> int:
        """Elements of the largest activation inside of a block that no form of the step does without."""
        return 0

    def CacheBytes(self) -> int:
        """The bytes that decoding keeps of each token of a text."""
        return 0
