"""Paths reach the experiment exactly as typed, whatever characters they have."""

import pytest

from lingvo_moe import trainer
from lingvo_moe.core.config import registry
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.training.checks import full_override

TINY = "--model=mt.M4Tiny"


@pytest.mark.parametrize("name", ["a;b", " a\nb ", "a\\;b", "a\\", "'a'", 'a="b', "\u2028"])
def test_any_data_dir_is_read_as_it_was_typed(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    args = trainer.parse_flags([f"--data_dir={name}", "--max_steps=3", TINY])
    override = full_override(args, registry.AsDefined("mt.M4Tiny"))
    params = registry.GetParams("mt.M4Tiny", f"{override};task.seed=5")
    assert params.input.data_dir == f"{tmp_path}/{name}"
    assert (params.train.max_steps, params.task.seed) == (3, 5)


def test_a_typed_override_may_end_in_a_backslash(tmp_path):
    typed = "--model_params_override=input.cache_dir=/cache\\"
    args = trainer.parse_flags([typed, "--max_steps=3", TINY])
    override = full_override(args, registry.AsDefined("mt.M4Tiny"))
    params = registry.GetParams("mt.M4Tiny", override)
    assert (params.input.cache_dir, params.train.max_steps) == ("/cache\\", 3)


def test_overrides_given_several_times_all_apply():
    """A suggested flag can be pasted behind those of a command."""
    typed = ("input.cache_dir=/cache\\", "task.seed=4;train.max_steps=9", "task.seed=5")
    flags = [f"--model_params_override={text}" for text in typed]
    args = trainer.parse_flags([*flags, TINY])
    override = full_override(args, registry.AsDefined("mt.M4Tiny"))
    params = registry.GetParams("mt.M4Tiny", override)
    assert params.input.cache_dir == "/cache\\"
    assert (params.train.max_steps, params.task.seed) == (9, 5)


def test_data_that_is_missing_is_said_before_the_run_is_compared_or_moved(tmp_path, capsys):
    run_dir = RunDir(tmp_path / "run")
    run_dir.Write(
        "mt.M4Tiny", "task.num_experts=16", text_artifacts({"source": b"s", "target": b"t"})
    )
    (run_dir.path / "checkpoints/5").mkdir(parents=True)
    flags = [TINY, f"--data_dir={tmp_path}/nowhere", f"--logdir={run_dir.path}"]
    for mode in ((), ("--restart",), ("--mode=eval",)):
        assert trainer.main([*flags, *mode]) == 2
        assert f"--data_dir={tmp_path}/nowhere does not exist" in capsys.readouterr().err
    assert run_dir.exists
