"""Summaries: what a run did, for TensorBoard and, as one JSON line per summary, for reports.

Letters: L layer, E expert.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

METRICS_FILE = "metrics.jsonl"


class Summaries:
    """Writes under `directory`: TensorBoard event files and `metrics.jsonl`.

    Only one process of a job may write; the others make it with `enabled=False`.
    """

    def __init__(self, directory: str, enabled: bool = True):
        self._enabled = enabled
        if not enabled:
            return
        os.makedirs(directory, exist_ok=True)
        self._writer = tf.summary.create_file_writer(directory)
        self._path = os.path.join(directory, METRICS_FILE)
        _end_last_line(self._path)

    def Write(
        self,
        step: int,
        metrics: Mapping[str, Any],
        layers: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Records one step's metrics.

        Args:
            step: the number of steps done.
            metrics: a NestedMap of NumPy arrays: scalars, one number a layer [L], or one number an
                expert [L,E]. A scalar is written as it is, [L] as `<name>/<layer>`, [L,E] as a
                histogram, with the busiest expert's number over the mean as a scalar.
            layers: for the beginning of a metric's path, what TensorBoard calls the L layers, as
                BaseTask.MetricLayers has it; a number where nothing is said.
        """
        if not self._enabled:
            return
        flat = dict(_flatten(metrics))
        with self._writer.as_default(step):
            for name, value in flat.items():
                _write_tensorboard(name, value, _layer_names(name, value, layers or {}))
        row = {"step": step, **{k: _json_value(v) for k, v in flat.items()}}
        with open(self._path, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    def Text(self, name: str, text: str) -> None:
        """Records a text, e.g. the run's Params, at step 0."""
        if self._enabled:
            with self._writer.as_default(0):
                tf.summary.text(name, f"```\n{text}\n```")

    def Close(self) -> None:
        """Writes out what is buffered."""
        if self._enabled:
            self._writer.close()


def _end_last_line(path: str) -> None:
    """After a kill in the middle of a line, the next one must not be glued to the rest of it."""
    if os.path.exists(path) and os.path.getsize(path):
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def read_metrics(directory: str) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, by step; where a restarted run repeated a step, the later row.

    A last line that was cut off by a kill is left out.
    """
    rows: dict[int, dict[str, Any]] = {}
    path = os.path.join(directory, METRICS_FILE)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def _flatten(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name in sorted(metrics):
        value = metrics[name]
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", np.asarray(value)


def _layer_names(
    name: str, value: np.ndarray, layers: Mapping[str, Sequence[str]]
) -> Sequence[str]:
    """What the rows of an [L,...] metric are called."""
    for prefix, names in layers.items():
        if name.startswith(f"{prefix}/"):
            return names
    return [str(i) for i in range(len(value))] if value.ndim else []


def _write_tensorboard(name: str, value: np.ndarray, layers: Sequence[str]) -> None:
    if value.ndim == 0:
        tf.summary.scalar(name, value)
        return
    for layer, part in zip(layers, value, strict=True):
        if part.ndim == 0:
            tf.summary.scalar(f"{name}/{layer}", part)
        else:
            tf.summary.histogram(f"{name}/{layer}", part)
            busiest = part.max() / max(part.mean(), 1e-9)
            tf.summary.scalar(f"{name}_max_over_mean/{layer}", busiest)


def _json_value(value: np.ndarray) -> Any:
    """Plain numbers, six digits for arrays; None for what JSON cannot say (NaN, infinity)."""
    if value.ndim == 0:
        return float(value) if math.isfinite(value) else None
    return [_json_value(v) if v.ndim else _rounded(v) for v in value]


def _rounded(value: np.ndarray) -> float | None:
    return float(f"{float(value):.6g}") if math.isfinite(value) else None
