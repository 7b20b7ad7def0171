"""The accuracy of a run's model on held-out images."""

import os
from dataclasses import dataclass

from lingvo_moe.core.engine.checkpoints.run_weights import read_newest, read_weights
from lingvo_moe.core.engine.loop.evaluation import Evaluator
from lingvo_moe.core.engine.tf_engine import TfGraphEngine
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.tasks.image.image_model import ImageClassifier
from lingvo_moe.tasks.image.input.image_input import FolderInput
from lingvo_moe.tasks.image.input.sources import ImageDataError


@dataclass(frozen=True)
class Scores:
    """The scores of one checkpoint on held-out images."""

    step: int  # the checkpoint's step
    ema: bool  # whether the weights were their moving average
    images: int  # how many images were scored
    nll: float  # nats an image
    # `top1`, `top5`: the share of images whose class is the best-scored one, or one of the five.
    top1: float
    top5: float


def evaluate(
    logdir: str | os.PathLike,
    data_dir: str = "",
    step: int | None = None,
    use_ema: bool = False,
    trust_run: bool = False,
) -> Scores:
    """Scores all held-out images on one device, without anything random.

    Args:
        data_dir: a folder of images with the run's classes; '': the data that the run trained on.
        step: of the checkpoint; None for the newest.
        use_ema: whether to score the moving average of the weights, of a run with task.ema_decay.

    Raises:
        RunDirError: no run. CheckpointError: no readable checkpoint, or no moving average in it.
        NoHeldOutError: nothing is held out.
        ImageDataError: a run of another task; an image cannot be read, or other classes.
    """
    run = RunDir(logdir, trust_run=trust_run)
    params = run.Params()
    if not issubclass(params.task.cls, ImageClassifier):
        raise ImageDataError(
            f"--logdir={logdir}: {params.task.cls.__name__} does not classify images"
        )
    if data_dir:
        if not issubclass(params.input.cls, FolderInput):
            raise ImageDataError(f"--data_dir={data_dir}: the run's images are not in a folder")
        params.input.data_dir = data_dir
    task = params.task.Instantiate().Unpacked()
    inputs = params.input.Instantiate().Prepare(artifacts=run.artifacts)
    scored, theta = read_newest(
        run.checkpoint_dir, lambda saved, at: (at, read_weights(saved, task, at, use_ema)), step
    )
    evaluate_on = Evaluator(task, inputs, TfGraphEngine())
    metrics = evaluate_on(theta, inputs.HeldOut())
    means = (float(metrics[name]) for name in task.HELD_OUT_METRICS)
    return Scores(scored, use_ema, int(metrics.images), *means)
