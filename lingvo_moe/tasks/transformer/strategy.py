"""The forms that a Transformer can take on devices."""

from collections.abc import Sequence
from typing import Any

from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.layers import kept
from lingvo_moe.core.pipeline import params as pipeline
from lingvo_moe.core.task.forms import Forms
from lingvo_moe.core.task.task_strategy import TaskStrategy
from lingvo_moe.tasks.transformer import experts
from lingvo_moe.tasks.transformer.stacks import TaskStack, layers_before, layers_of_block


class TransformerStrategy(TaskStrategy):
    """Blocks are repeated in a loop or unrolled, kept or recomputed, in stages or not."""

    def __init__(self, params: InstantiableParams, stacks: Sequence[TaskStack]):
        super().__init__(params)
        self._stacks = stacks

    def MicroBatchSizes(self) -> tuple[str, ...]:
        """See TaskStrategy: the groups of MoE layers stay as they are."""
        return ("num_groups",) if self.p.num_experts and self.p.num_groups else ()

    def OpenForms(self) -> Forms | None:
        """See TaskStrategy: task.repeat=auto leaves it open; a pipeline scans blocks then."""
        if self.p.repeat != "auto" or self.PipelineSettings():
            return None
        layers, before = layers_of_block(self.p), layers_before(self.p)
        keeping = self.p.Copy().Set(repeat=False, remat=kept.FULL)
        numbers = {stack.name: stack.num_layers for stack in self._stacks}
        return Forms(
            parameter="task.repeat",
            recomputing=self.p.Copy().Set(repeat=True),
            keeping=keeping,
            one_block=keeping.Copy().Set(**dict.fromkeys(numbers.values(), before + layers)),
            num_blocks={
                f"{self.p.name or self.p.cls.__name__}.{name}.blocks": (self.p.Get(number) - before)
                // layers
                for name, number in numbers.items()
            },
        )

    def Without(self) -> InstantiableParams:
        plain = self.p.Copy().Set(
            repeat="auto", remat=kept.FULL, shard_state="none", offload="none"
        )
        plain.pipeline = pipeline.pipeline_params()
        experts.with_letters(plain)
        return plain.Set(dropout=0.0, attention_dropout=0.0)

    def HasStages(self) -> bool:
        return not experts.exchanges_rows(self.p)

    def Recomputing(self) -> dict[str, Any]:
        """See TaskStrategy: nothing in a pipeline."""
        if self.PipelineSettings():
            return {}
        if self.p.repeat is False:
            return {"task.repeat": True}
        return {} if self.p.remat == kept.FULL else {"task.remat": kept.FULL}
