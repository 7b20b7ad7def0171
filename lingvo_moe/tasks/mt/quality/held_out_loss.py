"""The loss of a run's model on held-out pairs."""

import itertools
import os
from collections.abc import Callable

from lingvo_moe.core.engine.checkpoints.run_weights import read_newest, read_weights
from lingvo_moe.core.engine.loop.evaluation import Evaluator
from lingvo_moe.core.engine.tf_engine import TfEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.runs.run_dir import RunDir


def held_out_loss(
    logdir: str | os.PathLike,
    data_dir: str | os.PathLike,
    num_batches: int,
    step: int | None = None,
    use_ema: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> NestedMap:
    """Computes the loss of a run's checkpoint on held-out pairs, with inference's routing.

    The batches are those that the trainer evaluates on, see MtInput.HeldOut: the same for every run of the same data,
    vocabularies and shapes.

    Args:
        data_dir: holds the pairs that the run trained on, and dev/<lang>.tsv.gz.
        num_batches: how many batches of the run's size, at most.
        step: of the checkpoint; None for the newest.
        use_ema: whether to take the moving average of the weights, of a run with task.ema_decay.

    Returns:
        NestedMap(step: of the checkpoint, and what Evaluator returns: nll: nats a target token, without smoothing;
        perplexity; accuracy: the share of target tokens whose likeliest was right; tokens: the real target tokens; and
        the same for each resource group, in `groups`).

    Raises:
        RunDirError: no run. DataError: no held-out pairs. CheckpointError: no readable checkpoint.
    """
    run = RunDir(logdir)
    params, task = run.Params(), run.Task()
    inputs = params.input.Copy().Set(data_dir=str(data_dir)).Instantiate()
    batches = itertools.islice(inputs.Prepare(artifacts=run.artifacts).HeldOut(), num_batches)
    step, theta = read_newest(
        run.checkpoint_dir, lambda saved, at: (at, read_weights(saved, task, at, use_ema)), step
    )

    def counted():
        for number, batch in enumerate(batches, 1):
            yield batch
            say(f"held-out batch {number} of {num_batches}")

    found = Evaluator(task, inputs, TfEngine())(theta, counted())
    found.step = step
    return found
