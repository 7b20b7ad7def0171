"""train.profile_steps, --dump_programs and the memory that a run has used. On the toy task."""

import gzip
import json
import re

import jax
import pytest
import toy_task  # noqa: F401 (registers the experiment)
from trainer_testing import status

from lingvo_moe.core.config import checks, registry
from lingvo_moe.core.config.hyperparams import ParamError


def _train(run, last, *more, engine="tf_graph"):
    override = (
        "train.profile_steps=3-4;train.summary_interval_steps=100;train.save_interval_steps=2"
    )
    return status(
        "--model=toy_task.Line",
        f"--logdir={run}",
        f"--max_steps={last}",
        f"--engine={engine}",
        *(["--mesh=data:2"] if engine == "pjrt" else []),
        f"--model_params_override={override}",
        *more,
    )


def _traced_steps(run):
    """The steps in each trace of a run, by its directory's name; both of its files have to be readable."""
    found = {}
    for place in sorted((run / "train/plugins/profile").glob("*")):
        (spaces,), (chrome,) = place.glob("*.xplane.pb"), place.glob("*.trace.json.gz")
        assert [*jax.profiler.ProfileData.from_file(str(spaces)).planes]
        events = json.loads(gzip.decompress(chrome.read_bytes()))["traceEvents"]
        steps = {
            e["args"]["step_num"]
            for e in events
            if e.get("name") == "train" and "step_num" in e["args"]
        }
        found[place.name] = sorted(map(int, steps))
    return found


@pytest.mark.parametrize("engine", ["tf_graph", "pjrt"])
def test_the_steps_that_are_asked_for_are_traced_once(tmp_path, capfd, engine):
    assert _train(tmp_path / "run", 6, engine=engine) == 0
    assert _traced_steps(tmp_path / "run") == {"steps_3-4": [3, 4]}
    said = capfd.readouterr().err
    assert "the trace of steps 3 to 4 is in" in said
    where = "the device"
    if engine == "pjrt":
        where = r"each of 2 devices, the step \S+ \S+ as compiled"
    assert re.search(
        rf"^memory: at most \S+ [KMG]iB of this process; the state takes \S+ B on {where}$",
        said,
        re.M,
    )


def test_a_run_that_is_resumed_traces_the_steps_that_are_left(tmp_path, capfd):
    run = tmp_path / "run"
    assert _train(run, 2) == 0
    assert (
        "train.profile_steps=3-4: the run ends at step 2, so it has no trace"
        in capfd.readouterr().err
    )
    assert _train(run, 3) == 0
    assert _train(run, 5) == 0
    assert _traced_steps(run) == {"steps_3-3": [3], "steps_4-4": [4]}
    assert _train(run, 6) == 0
    assert len(_traced_steps(run)) == 2


def test_values_of_profile_steps():
    assert [*checks.steps_of("10-12")] == [10, 11, 12] and [*checks.steps_of("7")] == [7]
    for wrong in ("0-3", "5-4", "3-", "a", "1-2-3", "٣"):
        with pytest.raises(
            ParamError, match=r"^profile_steps=.*must be the first and the last step"
        ):
            registry.TrainParams().Set(profile_steps=wrong)


def test_programs_are_dumped(tmp_path, capfd):
    place = tmp_path / "programs"
    assert _train(tmp_path / "run", 1, f"--dump_programs={place}", engine="pjrt") == 0
    texts = {path.name: path.read_text() for path in place.iterdir()}
    assert sorted(texts) == [
        f"{name}.{end}"
        for name in ("01_train_step", "02_init_state")
        for end in ("hlo.txt", "stablehlo.mlir")
    ]
    assert texts["01_train_step.stablehlo.mlir"].startswith("module @")
    assert texts["01_train_step.hlo.txt"].startswith("HloModule jit_")
    assert _train(tmp_path / "other", 1, f"--dump_programs={place}") == 2
    assert f"--dump_programs={place}" in capfd.readouterr().err
