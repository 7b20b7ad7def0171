"""The costs of a step of a Transformer."""

from collections.abc import Callable

from lingvo_moe.core.layers import softmax
from lingvo_moe.core.nested_map import NestedMap, flatten
from lingvo_moe.core.task.task_costs import TaskCosts
from lingvo_moe.tasks.transformer import experts
from lingvo_moe.tasks.transformer.model import TransformerModel
from lingvo_moe.tasks.transformer.multi_token import MultiTokenHead


class TransformerCosts(TaskCosts):
    """The costs of all stacks, of the softmax, and of the head for further tokens."""

    def __init__(
        self, model: TransformerModel, cache: Callable[[int, int], NestedMap] | None = None
    ):
        """
        Args:
            cache: makes the caches of decoding for some texts and tokens; None where there is no cache of texts alone.
        """
        super().__init__(model.UNIT)
        self._model, self._cache = model, cache

    def BatchCounts(self, batch: NestedMap) -> dict[str, int]:
        shapes = {
            f"{stack.prefix}tokens": stack.Row(batch).ids.shape for stack in self._model.STACKS
        }
        return {name: rows * length for name, (rows, length) in shapes.items()}

    def FlopsByPart(self, batch: NestedMap) -> dict[str, int]:
        """See TaskCosts: parts such as 'decoder.ffn'."""
        shapes = {
            s.name: (*s.Row(batch).ids.shape, self._model.p.model_dim) for s in self._model.STACKS
        }
        flops: dict[str, int] = {}
        for stack in self._model.STACKS:
            x, *memory = (shapes[name] for name in (stack.name, stack.memory) if name)
            flops |= experts.flops_of(stack.name, self._model.children[stack.name].p, x, *memory)
        flops["softmax"] = softmax.Softmax.FPropMeta(self._model.softmax.p, x).flops
        if "multi_token" in self._model.children:
            head = MultiTokenHead.FPropMeta(self._model.multi_token.p, x, *memory)
            flops["multi_token"] = head.flops - head.dispatch
            flops["multi_token.dispatch"] = head.dispatch
            flops["softmax"] *= 2
        return flops

    def BlockInputs(self, batch: NestedMap) -> dict[str, int]:
        """See TaskCosts: model_dim numbers for each token of the stack."""
        counts = zip(self._model.STACKS, self.BatchCounts(batch).values(), strict=True)
        return {
            f"{self._model.path}.{stack.name}.blocks": self._model.children[stack.name].p.num_blocks
            * tokens
            * self._model.p.model_dim
            for stack, tokens in counts
        }

    def LargestInside(self, batch: NestedMap) -> int:
        """See TaskCosts: the scores of one head; blocks of attention make no such scores."""
        shapes = [(stack, *stack.Row(batch).ids.shape) for stack in self._model.STACKS]
        whole = [
            rows * time**2
            for stack, rows, time in shapes
            if not self._model.ScoresByBlocks(stack, time)
        ]
        return max(whole, default=0)

    def CacheBytes(self) -> int:
        cache = NestedMap() if self._cache is None else self._cache(1, 1)
        return sum(x.shape.num_elements() * x.dtype.size for x in flatten(cache))
