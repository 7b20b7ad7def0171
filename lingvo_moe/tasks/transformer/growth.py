"""The models whose weights a Transformer takes over."""

from typing import Any

from lingvo_moe.core.task.task_growth import TaskGrowth
from lingvo_moe.tasks.transformer.stacks import layers_before


class TransformerGrowth(TaskGrowth):
    """A model with experts grows out of the dense one, and one with adapters out of that without."""

    def GrowsFrom(self) -> dict[str, Any]:
        """See TaskGrowth: experts as wide as a dense layer, alone or with the shared ones.

        Without first layers, nth_attention would be in other layers than here.
        """
        p = self.p
        if p.adapter_rank:
            return {"adapter_rank": 0}
        if not p.num_experts or (layers_before(p) and p.nth_attention is not None):
            return {}
        width = p.expert_hidden_dim or p.hidden_dim
        widths = (width, width * (1 + p.moe.num_shared_experts))
        return {"num_experts": 0} if p.hidden_dim in widths else {}
