"""Two processes of four devices give the numbers of one process of eight, and share checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest
from object_storage import bucket
from processes import free_address, start_python

from lingvo_moe.core.files.store import open_store

# Importable by the workers too, so nothing here touches JAX before they have joined the job.
_WORKER = """
import json, sys
from lingvo_moe.core.console.tensorflow_import import import_tensorflow
from lingvo_moe.core.engine.devices import initialize_distributed, request_cpu_devices
address, process_id, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
request_cpu_devices(4)
initialize_distributed(address, 2, process_id)
import_tensorflow()
import test_multiprocess
test_multiprocess.train(directory, first=None, last=3)
test_multiprocess.train(directory, first=3, last=5)
test_multiprocess.copy(directory, sys.argv[4], 5)
test_multiprocess.restore_damaged(directory, 5)
"""


def train(directory, first, last):
    """Trains on all devices from step `first` (None: a new run) to `last`, saves, and prints a JSON line."""
    import jax
    import tensorflow as tf

    from lingvo_moe.core import sharding
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
    from lingvo_moe.core.engine.engines import make_engine
    from lingvo_moe.core.engine.lowering.specs import TensorSpec
    from lingvo_moe.core.input.base_input import ArraySpec
    from lingvo_moe.core.nested_map import NestedMap

    state_specs = NestedMap(
        w=TensorSpec((8, 4, 4), "float32", ("expert", None, None)), step=TensorSpec((), "int32")
    )
    split = ("expert", None, None)
    batch_specs = NestedMap(x=TensorSpec((16, 8, 4), "float32", split))

    def init(seed):
        w = tf.reshape(tf.cast(tf.range(128), tf.float32), [8, 4, 4]) * 0.01
        return NestedMap(w=w + tf.cast(seed, tf.float32), step=tf.zeros([], tf.int32))

    def step_fn(state, batch):
        # Batch to expert and back: an all-to-all in each direction.
        x = sharding.shard_letters(tf.transpose(batch.x, [1, 0, 2]), "EBM", {"E": "expert"})
        with tf.GradientTape() as tape:
            tape.watch(state.w)
            y = tf.nn.tanh(tf.einsum("EBM,EMN->EBN", x, state.w))
            y = sharding.shard_letters(tf.transpose(y, [1, 0, 2]), "BEN", {"B": "expert"})
            rows = tf.reduce_sum(y**2, [1, 2])
            loss = tf.reduce_sum(rows)
        new = NestedMap(w=state.w - 0.01 * tape.gradient(loss, state.w), step=state.step + 1)
        return new, NestedMap(loss=loss, rows=rows)

    engine = make_engine("pjrt", sharding.Mesh.parse("expert:8"))
    step = engine.Build(step_fn, [state_specs, batch_specs], donate=(0,))
    kinds = {c.kind for c in step.Collectives()}
    with Checkpointer(directory) as checkpointer:
        if first is None:
            state = engine.Build(init, [TensorSpec((), "int32")], results=state_specs)(0)
        else:
            state, extra = checkpointer.Restore(state_specs, engine, first)
            assert extra == {"at": first}
        losses, own = (
            [],
            engine.OwnRows(NestedMap(x=ArraySpec((16, 8, 4), "float32", "BEM", split))),
        )
        for i in range(first or 0, last):
            x = np.sin(np.arange(512, dtype=np.float32) + i).reshape(16, 8, 4)
            x[[row not in own for row in range(16)]] = np.nan  # no process places rows of another
            state, metrics = step(state, NestedMap(x=x))
            losses.append(float(engine.Get(metrics).loss))
        checkpointer.Save(last, state, {"at": last})
    print(
        json.dumps(
            {
                "losses": losses,
                "w": engine.Get(state).w.tolist(),
                "devices": [jax.process_count(), jax.local_device_count()],
                "own_rows": len(own),
                "most": engine.Most(jax.process_index()),
                "all_to_all": "all-to-all" in kinds,
                "any": [engine.AnyProcess(jax.process_index() == 1), engine.AnyProcess(False)],
            }
        )
    )


def copy(directory, to, step):
    """Saves what all devices restore of a step in another place."""
    from lingvo_moe.core import sharding
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
    from lingvo_moe.core.engine.engines import make_engine
    from lingvo_moe.core.engine.lowering.specs import TensorSpec
    from lingvo_moe.core.nested_map import NestedMap

    engine = make_engine("pjrt", sharding.Mesh.parse("expert:8"))
    specs = NestedMap(
        step=TensorSpec((), "int32"), w=TensorSpec((8, 4, 4), "float32", ("expert", None, None))
    )
    with Checkpointer(directory, read_only=True) as checkpointer:
        state, extra = checkpointer.Restore(specs, engine, step)
    with Checkpointer(to) as checkpointer:
        checkpointer.Save(step, state, extra)


def restore_damaged(directory, step):
    """Flips a bit of two files of a step, of which each process verifies one. Prints, as JSON, how restoring ends."""
    import jax

    from lingvo_moe.core import sharding
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
    from lingvo_moe.core.engine.engines import make_engine
    from lingvo_moe.core.engine.lowering.specs import TensorSpec
    from lingvo_moe.core.nested_map import NestedMap

    engine = make_engine("pjrt", sharding.Mesh.parse("expert:8"))
    specs = NestedMap(step=TensorSpec((), "int32"), w=TensorSpec((8, 4, 4), "float32"))
    found = []
    for path in sorted(p for p in Path(directory, str(step)).rglob("*") if p.is_file())[:2]:
        if jax.process_index() == 0:
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        engine.AnyProcess(False)  # both wait until it is damaged
        try:
            with Checkpointer(directory, read_only=True) as checkpointer:
                checkpointer.Restore(specs, engine, step)
        except CheckpointError as e:
            found.append(path.name in str(e) or "another process of the job" in str(e))
        else:
            found.append(False)
        engine.AnyProcess(False)
        if jax.process_index() == 0:
            path.write_bytes(content)
    print(json.dumps({"damage_found": found}))


def _assert_alike(directory, place):
    """The newest step is the same in a directory and in a bucket, to which both processes wrote."""
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer

    with Checkpointer(directory, read_only=True) as one, Checkpointer(place, read_only=True) as two:
        (want, extra), (found, same) = one.RestoreToNumpy(), two.RestoreToNumpy()
    assert extra == same == {"at": 5} and want.step == found.step
    np.testing.assert_array_equal(want.w, found.w)
    names = open_store(place).List()
    assert all(any(f"ocdbt.process_{i}/d/" in name for name in names) for i in (0, 1))


@pytest.mark.slow
def test_two_processes_of_four_devices_are_one_of_eight(tmp_path, capsys):
    address, shared = free_address(), str(tmp_path / "two")
    lines = []
    with bucket(proxied=False):
        place = "s3://bucket/two"
        workers = [start_python("-c", _WORKER, address, str(i), shared, place) for i in range(2)]
        for worker in workers:
            out, err = worker.communicate(timeout=300)
            assert worker.returncode == 0, err
            lines.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
        _assert_alike(shared, place)
    assert lines[0][0]["devices"] == [2, 4]
    assert lines[0][0]["all_to_all"]
    assert lines[0][0]["own_rows"] == 8 and lines[0][0]["most"] == 1
    assert lines[0][0]["any"] == [True, False]
    assert lines[0] == lines[1]
    damage = [worker.pop(-1)["damage_found"] for worker in lines]
    assert damage == [[True, True]] * 2
    # The same with one process, without a pause; and one process resumes what two have saved.
    train(str(tmp_path / "one"), None, 7)
    train(shared, 5, 7)
    one, resumed = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"
    ]
    assert one["devices"] == [1, 8] and one["own_rows"] == 16
    losses = [loss for part in (*lines[0], resumed) for loss in part["losses"]]
    np.testing.assert_allclose(losses, one["losses"], rtol=1e-6)
    np.testing.assert_allclose(resumed["w"], one["w"], rtol=1e-5, atol=1e-6)


_NOBODY = """
import sys
from lingvo_moe.core.job.launchers import JobError
from lingvo_moe.core.engine.devices import initialize_distributed
try:
    initialize_distributed(sys.argv[1], 2, 1, timeout_seconds=2)
except JobError as e:
    print(e)
"""


def test_a_coordinator_that_nobody_is_at():
    address = free_address()
    out, err = start_python("-c", _NOBODY, address).communicate(timeout=60)
    assert f"--coordinator_address={address}: process 1 of 2 could not join" in out, err
