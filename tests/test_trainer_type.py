"""task.fprop_dtype=auto: the type is chosen where a run begins, is recorded, and stays that of the run."""

import json
import shutil

import pytest
from trainer_testing import status

from lingvo_moe.core.config import registry
from lingvo_moe.core.console.command import UsageError
from lingvo_moe.training import chosen_type, peak
from lingvo_moe.training.flags import parse_flags

_AUTO = "task.fprop_dtype=auto"


def _override(text, *flags, engine="tf_graph"):
    args = parse_flags(["--model=toy_task.Line", f"--model_params_override={text}", *flags])
    return chosen_type.with_chosen_type(args, lambda args: engine).model_params_override


def _has_speed(monkeypatch, times):
    """Lets products of bfloat16 be so many times as fast as float32's; None: they are not measured."""
    speeds = {"float32": 2.0, "bfloat16": times and 2.0 * times}
    monkeypatch.setattr(peak, "matmul_flops_per_second", lambda seconds, dtype: speeds[dtype])
    monkeypatch.setattr(chosen_type, "bfloat16_speed", chosen_type.bfloat16_speed.__wrapped__)


@pytest.mark.parametrize("times, chosen", [(5.8, "bfloat16"), (1.49, "float32"), (0.9, "float32")])
def test_the_faster_type_is_named_in_the_override(times, chosen, monkeypatch, capsys):
    _has_speed(monkeypatch, times)
    text = f"train.max_steps=1;task.fprop_dtype=float16;{_AUTO};task.dtype=float32"
    rest = "train.max_steps=1;task.dtype=float32"
    assert _override(text) == f"{rest};task.fprop_dtype={chosen}"
    expected = f"{_AUTO}: {chosen}, since bfloat16 products are {times:.2f} times as fast"
    assert expected in capsys.readouterr().err


def test_nothing_is_measured_where_auto_does_not_count(monkeypatch):
    _has_speed(monkeypatch, None)
    assert _override("task.fprop_dtype='bfloat16'") == "task.fprop_dtype='bfloat16'"
    assert _override(f"{_AUTO};task.fprop_dtype=bfloat16") == "task.fprop_dtype=bfloat16"
    assert _override(f"{_AUTO};train.max_steps=1", "--mode=eval") == "train.max_steps=1"
    for engine in ("pjrt", "tf"):
        with pytest.raises(UsageError, match=f"auto: is chosen .* has --engine={engine}; give"):
            _override(_AUTO, f"--engine={engine}")
    with pytest.raises(registry.RegistryError, match=r"auto: must be one of .*; the trainer alone"):
        registry.GetParams("mt.M4Tiny", _AUTO)


def test_a_run_keeps_its_type_on_another_machine(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    flags = ["--model=toy_task.Line", f"--logdir={run}", f"--model_params_override={_AUTO}"]
    flags += ["--num_devices=1"]

    def train(times, last, *more):
        with monkeypatch.context() as patch:
            patch.setattr(chosen_type, "bfloat16_speed", lambda: times)
            assert status(*flags, f"--max_steps={last}", *more) == 0
        text = json.loads((run / "experiment.json").read_text())["params_override"]
        return dict(registry.split_override(text))["task.fprop_dtype"]

    assert train(5.8, 1) == "bfloat16"
    assert "task.fprop_dtype : 'bfloat16'" in (run / "params.txt").read_text()
    assert "warning" not in capsys.readouterr().err
    assert train(0.9, 2) == "bfloat16"  # the toy task's runs may not change their type
    said = capsys.readouterr().err
    assert f"{_AUTO}: bfloat16, as in the run in {run}" in said
    assert "task.fprop_dtype=bfloat16: bfloat16 products are 0.90 times as fast" in said
    # A model that grows out of a smaller one has the type of that.
    shutil.copytree(run, tmp_path / "grown-dense")
    assert _override(_AUTO, f"--logdir={tmp_path}/grown") == "task.fprop_dtype=bfloat16"
    assert train(0.9, 1, "--restart") == "float32"
