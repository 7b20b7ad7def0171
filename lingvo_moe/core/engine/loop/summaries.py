"""Writes a run's metrics for TensorBoard and, as one JSON line per summary, for reports.

Letters: L layer, E expert.
"""

import contextlib
import functools
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from lingvo_moe.core.files.checked_lines import append_row, end_last_line, parse
from lingvo_moe.core.moe.expert_loads import evenness
from lingvo_moe.core.nested_map import flatten_items

METRICS_FILE = "metrics.jsonl"
_log = logging.getLogger(__name__)


class Summaries:
    """Writes under `directory`: TensorBoard event files and `metrics.jsonl`.

    Only one process of a job may write; the others make it with `enabled=False`. What cannot be written, as on a full
    disk, is an OSError that names the file or the directory.

    Attributes:
        place: the directory; None where this process writes nothing.

    Usage:
        with Summaries(directory) as summaries:
            summaries.Write(step, metrics)
    """

    def __init__(self, directory: str, enabled: bool = True):
        self.place = Path(directory) if enabled else None
        self._enabled, self._directory = enabled, directory
        if not enabled:
            return
        os.makedirs(directory, exist_ok=True)
        self._path = os.path.join(directory, METRICS_FILE)
        end_last_line(self._path)

    @functools.cached_property
    def _writer(self) -> Any:
        """The writer of event files; made when it is first needed, so that a start that is refused leaves none."""
        return tf.summary.create_file_writer(self._directory)

    def __enter__(self) -> "Summaries":
        return self

    def __exit__(self, error: type | None, *_: object) -> None:
        try:
            self.Close()
        except OSError:
            if error is None:  # the first one says more
                raise

    def Write(
        self,
        step: int,
        metrics: Mapping[str, Any],
        layers: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Records one step's metrics.

        Args:
            metrics: a NestedMap of NumPy arrays: scalars, one number a layer [L], or one number an
                expert [L,E]. A scalar is written as it is, [L] as `<name>/<layer>`, [L,E], where it is
                finite, as a histogram, with the figures of `evenness` as `<name>_<figure>`.
            layers: for the beginning of a metric's path, what TensorBoard calls the L layers, as
                TaskMetrics.Layers has it; a number where nothing is said.
        """
        if not self._enabled:
            return
        flat = {path.replace(".", "/"): np.asarray(x) for path, x in flatten_items(metrics)}
        for name in [name for name, x in flat.items() if x.ndim == 2]:
            flat |= {f"{name}_{figure}": x for figure, x in evenness(flat[name]).items()}
        # One event for all: an operation for each number would take a tenth of a second a step.
        shown = Summary()
        for name, value in flat.items():
            for summary in _shown(name, value, _layer_names(name, value, layers or {})):
                shown.MergeFrom(summary)
        with self._events(), self._writer.as_default():
            tf.summary.experimental.write_raw_pb(shown.SerializeToString(), step)
        row = {"step": step, **{k: _json_value(v) for k, v in flat.items()}}
        append_row(self._path, row)

    def Text(self, name: str, text: str) -> None:
        """Records a text, e.g. the run's Params, at step 0."""
        if self._enabled:
            with self._events(), self._writer.as_default(0):
                tf.summary.text(name, f"```\n{text}\n```")

    def Close(self) -> None:
        """Writes buffered summaries to disk."""
        if "_writer" in vars(self):
            with self._events():
                self._writer.close()

    @contextlib.contextmanager
    def _events(self) -> Iterator[None]:
        """Turns TensorFlow's write errors into an OSError that names the directory."""
        try:
            yield
        except tf.errors.OpError as e:
            reason = re.sub(r"\{\{.*?\}\}|\[Op:.*|\s+", " ", e.message).strip()
            raise OSError(
                f"{self._directory}: TensorBoard's files cannot be written ({reason}); make space, then the same "
                "command goes on"
            ) from e


def _is_metrics(row: Mapping[str, Any]) -> bool:
    """Whether a row, which anybody may have written, has what Write puts there: a step, and numbers alone."""
    numbers = not any(isinstance(v, str | dict) for v in row.values())
    return numbers and isinstance(row.get("step"), int)


def read_metrics(directory: str) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, by step; where a restarted run repeated a step, the later row.

    Lines that were damaged, and a last one that a kill cut off, are left out, with a warning that names file and line.
    """
    rows: dict[int, dict[str, Any]] = {}
    path = os.path.join(directory, METRICS_FILE)
    if not os.path.exists(path):
        return []
    checked = False
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            row = parse(line.rstrip(b"\n"), must_be_checked=checked)
            checked = checked or (row is not None and b'"crc32"' in line)
            if row is not None and _is_metrics(row):
                rows[row["step"]] = row
            elif not line.endswith(b"\n"):
                _log.warning("%s: its last line was cut off, as by a kill, and is left out", path)
            else:
                _log.warning(
                    "%s: line %d was damaged and is left out: reports lack its numbers, and nothing else uses them; "
                    "delete the line to silence this warning",
                    path,
                    number,
                )
    return [rows[step] for step in sorted(rows)]


def _layer_names(
    name: str, value: np.ndarray, layers: Mapping[str, Sequence[str]]
) -> Sequence[str]:
    """The names of the rows of an [L,...] metric."""
    for prefix, names in layers.items():
        if name.startswith(f"{prefix}/"):
            return names
    return [str(i) for i in range(len(value))] if value.ndim else []


def _shown(name: str, value: np.ndarray, layers: Sequence[str]) -> Iterator[Summary]:
    """A metric as TensorBoard shows it."""
    if value.ndim == 0:
        yield scalar_pb(name, np.float32(value))
        return
    for layer, part in zip(layers, value, strict=True):
        if part.ndim == 0:
            yield scalar_pb(f"{name}/{layer}", np.float32(part))
        elif np.isfinite(part).all():
            yield histogram_pb(f"{name}/{layer}", part)


def _json_value(value: np.ndarray, digits: int = 17) -> Any:
    """Plain numbers, six digits for arrays; None for numbers that JSON lacks (NaN, infinity)."""
    if value.ndim:
        return [_json_value(part, digits=6) for part in value]
    return float(f"{float(value):.{digits}g}") if math.isfinite(value) else None
