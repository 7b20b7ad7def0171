"""Checkpoints of a network in stages are restored with other stages, or none."""

import shutil

import numpy as np
import pytest
from trainer_testing import keep_compiled, losses, state, status

from lingvo_moe.core.engine import engines
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
from lingvo_moe.core.engine.checkpoints.init_from import InitFromError, check_model
from lingvo_moe.core.engine.checkpoints.initial_weights import InitialWeights
from lingvo_moe.core.engine.checkpoints.packed_tensors import PackedLayout
from lingvo_moe.core.engine.checkpoints.run_weights import read_weights
from lingvo_moe.core.engine.engines import make_engine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.stage_vectors import by_path, from_paths
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.params.image.digits import Digits
from lingvo_moe.tasks.image.evaluation import evaluate

MESHES = {1: "data:2", 2: "stage:2,data:2", 3: "stage:3,data:2"}


def _task(stages, channels=(4, 8)):
    p = Digits().Task().Set(ema_decay=0.9)
    p.network.channels = list(channels)
    if stages > 1:
        p.pipeline.Set(stages=stages, micro_batches=2, image_size=8)
        p.weight_split = {"Z": "stage"}
    return p.Instantiate()


def _packing(task):
    return PackedLayout.Of(task.StateSpecs(), task.Unpacked().StateSpecs())


@pytest.fixture(scope="module")
def values():
    """A state without a pipeline, in which no two elements are the same."""
    specs, begin, leaves = _task(1).StateSpecs(), 0, []
    for spec in specs.Flatten():
        count = int(np.prod(spec.shape))
        leaves.append(np.arange(begin, begin + count).reshape(spec.shape).astype(spec.dtype))
        begin += count
    return specs.Pack(leaves)


def _packed(task, values):
    """The state of a task from that without a pipeline. Its parts have variables of the same paths."""
    plain, specs = task.Unpacked().StateSpecs(), task.StateSpecs()
    return NestedMap(
        {
            part: from_paths(
                NestedMap(x=specs[part]), by_path(NestedMap(x=plain[part]), NestedMap(x=value))
            ).x
            for part, value in values.items()
        }
    )


def _assert_same(found, want):
    assert [path for path, _ in found.FlattenItems()] == [path for path, _ in want.FlattenItems()]
    for (path, value), other in zip(found.FlattenItems(), want.Flatten()):
        np.testing.assert_array_equal(value, other, err_msg=path)


@pytest.mark.parametrize("of", [1, 3])
def test_a_state_is_restored_bit_for_bit_with_any_stages(of, values, tmp_path):
    task, engine = _task(of), make_engine("pjrt", Mesh.parse(MESHES[of]))
    saved = engine.Put(_packed(task, values), task.StateSpecs())
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.Save(1, saved, {"kept": of}, _packing(task))
        checkpointer.Wait()
        for to, mesh in MESHES.items():
            task = _task(to)
            engine = make_engine("pjrt", Mesh.parse(mesh))
            found, extra = checkpointer.Restore(task.StateSpecs(), engine, 1, _packing(task))
            assert extra == {"kept": of}
            for path, spec in task.StateSpecs().FlattenItems():
                assert found.GetItem(path).sharding.spec[:1] == spec.split[:1], path
            _assert_same(engine.Get(found), _packed(task, values))
            # Weights of another run, without its slots and averages.
            initial = InitialWeights(str(tmp_path), 1, {})
            begun, _ = initial.Into(NestedMap(found), task, engine, _packing(task))
            _assert_same(engine.Get(begun.theta), _packed(task, values).theta)
        # Also without XLA; and as NumPy arrays, which are those of the model without a pipeline.
        engine = make_engine("tf_graph", Mesh.parse("data:1"))
        found, _ = checkpointer.Restore(_task(2).StateSpecs(), engine, 1, _packing(_task(2)))
        _assert_same(engine.Get(found), _packed(_task(2), values))
        _assert_same(checkpointer.RestoreToNumpy()[0], values)
        _assert_same(read_weights(checkpointer, _task(3), use_ema=True), values.ema)


def test_another_model_is_refused_by_the_name_of_a_variable(values, tmp_path):
    task, engine = _task(3), make_engine("pjrt", Mesh.parse(MESHES[3]))
    with Checkpointer(str(tmp_path)) as checkpointer:
        state = engine.Put(_packed(task, values), task.StateSpecs())
        checkpointer.Save(1, state, packing=_packing(task))
        checkpointer.Wait()
        for channels, message in (
            (
                (16, 8),
                r"ema.network.stage_0.conv.conv.w is float32\[3, 3, 1, 4\] in it, float32\[3, 3, 1, 16\]",
            ),
            ((4, 4, 8), r"'ema.network.stage_2.conv.conv.w' is missing"),
        ):
            other = _task(2, channels)
            engine = make_engine("pjrt", Mesh.parse(MESHES[2]))
            with pytest.raises(CheckpointError, match=f"of another model: {message}"):
                checkpointer.Restore(other.StateSpecs(), engine, 1, _packing(other))


def _run(logdir, stages, max_steps, *flags):
    """Trains in micro-batches of an equal number of images, whatever the stages."""
    change = "train.num_micro_batches=4"
    if stages > 1:
        change = f"task.pipeline.stages={stages};task.pipeline.micro_batches=4;task.weight_split={{'Z': 'stage'}}"
    every = "save_interval_steps=2;train.eval_interval_steps=0;train.summary_interval_steps=1"
    return status(
        "--model=image.Digits",
        f"--logdir={logdir}",
        f"--mesh={MESHES[stages]}",
        f"--max_steps={max_steps}",
        f"--model_params_override={change};task.ema_decay=0.9;train.{every}",
        *flags,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps in three stages; from here on each step is compiled once for a mesh."""
    logdir = tmp_path_factory.mktemp("runs") / "three"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "make_engine", engines.make_engine)  # put back at the end
        keep_compiled()
        assert _run(logdir, 3, 2) == 0
        yield logdir


def test_a_run_goes_on_with_other_stages(run, tmp_path, capsys):
    found = {}
    for stages in (3, 1):
        logdir = shutil.copytree(run, tmp_path / str(stages))
        assert _run(logdir, stages, 4) == 0
        found[stages] = losses(logdir), state(logdir)
        said = f"of 4 micro-batches in {stages} stages, 1f1b (task.pipeline)"
        assert (said in capsys.readouterr().err) == (stages > 1)
    want, last = found[3]
    assert sorted(want) == [1, 2, 3, 4]
    assert found[1][0] == pytest.approx(want, rel=1e-5)
    assert found[1][1].keys() == last.keys()
    for path, value in found[1][1].items():
        atol = 1e-5 * np.abs(last[path]).max()
        np.testing.assert_allclose(value, last[path], rtol=0, atol=atol, err_msg=path)
    # And one without a pipeline goes on with one.
    assert _run(tmp_path / "1", 3, 6) == 0 and _run(tmp_path / "3", 3, 6) == 0
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "3"), rel=1e-5)


def test_a_run_begins_from_one_with_other_stages(run, tmp_path):
    assert _run(tmp_path, 1, 0, f"--init_from={run}") == 0
    found, want = state(tmp_path), state(run)
    for path, value in want.items():
        if path.startswith("theta."):
            np.testing.assert_array_equal(found[path], value, err_msg=path)
    message = r"network.stage_0.conv.conv.w: .*16\] there, .*4\] here"
    with pytest.raises(InitFromError, match=message):
        check_model(run, _task(2).p)


def test_a_run_in_stages_is_evaluated(run):
    scores = evaluate(run, use_ema=True)
    assert scores.step == 2 and scores.images == 360 and scores.ema
    flags = [f"--logdir={run}", "--model_params_override=task.ema_decay=0.9"]
    assert status("--mode=eval", "--once", "--model=image.Digits", *flags) == 0
