"""Checkpoints: exact, restored on any mesh, atomic; errors name the damaged file."""

import os
import shutil
import tarfile
import time
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import tensorstore as ts
from damage import full_disk
from processes import start_python

from lingvo_moe.core.engine.checkpoints import arrays, checkpoints
from lingvo_moe.core.engine.checkpoints.checkpoint_digests import write_part
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
from lingvo_moe.core.engine.checkpoints.number_formats import sources
from lingvo_moe.core.engine.checkpoints.run_weights import read_newest
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.engine.tf_engine import TfEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.saved_steps import saved_steps
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.letters import HOST

SPECS = NestedMap(
    theta=NestedMap(
        layers=[NestedMap(w=TensorSpec((8, 6), "float32", ("expert", None)))],
        scale=TensorSpec((4,), "bfloat16"),
    ),
    slots=NestedMap(m=TensorSpec((8,), "float32", ("expert",))),
    step=TensorSpec((), "int32"),
)
MESH = Mesh.parse("expert:8")


def _values(step=7):
    rng = np.random.RandomState(step)
    return NestedMap(
        theta=NestedMap(
            layers=[NestedMap(w=rng.randn(8, 6).astype(np.float32))],
            scale=rng.randn(4).astype(ml_dtypes.bfloat16),
        ),
        slots=NestedMap(m=rng.randn(8).astype(np.float32)),
        step=np.int32(step),
    )


def _assert_equal(got, want):
    assert [p for p, _ in got.FlattenItems()] == [p for p, _ in want.FlattenItems()]
    for a, b in got.Zip(want):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with steps 7 and 9, to be copied before it is damaged."""
    directory = str(tmp_path_factory.mktemp("run") / "checkpoints")
    engine = PjrtEngine(MESH)
    with Checkpointer(directory) as checkpointer:
        for step in (7, 9):
            state = engine.Put(_values(step), SPECS)
            checkpointer.Save(step, state, {"input": {"row": step}, "params": "a : 1"})
    return directory


@pytest.mark.parametrize(
    "make", [lambda: PjrtEngine(MESH), lambda: PjrtEngine(Mesh.parse("expert:2")), TfEngine]
)
def test_restored_exactly_on_any_mesh_and_engine(saved, make):
    engine = make()
    with Checkpointer(saved, read_only=True) as checkpointer:
        assert checkpointer.Steps() == [7, 9]
        state, extra = checkpointer.Restore(SPECS, engine)
        _assert_equal(engine.Get(state), _values(9))
        assert extra == {"input": {"row": 9}, "params": "a : 1"}
        state, _ = checkpointer.Restore(SPECS, engine, 7)
        _assert_equal(engine.Get(state), _values(7))


def test_a_process_may_have_nothing_to_save(tmp_path, monkeypatch):
    """Process 0 of two saves step 7; the other one's devices hold nothing that is not on those of the first, too."""
    engine, directory = PjrtEngine(MESH), str(tmp_path)
    with Checkpointer(directory) as checkpointer:
        write_part(saved_steps(directory).Part(7), 1, [])
        monkeypatch.setattr("jax.process_count", lambda: 2)
        checkpointer.Save(7, engine.Put(_values(), SPECS))
        checkpointer.Wait()
        monkeypatch.undo()
    with Checkpointer(directory, read_only=True) as checkpointer:
        _assert_equal(checkpointer.RestoreToNumpy()[0], _values())


def test_a_step_that_orbax_wrote_is_restored(tmp_path):
    """Step 9 of `saved`, written by this project when its checkpoints were Orbax's (0.12.8)."""
    archive = Path(__file__).parent / "testdata" / "by_orbax.tar.gz"
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    engine = PjrtEngine(Mesh.parse("expert:4"))
    with Checkpointer(str(tmp_path)) as checkpointer:
        state, extra = checkpointer.Restore(SPECS, engine)
        _assert_equal(engine.Get(state), _values(9))
        assert extra == {"input": {"row": 9}, "params": "a : 1"}
        checkpointer.Save(10, state)
        checkpointer.Wait()
        assert checkpointer.Steps() == [9, 10]
        _assert_equal(checkpointer.RestoreToNumpy()[0], _values(9))
    _flip(f"{tmp_path}/9/state/manifest.ocdbt")
    with Checkpointer(str(tmp_path)) as checkpointer:
        with pytest.raises(CheckpointError, match=r"manifest\.ocdbt was changed"):
            checkpointer.RestoreToNumpy(step=9)


def test_restored_state_is_cut_for_the_new_mesh(saved):
    with Checkpointer(saved, read_only=True) as checkpointer:
        state, _ = checkpointer.Restore(SPECS, PjrtEngine(Mesh.parse("expert:4")))
    shards = state.theta.layers[0].w.addressable_shards
    assert [s.data.shape for s in shards] == [(2, 6)] * 4


def test_what_is_in_the_memory_of_hosts_is_read_there_at_once():
    spec = TensorSpec((8,), "float32", ("expert",), "slots.m", memory=HOST)
    assert sources([spec], {"slots.m": ((8,), "float32")}) == [spec]


def test_each_part_is_read_once_for_all_devices_that_have_it():
    class Array:
        def __init__(self):
            self.reads = []

        def __getitem__(self, index):
            self.reads.append(index)
            return ts.array(np.arange(8.0))[index]

    for split, parts in (((None,), 1), (("expert",), 8)):
        array, spec = Array(), TensorSpec((8,), "float32", split)
        result = arrays._begun(array, checkpoints._sharded(spec, PjrtEngine(MESH)))
        np.testing.assert_array_equal(result(), np.arange(8.0))
        assert len(array.reads) == parts


def test_a_part_is_restored_alone(saved):
    with Checkpointer(saved, read_only=True) as checkpointer:
        theta, _ = checkpointer.RestoreToNumpy("theta")
        _assert_equal(theta, _values(9).theta)
        assert tf.constant(theta.scale).dtype == tf.bfloat16
        part, _ = checkpointer.Restore(NestedMap(theta=SPECS.theta), TfEngine())
        _assert_equal(part.Transform(np.asarray), NestedMap(theta=_values(9).theta))
        assert checkpointer.ReadExtra(7)["input"] == {"row": 7}
        with pytest.raises(CheckpointError, match=r"step 9: no 'thta'.*did you mean 'theta'"):
            checkpointer.RestoreToNumpy("thta")


def test_the_newest_are_kept_and_a_step_is_saved_once(tmp_path):
    engine = PjrtEngine(MESH)
    with Checkpointer(str(tmp_path), keep=2) as checkpointer:
        for step in (1, 2, 3, 3):
            checkpointer.Save(step, engine.Put(_values(step), SPECS))
        checkpointer.Wait()
        assert checkpointer.Steps() == [2, 3]


def test_saving_in_the_background_keeps_the_value_of_its_step(tmp_path):
    engine = PjrtEngine(MESH)
    spec = NestedMap(w=TensorSpec((8, 1 << 16), "float32", ("expert", None)))
    step = engine.Build(lambda state: NestedMap(w=state.w + 1.0), [spec], donate=(0,))
    state = engine.Put(NestedMap(w=np.zeros((8, 1 << 16), np.float32)), spec)
    with Checkpointer(str(tmp_path), keep=10) as checkpointer:
        for i in range(1, 5):
            state = step(state)
            checkpointer.Save(i, state)
        for _ in range(20):
            state = step(state)
        checkpointer.Wait()
        for i in range(1, 5):
            values, _ = checkpointer.RestoreToNumpy(step=i)
            assert set(np.unique(values.w)) == {float(i)}


def test_a_step_that_has_taken_the_place_of_another_is_read(tmp_path):
    for number in (1, 2):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        with Checkpointer(str(tmp_path / "checkpoints")) as checkpointer:
            checkpointer.Save(7, _values(number))
            checkpointer.Wait()
            _assert_equal(checkpointer.RestoreToNumpy()[0], _values(number))


def test_tensorflow_tensors_are_saved_too(tmp_path):
    engine = TfEngine()
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.Save(1, engine.Put(_values(1), SPECS))
    with Checkpointer(str(tmp_path)) as checkpointer:
        state, _ = checkpointer.Restore(SPECS, PjrtEngine(MESH))
    _assert_equal(state.Transform(np.asarray), _values(1))


@pytest.mark.parametrize("name", ["11.part", "7.deleted", "11.orbax-checkpoint-tmp"])
def test_a_half_written_step_is_ignored_and_cleared_away(saved, tmp_path, name):
    directory = str(tmp_path / "run")
    shutil.copytree(saved, directory)
    half = os.path.join(directory, name)
    shutil.copytree(os.path.join(directory, "9"), half)
    with Checkpointer(directory, read_only=True) as checkpointer:
        assert checkpointer.LatestStep() == 9
        assert os.path.exists(half)
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.LatestStep() == 9
        checkpointer.Save(11, PjrtEngine(MESH).Put(_values(11), SPECS))
        checkpointer.Wait()
        assert checkpointer.LatestStep() == 11
    assert not os.path.exists(half)


_SAVE_FOREVER = """
import itertools, sys
import jax.numpy as jnp
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
with Checkpointer(sys.argv[1], keep=2) as checkpointer:
    for step in itertools.count(1):
        # Noise, so that it does not compress to nothing.
        state = {"w": jnp.sin(jnp.arange(int(sys.argv[2])) * float(step)), "step": jnp.array(step)}
        checkpointer.Save(step, state, {"step": step})
"""


def check_killed_while_saving(place, size, is_there, pause):
    """Starts a process that saves step after step, kills it once step 2 is there, and reads the newest step."""
    child = start_python("-c", _SAVE_FOREVER, place, str(size), stdout=None, stderr=None)
    try:
        while child.poll() is None and not is_there():
            time.sleep(pause)
        time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    with Checkpointer(place, keep=2) as checkpointer:
        step = checkpointer.LatestStep()
        assert step >= 2
        state, extra = checkpointer.RestoreToNumpy()
    assert (int(state.step), extra) == (step, {"step": step})
    np.testing.assert_array_equal(state.w, jnp.sin(jnp.arange(size) * float(step)))


def test_killed_while_saving_the_newest_complete_step_is_whole(tmp_path):
    check_killed_while_saving(str(tmp_path), 1 << 21, (tmp_path / "2").is_dir, pause=0.01)
    assert all(name.isdigit() for name in os.listdir(tmp_path))


def _files(directory):
    return sorted(
        os.path.relpath(os.path.join(root, name), directory)
        for root, _, names in os.walk(directory)
        for name in names
    )


def _flip(path):
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 16]))


@pytest.mark.parametrize("damage, what", [
    (_flip, "was changed"),
    (lambda path: os.truncate(path, os.path.getsize(path) // 2), "was changed"),
    (os.unlink, "is missing"),
], ids=["flip", "cut", "remove"])  # fmt: skip
def test_damage_to_any_file_is_an_error_that_names_it(saved, tmp_path, damage, what):
    engine = PjrtEngine(MESH)
    names = _files(os.path.join(saved, "9"))
    assert len(names) >= 7
    for name in names:
        directory = str(tmp_path / name.replace("/", "_"))
        shutil.copytree(saved, directory)
        damage(os.path.join(directory, "9", name))
        with Checkpointer(directory, read_only=True) as checkpointer:
            for restore in (
                lambda c: c.Restore(SPECS, engine),
                lambda c: c.RestoreToNumpy("theta"),
                lambda c: c.ReadExtra(),
            ):
                with pytest.raises(CheckpointError) as caught:
                    restore(checkpointer)
                error = str(caught.value)
                if name == "files.xxh128" and damage is os.unlink:  # or an older version wrote none
                    assert error.startswith(f"{directory}, step 9: files.xxh128, the list of its")
                else:
                    start = f"{directory}, step 9: the checkpoint is damaged; delete {directory}/9 "
                    assert error.startswith(f"{start}to go on from step 7")
                assert name in error and what in error and "\n" not in error
            state, _ = checkpointer.Restore(SPECS, engine, 7)
            _assert_equal(engine.Get(state), _values(7))


def test_what_cannot_be_written_is_one_line_and_loses_nothing(tmp_path, capfd):
    state = {"w": jnp.asarray(np.random.RandomState(0).randn(1 << 19))}
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.Save(1, state)
        checkpointer.Wait()
        with full_disk(1 << 20):
            checkpointer.Save(2, state)
            with pytest.raises(CheckpointError) as e:
                checkpointer.Wait()
    assert str(e.value).startswith(f"{tmp_path}: a checkpoint could not be written (")
    assert "/2.part/" in str(e.value) and "File too large" in str(e.value)
    assert "Traceback" not in capfd.readouterr().err
    with Checkpointer(str(tmp_path)) as checkpointer:
        assert checkpointer.Steps() == [1] and len(checkpointer.RestoreToNumpy()[0].w) == 1 << 19
        checkpointer.Save(2, state)
        checkpointer.Wait()
        assert checkpointer.Steps() == [1, 2]


def test_only_a_step_that_is_whole_is_offered(saved, tmp_path):
    directory = str(tmp_path / "run")
    shutil.copytree(saved, directory)
    for step in ("7", "9"):
        _flip(os.path.join(directory, step, "about", "metadata"))
    with Checkpointer(directory, read_only=True) as checkpointer:
        with pytest.raises(CheckpointError, match="no older checkpoint is whole"):
            checkpointer.ReadExtra()


def test_a_file_that_was_added_or_taken_from_another_step_is_named(saved, tmp_path):
    directory = str(tmp_path / "run")
    shutil.copytree(saved, directory)
    shutil.copy(f"{directory}/7/about/metadata", f"{directory}/9/about/metadata")
    with Checkpointer(directory, read_only=True) as checkpointer:
        with pytest.raises(CheckpointError, match="about/metadata was changed"):
            checkpointer.ReadExtra()
        open(f"{directory}/7/more", "w").close()
        with pytest.raises(CheckpointError, match=r"more is not in files\.xxh128"):
            checkpointer.ReadExtra(7)


@pytest.mark.parametrize("change, match", [
    (lambda s: s.theta.Set("extra", TensorSpec((2,), "float32")), r"'theta\.extra' is missing"),
    (lambda s: s.theta.pop("scale"), r"'theta\.scale' is unknown"),
    (lambda s: s.slots.Set("m", TensorSpec((4,), "float32")), r"slots\.m is float32\[8\] in it"),
    (lambda s: s.Set("step", TensorSpec((), "float32")), r"step is int32\[\] in it, float32"),
])  # fmt: skip
def test_another_model_is_named(saved, change, match):
    specs = SPECS.Transform(lambda spec: spec)
    change(specs)
    with Checkpointer(saved, read_only=True) as checkpointer:
        message = r"step 9: the checkpoint is of another model.*" + match
        with pytest.raises(CheckpointError, match=message):
            checkpointer.Restore(specs, PjrtEngine(MESH))


def test_what_is_not_there(saved, tmp_path):
    with pytest.raises(CheckpointError, match="there is no such directory"):
        Checkpointer(str(tmp_path / "none"), read_only=True)
    with Checkpointer(str(tmp_path / "new")) as checkpointer:
        assert checkpointer.LatestStep() is None
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            checkpointer.Restore(SPECS, PjrtEngine(MESH))
    with Checkpointer(saved, read_only=True) as checkpointer:
        with pytest.raises(CheckpointError, match=r"step 8: there is no such.*\[7, 9\]"):
            checkpointer.ReadExtra(8)


def test_the_mean_of_several_steps(tmp_path):
    values = [_values(step) for step in (1, 2, 3)]
    with Checkpointer(str(tmp_path)) as checkpointer:
        for step, state in enumerate(values, 1):
            checkpointer.Save(step, state)
        checkpointer.Wait()
        mean = checkpointer.RestoreMeanToNumpy("", (1, 2, 3))
        last = checkpointer.RestoreMeanToNumpy("theta", [3])
    want = np.mean([v.theta.layers[0].w for v in values], axis=0, dtype=np.float64)
    assert mean.theta.layers[0].w.dtype == np.float32
    np.testing.assert_allclose(mean.theta.layers[0].w, want, rtol=1e-6, atol=1e-7)
    wide = np.mean([v.theta.scale.astype(np.float32) for v in values], axis=0)
    assert mean.theta.scale.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(mean.theta.scale, wide.astype(ml_dtypes.bfloat16))
    assert mean.step == 3  # no mean of what counts
    _assert_equal(last, values[2].theta)


def test_what_is_whole_and_cannot_be_restored_is_not_called_damaged(saved, monkeypatch):
    """A user who lacks memory or a permission must not be advised to delete a checkpoint."""

    def without_memory(*args, **kwargs):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with Checkpointer(saved, read_only=True) as checkpointer:
        monkeypatch.setattr(checkpoints.arrays, "read", without_memory)
        with pytest.raises(CheckpointError, match=r"could not be restored .*Out of memory") as e:
            checkpointer.RestoreToNumpy()
    assert "delete" not in str(e.value) and "damaged" not in str(e.value)

    def without_permission(*args):
        raise PermissionError(13, "Permission denied", "/somewhere/metadata")

    monkeypatch.setattr(
        "lingvo_moe.core.engine.checkpoints.checkpoints.verify_step", without_permission
    )
    with Checkpointer(saved, read_only=True) as checkpointer:
        with pytest.raises(CheckpointError, match=r"cannot be read: .*Permission denied") as e:
            checkpointer.ReadExtra()
    assert "delete" not in str(e.value) and "damaged" not in str(e.value)


def test_the_next_newest_is_read_where_the_newest_was_deleted(saved, tmp_path):
    directory, tried = shutil.copytree(saved, tmp_path / "checkpoints"), []

    def read(checkpointer, step):
        tried.append(step)
        if step == 9:
            (directory / "9").rename(directory / "10")
        return checkpointer.RestoreToNumpy("theta", step)[0]

    _assert_equal(read_newest(directory, read), _values(9).theta)
    assert tried == [9, 10]
    _assert_equal(read_newest(directory, read, 7), _values(7).theta)
    shutil.rmtree(directory / "7")
    with pytest.raises(CheckpointError, match="step 7: there is no such checkpoint"):
        read_newest(directory, read, 7)
    (directory / "10" / "files.xxh128").unlink()
    with pytest.raises(CheckpointError, match="the list of its files, is missing"):
        read_newest(directory, read)
    shutil.rmtree(directory / "10")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_newest(directory, read)
