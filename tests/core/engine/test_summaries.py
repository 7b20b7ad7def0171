"""Summaries, read back by TensorBoard's own reader and from the JSON lines."""

import json

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from lingvo_moe.core.engine.summaries import METRICS_FILE, Summaries, read_metrics
from lingvo_moe.core.nested_map import NestedMap


def _metrics(loss=2.5):
    load = np.array([[0.5, 0.25, 0.25, 0.0], [0.25] * 4], np.float32)
    moe = NestedMap(dispatch_2=np.array([0.5, 0.25], np.float32), expert_load=load)
    return NestedMap(loss=np.float32(loss), moe=NestedMap(encoder=moe))


def _write(directory, *losses, layers=None):
    summaries = Summaries(str(directory))
    summaries.Text("params", "a : 1")
    for step, loss in losses:
        summaries.Write(step, _metrics(loss), layers)
    summaries.Close()


def test_tensorboard_reads_them(tmp_path):
    _write(tmp_path, (10, 2.5), (20, 1.5))
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()

    def values(tag):
        return [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]

    assert values("loss") == [(10, 2.5), (20, 1.5)]
    assert values("moe/encoder/dispatch_2/0")[0] == (10, 0.5)
    assert values("moe/encoder/dispatch_2/1")[0] == (10, 0.25)
    assert values("moe/encoder/expert_load_max_over_mean/0")[0] == (10, 2.0)
    assert values("moe/encoder/expert_load_max_over_mean/1")[0] == (10, 1.0)
    step, buckets = values("moe/encoder/expert_load/0")[0]  # [left, right, count]
    assert step == 10 and buckets[:, 2].sum() == 4
    assert (buckets[0, 0], buckets[-1, 1]) == (0.0, 0.5)
    assert b"a : 1" in values("params")[0][1].item()


def test_layers_have_names(tmp_path):
    _write(tmp_path, (10, 2.5), layers={"moe/encoder": ["layer_1", "layer_3"], "other": ["x"]})
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    tags = set(events.Tags()["tensors"])
    names = ("dispatch_2", "expert_load", "expert_load_max_over_mean")
    wanted = {f"moe/encoder/{name}/layer_{i}" for name in names for i in (1, 3)}
    assert tags == wanted | {"loss", "params"}
    (event,) = events.Tensors("moe/encoder/dispatch_2/layer_3")
    assert tensor_util.make_ndarray(event.tensor_proto) == 0.25


def test_json_lines(tmp_path):
    _write(tmp_path, (10, 1 / 3))
    (row,) = read_metrics(str(tmp_path))
    assert row == {
        "step": 10,
        "loss": float(np.float32(1 / 3)),  # whole, to be compared bit for bit
        "moe/encoder/dispatch_2": [0.5, 0.25],
        "moe/encoder/expert_load": [[0.5, 0.25, 0.25, 0.0], [0.25] * 4],
    }


def test_what_is_not_finite_is_null_in_json(tmp_path):
    _write(tmp_path, (10, np.nan))
    text = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None


def test_a_restarted_run_repeats_steps(tmp_path):
    _write(tmp_path, (10, 3.0), (20, 2.0), (30, 1.0))
    _write(tmp_path, (20, 2.5))
    assert [(r["step"], r["loss"]) for r in read_metrics(str(tmp_path))] == [
        (10, 3.0),
        (20, 2.5),
        (30, 1.0),
    ]


def test_a_line_cut_by_a_kill_takes_nothing_with_it(tmp_path):
    _write(tmp_path, (10, 3.0), (20, 2.0))
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-30])
    assert [r["step"] for r in read_metrics(str(tmp_path))] == [10]
    _write(tmp_path, (20, 2.5))
    assert [(r["step"], r["loss"]) for r in read_metrics(str(tmp_path))] == [(10, 3.0), (20, 2.5)]


def test_other_processes_write_nothing(tmp_path):
    summaries = Summaries(str(tmp_path / "none"), enabled=False)
    summaries.Text("params", "a : 1")
    summaries.Write(1, _metrics())
    summaries.Close()
    assert not (tmp_path / "none").exists()
    assert read_metrics(str(tmp_path / "none")) == []
