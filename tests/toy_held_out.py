"""The toy task with held-out numbers in two groups, as an experiment, `toy_held_out.Line`."""

import itertools

import toy_task

from lingvo_moe.core.config import registry
from lingvo_moe.core.input.base_input import HeldOutBatch


class Numbers(toy_task.Numbers):
    def HeldOut(self):
        made = toy_task._Batches()
        made.SetState({"made": 10_000})
        for number, batch in enumerate(itertools.islice(made, 4)):
            yield HeldOutBatch(batch, ("even", "odd")[number % 2])


@registry.Register
class Line(toy_task.Line):
    def Input(self):
        return Numbers.Params().Set(batch_size=16)

    def Train(self):
        return registry.TrainParams().Set(
            mesh="data:1",
            save_interval_steps=4,
            save_max_to_keep=2,
            summary_interval_steps=1,
            eval_interval_steps=4,
            eval_batches=4,
        )
