"""Means of a task's metrics over held-out batches, on any engine."""

import math
from collections.abc import Iterable

import numpy as np

from lingvo_moe.core.engine.base import Compiled, Engine
from lingvo_moe.core.engine.loop.steps import held_out_step
from lingvo_moe.core.input.base_input import BaseInput, HeldOutBatch
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.base_task import BaseTask

_MOST_EXPONENT = 700.0  # of e, in double precision


class Evaluator:
    """Computes BaseTask.HELD_OUT_METRICS of weights; compiled when it is first called.

    `average`: whether weights are given as the moving average of a state, instead of theta.
    """

    def __init__(self, task: BaseTask, inputs: BaseInput, engine: Engine, average: bool = False):
        self._task, self._engine = task, engine
        self._step = held_out_step(task, inputs, average)
        self.compiled: Compiled | None = None  # the step, after the first call

    def __call__(self, weights: NestedMap, batches: Iterable[HeldOutBatch]) -> NestedMap:
        """Evaluates weights. In a job of several processes all have to call it.

        Weights are NumPy arrays, or tensors of the engine's.

        Returns:
            NestedMap of float32 scalars: the task's HELD_OUT_METRICS, as means over all its UNITs; their number, under
            the name of the UNIT; `perplexity` where one of the metrics is `nll`; and the same for each group, in
            `groups`, where there are several.

        Raises:
            ValueError: the batches hold nothing; or, at the first call, as Engine.BuildStep.
        """
        step = self.compiled = self.compiled or self._engine.BuildStep(self._step)
        names = self._task.HELD_OUT_METRICS
        weights = self._engine.Put(weights, self._step.arg_specs[0])
        sums: dict[str, np.ndarray] = {}
        for one in batches:
            found = self._engine.Get(step(weights, one.batch))
            units = float(found[self._task.UNIT])
            of_batch = units * np.array([1.0, *(float(found[name]) for name in names)])
            sums[one.group] = sums.get(one.group, 0.0) + of_batch
        total = np.sum(list(sums.values()), axis=0) if sums else np.zeros(1)
        if not total[0]:
            raise ValueError(f"the held-out batches hold no {self._task.UNIT}")
        means = self._means(total)
        if len(sums) > 1:
            means.groups = NestedMap({group: self._means(s) for group, s in sums.items()})
        return means

    def _means(self, sums: np.ndarray) -> NestedMap:
        units, *metrics = sums
        means = NestedMap(zip(self._task.HELD_OUT_METRICS, np.array(metrics) / units))
        if "nll" in means:
            means.perplexity = math.exp(min(means.nll, _MOST_EXPONENT))
        means[self._task.UNIT] = units
        return means.Transform(np.float32)
