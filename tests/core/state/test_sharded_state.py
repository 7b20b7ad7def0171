"""train.shard_state: the same training in less memory, by the collectives that it promises."""

import numpy as np
import pytest
from toy_stack import MESH, PARAMETERS, ROWS, H, L, M, batch_of, begun, compiled_step, trained

from lingvo_moe.core.config.checks import STATE_LEVELS
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.task.inspect import bytes_per_device

_MIXED = {"dtype": "bfloat16"}


@pytest.mark.parametrize("level, form", [
    ("slots", {}),
    ("gradients", {}),
    ("weights", {}),
    ("weights", {"optimizer": Adafactor, "num": 2, "ema_decay": 0.9}),
    ("weights", _MIXED),
], ids=str)  # fmt: skip
def test_training_is_that_of_copied_state(level, form):
    want, whole = trained("none", **form)
    found, state = trained(level, **form)
    narrow = "dtype" in form
    np.testing.assert_allclose(found, want, rtol=2e-3 if narrow else 1e-6)
    for (path, x), y in zip(state.FlattenItems(), whole.Flatten(), strict=True):
        np.testing.assert_allclose(
            x.astype(np.float32), y.astype(np.float32), 0.02 if narrow else 1e-4, 1e-6, err_msg=path
        )
    assert want[-1, 0] < want[0, 0]


@pytest.mark.parametrize(
    "level, form, a_weight, of_slots",
    # Adam, and in mixed precision, which has a copy of the weights among the slots.
    [
        *((level, {}, 4, 8) for level in STATE_LEVELS),
        *((level, _MIXED, 2, 12) for level in ("none", "weights")),
    ],
)
def test_arguments_shrink_as_zero_says(level, form, a_weight, of_slots):
    """A weight and its slots have so many bytes, copied or over 8 devices."""
    task, _, step = compiled_step(level, **form)
    weights = a_weight * PARAMETERS // (8 if level == "weights" else 1)
    slots = of_slots * PARAMETERS // (8 if level != "none" else 1)
    batch, counters = 4 * ROWS * M // 8, 2 * 4
    assert step.Memory()["arguments"] == weights + slots + batch + counters
    state = sum(bytes_per_device(spec, MESH) for spec in task.StateSpecs().Flatten())
    assert state == weights + slots + counters


def test_gradients_take_a_part_of_their_memory():
    """The stacks of gradients, which the backward loop writes, are what a device holds beside the state."""

    def temporaries(level):
        return compiled_step(level)[2].Memory()["temporaries"]

    stacks = 4 * L * 2 * M * H
    assert temporaries("none") - temporaries("gradients") > 0.8 * stacks * 7 / 8


def test_weights_are_gathered_layer_by_layer():
    _, _, step = compiled_step("weights")
    gathered = [c for c in step.Collectives() if c.kind == "all-gather"]
    layer = 4 * M * H
    assert {c.num_bytes for c in gathered if c.num_bytes >= layer} == {layer}
    # wi and wo, in the forward loop and in the backward loop.
    assert sum(c.num_bytes == layer for c in gathered) == 4


def _restored(saved, restored, directory):
    """A state after a step of one form, and what a run of another form goes on from: both as NumPy arrays by path."""
    (level, form), (other_level, other_form) = saved, restored
    task, engine, step = compiled_step(level, **form)
    state, _ = step(begun(task, engine), batch_of(0))
    before = dict(state.Transform(np.asarray).FlattenItems())
    with Checkpointer(str(directory)) as checkpointer:
        checkpointer.Save(1, state)
        checkpointer.Wait()
        other, engine, step = compiled_step(other_level, **other_form)
        again, _ = checkpointer.Restore(other.StateSpecs(), engine)
    after = dict(again.Transform(np.asarray).FlattenItems())
    step(again, batch_of(1))
    return before, after


_HOST = {"offload": ("*.wi", "slots")}


@pytest.mark.parametrize("saved, restored", [
    (("none", {}), ("weights", {})),
    (("weights", {}), ("none", _HOST)),
    (("none", _HOST), ("slots", {})),
])  # fmt: skip
def test_a_checkpoint_is_restored_into_any_other(saved, restored, tmp_path):
    before, after = _restored(saved, restored, tmp_path)
    assert before.keys() == after.keys()
    for path, x in before.items():
        np.testing.assert_array_equal(x, after[path], err_msg=path)


def test_a_float32_run_goes_on_in_mixed_precision_and_back(tmp_path):
    before, after = _restored(("none", {}), ("weights", _MIXED), tmp_path / "to")
    wi = "blocks.body.wi"
    np.testing.assert_array_equal(after[f"slots.{wi}.master"], before[f"theta.{wi}"])
    rounded = before[f"theta.{wi}"].astype(after[f"theta.{wi}"].dtype)
    np.testing.assert_array_equal(after[f"theta.{wi}"], rounded)
    np.testing.assert_array_equal(after[f"slots.{wi}.mean"], before[f"slots.{wi}.mean"])
    before, after = _restored(("weights", _MIXED), ("none", {}), tmp_path / "back")
    np.testing.assert_array_equal(after[f"theta.{wi}"], before[f"slots.{wi}.master"])
    assert not any(path.endswith("master") for path in after)
