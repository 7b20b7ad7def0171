"""The loss of a run's model on held-out pairs.

Letters: B row of the batch, T time.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lingvo_moe.core.engine.checkpoints import Checkpointer
from lingvo_moe.core.engine.specs import TensorSpec
from lingvo_moe.core.engine.tf_engine import TfEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.input.dev_set import DevSet
from lingvo_moe.tasks.mt.runs.run_dir import RunDir


def held_out_loss(
    logdir: str | os.PathLike,
    data_dir: str | os.PathLike,
    num_batches: int,
    say: Callable[[str], None] = lambda text: None,
) -> NestedMap:
    """Computes the loss of a run's newest checkpoint on held-out pairs, with inference's routing.

    Batches are packed as in training, but every language's pairs are drawn in proportion to their
    number. The same for every run of the same data, vocabularies and shapes.

    Args:
        logdir: the run.
        data_dir: holds dev/<lang>.tsv.gz.
        num_batches: how many batches of the run's size.
        say: called with a line about the progress.

    Returns:
        NestedMap(step: of the checkpoint; nll: nats a target token, without smoothing; accuracy: the share of
        target tokens whose likeliest was right; tokens: the real target tokens, int).

    Raises:
        RunDirError: no run. DataError: no held-out pairs. CheckpointError: no readable checkpoint.
    """
    run = RunDir(logdir)
    params, task = run.Params(), run.Task()
    DevSet(data_dir)  # says what is wrong with a directory that has none
    p = params.input.Copy().Set(data_dir=str(Path(data_dir) / "dev"), temperature=1.0)
    inputs = p.Instantiate().Prepare(artifacts=run.artifacts)
    with Checkpointer(str(run.checkpoint_dir), read_only=True) as checkpointer:
        step = checkpointer.LatestStep()
        theta, _ = checkpointer.RestoreToNumpy("theta", step)
    engine = TfEngine()
    theta_specs = task.VariableSpecs()
    batch_specs = inputs.BatchSpec().Transform(lambda s: TensorSpec(s.shape, s.dtype))

    def counts(theta: NestedMap, batch: NestedMap) -> NestedMap:
        metrics = task.EvalStep(theta, batch)
        return NestedMap(nll=metrics.nll, accuracy=metrics.accuracy, tokens=metrics.tokens)

    evaluate = engine.Build(counts, (theta_specs, batch_specs), name="held_out")
    theta = engine.Put(theta, theta_specs)
    totals = np.zeros(3)
    for number, batch in zip(range(1, num_batches + 1), inputs, strict=False):
        one = engine.Get(evaluate(theta, batch))
        totals += one.tokens * np.array([one.nll, one.accuracy, 1.0])
        say(f"held-out batch {number} of {num_batches}")
    nll, right, tokens = totals
    return NestedMap(
        step=step, nll=float(nll / tokens), accuracy=float(right / tokens), tokens=int(tokens)
    )
