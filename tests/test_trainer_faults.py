"""Whatever goes wrong while a run trains, what was saved stays, and the same command goes on as if nothing had."""

import errno

import pytest
import toy_task
from trainer_testing import losses, status

from lingvo_moe.core.engine.checkpoints import checkpoint_digests
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.tasks.text.data.errors import DataError


def _train(run):
    override = "train.summary_interval_steps=1;train.save_interval_steps=2"
    flags = ["--model=toy_task.Line", f"--logdir={run}", "--max_steps=12", "--engine=tf_graph"]
    return status(*flags, f"--model_params_override={override}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("faults") / "run"
    assert _train(run) == 0
    return losses(run)


def _full_disk(patch):
    """No space for the checkpoint of step 8."""
    write = checkpoint_digests.write_part

    def fail(step, process, pieces):
        if step.address.endswith("/8.part"):
            raise OSError(errno.ENOSPC, "No space left on device", f"{step.address}/x")
        write(step, process, pieces)

    patch.setattr("lingvo_moe.core.engine.checkpoints.checkpoints.write_part", fail)


def _poisoned_shard(patch):
    """The eighth batch cannot be read. It is asked for while earlier steps run."""
    made = toy_task._Batches.__next__

    def fail(self):
        batch = made(self)
        if self._made == 8:
            raise DataError("aa-00000.array_record: record 7 is damaged; start again")
        return batch

    patch.setattr(toy_task._Batches, "__next__", fail)


@pytest.mark.parametrize("fault, said", [
    (_full_disk, "run/checkpoints: a checkpoint could not be written (OSError: [Errno 28] No"),
    (_poisoned_shard, "error: aa-00000.array_record: record 7 is damaged; start again"),
])  # fmt: skip
def test_what_was_saved_stays_and_the_run_goes_on(tmp_path, capfd, undisturbed, fault, said):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        assert _train(run) == 2
    assert said in capfd.readouterr().err
    assert RunDir(run).steps == [2, 4, 6]
    assert _train(run) == 0
    assert losses(run) == undisturbed
