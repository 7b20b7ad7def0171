"""Summaries, read back by TensorBoard's own reader and from the JSON lines."""

import json
import warnings

import numpy as np
import pytest
from damage import full_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from lingvo_moe.core.engine.loop.summaries import METRICS_FILE, Summaries, read_metrics
from lingvo_moe.core.nested_map import NestedMap


def _metrics(loss=2.5):
    load = np.array([[0.5, 0.25, 0.25, 0.0], [0.25] * 4], np.float32)
    moe = NestedMap(dispatch_2=np.array([0.5, 0.25], np.float32), expert_load=load)
    return NestedMap(loss=np.float32(loss), moe=NestedMap(encoder=moe))


def _write(directory, *losses, layers=None):
    with Summaries(str(directory)) as summaries:
        summaries.Text("params", "a : 1")
        for step, loss in losses:
            summaries.Write(step, _metrics(loss), layers)


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
    assert values("moe/encoder/expert_load_entropy/0")[0] == (10, 0.75)  # 1.5 bits of 2
    step, buckets = values("moe/encoder/expert_load/0")[0]  # [left, right, count]
    assert step == 10 and buckets[:, 2].sum() == 4
    assert (buckets[0, 0], buckets[-1, 1]) == (0.0, 0.5)
    assert b"a : 1" in values("params")[0][1].item()


def test_numbers_that_are_not_finite_have_no_histogram(tmp_path):
    metrics = _metrics()
    metrics.moe.encoder.expert_load[1, 2] = np.nan
    with Summaries(str(tmp_path)) as summaries, warnings.catch_warnings(action="error"):
        summaries.Write(10, metrics)
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    tags = {tag for tag in events.Tags()["tensors"] if "expert_load/" in tag}
    assert tags == {"moe/encoder/expert_load/0"}
    assert read_metrics(str(tmp_path))[0]["moe/encoder/expert_load"][1] == [0.25, 0.25, None, 0.25]


def test_layers_have_names(tmp_path):
    _write(tmp_path, (10, 2.5), layers={"moe/encoder": ["layer_1", "layer_3"], "other": ["x"]})
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    tags = set(events.Tags()["tensors"])
    names = ("dispatch_2", "expert_load", "expert_load_max_over_mean", "expert_load_entropy")
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
        "moe/encoder/expert_load_max_over_mean": [2.0, 1.0],
        "moe/encoder/expert_load_entropy": [0.75, 1.0],
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


def test_a_line_cut_by_a_kill_takes_nothing_with_it(tmp_path, caplog):
    _write(tmp_path, (10, 3.0), (20, 2.0))
    path = tmp_path / METRICS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert [r["step"] for r in read_metrics(str(tmp_path))] == [10]
    assert caplog.messages == [f"{path}: its last line was cut off, as by a kill, and is left out"]
    caplog.clear()
    _write(tmp_path, (20, 2.5))
    assert [(r["step"], r["loss"]) for r in read_metrics(str(tmp_path))] == [(10, 3.0), (20, 2.5)]
    path.write_bytes(whole[:-1])  # all but the end of the line
    _write(tmp_path, (30, 2.5))
    assert [r["step"] for r in read_metrics(str(tmp_path))] == [10, 20, 30]
    assert caplog.messages == []


def test_no_flipped_bit_of_a_line_goes_unseen(tmp_path, caplog):
    """Flips a bit of each byte of the second of three lines. The others are read, unless it joins them."""
    _write(tmp_path, (10, 3.0), (20, 2.0), (30, 1.0))
    path = tmp_path / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    rows = read_metrics(str(tmp_path))
    for place in range(len(lines[1])):
        damaged = bytearray(lines[1])
        damaged[place] ^= 1 << place % 8
        path.write_bytes(lines[0] + damaged + lines[2])
        caplog.clear()
        joined = place == len(lines[1]) - 1
        assert read_metrics(str(tmp_path)) == [rows[0], rows[2]][: 1 if joined else 2], place
        assert f"{path}: line 2 was damaged and is left out" in caplog.messages[0], place


def test_lines_of_older_runs_have_no_checksum(tmp_path, caplog):
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1, "loss": 4.0}\n{"step": 2, "lo\n{"step": 3, "loss": "x"}\n')
    assert read_metrics(str(tmp_path)) == [{"step": 1, "loss": 4.0}]
    assert len(caplog.messages) == 2 and "line 3 was damaged" in caplog.messages[1]
    _write(tmp_path, (4, 3.0))
    with open(path, "a") as file:
        file.write('{"step": 5, "loss": 1.0}\n')
    caplog.clear()
    assert [r["step"] for r in read_metrics(str(tmp_path))] == [1, 4]
    assert "line 5 was damaged" in caplog.messages[-1]


@pytest.mark.parametrize("file", ["events", METRICS_FILE])
def test_a_full_disk_is_named(file, tmp_path):
    """Event files are flushed now and then, lines of metrics.jsonl at once."""
    size, said = 100, f"{tmp_path}: TensorBoard's files cannot be written"
    if file == METRICS_FILE:
        _write(tmp_path, *((step, 1.0) for step in range(10)))
        size, said = (tmp_path / METRICS_FILE).stat().st_size + 20, str(tmp_path / METRICS_FILE)
    with full_disk(size):
        with pytest.raises(OSError, match="File too large") as e, Summaries(str(tmp_path)) as s:
            s.Write(10, NestedMap(loss=np.float32(2.5)))
    assert said in str(e.value) and "{{" not in str(e.value)
    assert len(read_metrics(str(tmp_path))) == (10 if file == METRICS_FILE else 0)
    _write(tmp_path, (10, 2.5))
    assert read_metrics(str(tmp_path))[-1]["step"] == 10


def test_other_processes_write_nothing(tmp_path):
    summaries = Summaries(str(tmp_path / "none"), enabled=False)
    summaries.Text("params", "a : 1")
    summaries.Write(1, _metrics())
    summaries.Close()
    assert not (tmp_path / "none").exists()
    assert read_metrics(str(tmp_path / "none")) == []
