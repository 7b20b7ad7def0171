"""The metrics of a Transformer's experts. L layers."""

from collections.abc import Sequence

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.moe.routers.losses_and_metrics import combined_metrics
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.task_metrics import TaskMetrics
from lingvo_moe.tasks.transformer.stacks import TaskStack, layers_before


class TransformerMetrics(TaskMetrics):
    """The metrics of a task of these Params and stacks: with experts, `moe` has those of each stack, [L,...]."""

    def __init__(self, params: Params, stacks: Sequence[TaskStack]):
        self._p, self._stacks = params, stacks

    def Combined(self, sums: NestedMap) -> NestedMap:
        if not self._p.num_experts:
            return sums
        moe = {name: combined_metrics(metrics) for name, metrics in sums.moe.items()}
        return NestedMap(sums, moe=NestedMap(moe))

    def ProgressNote(self, metrics: NestedMap) -> str:
        """See TaskMetrics: the overflow rate of the worst MoE layer."""
        shares = [
            v.max() for path, v in metrics.FlattenItems() if path.endswith(".over_capacity_ratio")
        ]
        return f"{max(shares):.1%} dropped at worst" if shares else ""

    def Layers(self) -> dict[str, list[str]]:
        """See TaskMetrics: the layers with experts, numbered among all layers of their stack.

        A translator of four and four layers, of which every second has experts, gives
        {'moe/encoder': ['layer_1', 'layer_3'], 'moe/decoder': ['layer_1', 'layer_3']}.
        """
        p = self._p
        if not p.num_experts:
            return {}
        first = layers_before(p) + p.moe_every - 1
        return {
            f"moe/{stack.name}": [
                f"layer_{i}" for i in range(first, p.Get(stack.num_layers), p.moe_every)
            ]
            for stack in self._stacks
        }
