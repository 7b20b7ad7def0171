"""Means of a task's metrics over held-out batches, on any engine."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from lingvo_moe.core.engine.base import Compiled, Engine
from lingvo_moe.core.engine.loop.steps import held_out_step
from lingvo_moe.core.input.base_input import BaseInput, HeldOutBatch
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.base_task import BaseTask

_MOST_EXPONENT = 88.0  # of e, in float32


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
            `groups`, where there are several. Of several batches also `<metric>_error`, the standard error of the first
            metric as the mean of all data that such batches come from.

        Raises:
            ValueError: the batches hold nothing; or, at the first call, as Engine.BuildStep.
        """
        step = self.compiled = self.compiled or self._engine.BuildStep(self._step)
        names = self._task.HELD_OUT_METRICS
        weights = self._engine.Put(weights, self._step.arg_specs[0])
        rows: dict[str, list[np.ndarray]] = {}  # of each group
        for one in batches:
            metrics = self._engine.Get(step(weights, one.batch))
            units = float(metrics[self._task.UNIT])
            of_batch = units * np.array([1.0, *(float(metrics[name]) for name in names)])
            rows.setdefault(one.group, []).append(of_batch)
        total = np.sum([row for of_group in rows.values() for row in of_group], axis=0)
        if not rows or not total[0]:
            raise ValueError(f"the held-out batches hold no {self._task.UNIT}")
        means = self._means(total)
        error = _standard_error(list(rows.values()))
        if error is not None:
            means[f"{names[0]}_error"] = np.float32(error)
        if len(rows) > 1:
            means.groups = NestedMap({g: self._means(np.sum(s, axis=0)) for g, s in rows.items()})
        return means

    def InWords(self, metrics: NestedMap) -> str:
        """The first metric with its standard error, e.g. '5.4184 ± 0.0601'."""
        name = self._task.HELD_OUT_METRICS[0]
        error = metrics.get(f"{name}_error")
        return f"{metrics[name]:.4f}" + (f" ± {error:.4f}" if error is not None else "")

    def _means(self, sums: np.ndarray) -> NestedMap:
        units, *metrics = sums
        means = NestedMap(zip(self._task.HELD_OUT_METRICS, np.array(metrics) / units))
        if "nll" in means:
            means.perplexity = math.exp(min(means.nll, _MOST_EXPONENT))
        means[self._task.UNIT] = units
        return means.Transform(np.float32)


def _standard_error(groups: Sequence[Sequence[np.ndarray]]) -> float | None:
    """The standard error of a mean over units; None of less than two batches, or where it is not finite.

    Args:
        groups: of each group its batches: units, and units times their mean of the metric. Batches of a group differ by
            chance; groups do not, but where one has a single batch, all count as one group.
    """
    if min(map(len, groups)) < 2:
        groups = [[row for rows in groups for row in rows]]
    if len(groups[0]) < 2 or not np.isfinite(np.concatenate(groups)).all():
        return None
    variance, units = 0.0, 0.0
    for rows in groups:
        number, sums = len(rows), np.sum(rows, axis=0)
        units += sums[0]
        if sums[0]:
            residuals = [row[1] - row[0] * sums[1] / sums[0] for row in rows]
            variance += number / (number - 1) * float(np.sum(np.square(residuals)))
    return math.sqrt(variance) / units
