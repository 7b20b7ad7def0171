"""The loss of a run's model on held-out pairs, of a language model on their target sides."""

import itertools
import os

from lingvo_moe.core.engine.loop.evaluation import Evaluator
from lingvo_moe.core.engine.tf_engine import TfEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from lingvo_moe.tasks.transformer.task import TransformerTask


def held_out_loss(
    logdir: str | os.PathLike, data_dir: str | os.PathLike, num_batches: int
) -> NestedMap:
    """Computes the loss of a run's newest checkpoint on held-out pairs, with inference's routing.

    The batches are those that the trainer evaluates on, see PackedInput.HeldOut: the same for every run of the same
    data, vocabularies and shapes.

    Args:
        data_dir: holds the pairs that the run trained on, and dev/<lang>.tsv.gz.
        num_batches: how many batches of the run's size, at most.

    Returns:
        NestedMap(step: of the checkpoint, and what Evaluator returns: nll: nats a target token, without smoothing;
        perplexity; accuracy: the share of target tokens whose likeliest was right; tokens: the real target tokens; and
        the same for each resource group, in `groups`).

    Raises:
        RunDirError: no run. DataError: no held-out pairs. CheckpointError: no readable checkpoint.
    """
    run = TextRunDir(logdir)
    params, task = run.Params(), run.Task(TransformerTask)
    inputs = params.input.Copy().Set(data_dir=str(data_dir)).Instantiate()
    batches = itertools.islice(inputs.Prepare(artifacts=run.artifacts).HeldOut(), num_batches)
    theta, about = load_theta(run, task)
    report = Evaluator(task, inputs, TfEngine())(theta, batches)
    report.step = about["step"]
    return report
