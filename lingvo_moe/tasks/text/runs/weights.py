"""The weights of a run's model at a checkpoint."""

from typing import Any

from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST, Chosen, read_newest, read_weights
from lingvo_moe.core.engine.checkpoints.sharded_weights import weights_on_devices
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.adapters import merged, scale_of
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir


def load_theta(
    run: TextRunDir, model: BaseTask, chosen: Chosen = NEWEST, engine: Engine | None = None
) -> tuple[NestedMap, dict[str, Any]]:
    """The weights of a run's model at a checkpoint, as NumPy arrays; with an engine on its devices, sharded, so
    that no host needs to hold them all: see lay_for_inference.

    Returns:
        The weights, and what they are: model, params_override, step; averaged_steps, of a mean; ema, of a moving
        average.

    Raises:
        CheckpointError: no such checkpoint, fewer than asked for, a damaged one, or one that is not of the run's
            model; or the run keeps no moving average.
    """
    saved = run.experiment
    about: dict[str, Any] = {"model": saved["model"], "params_override": saved["params_override"]}
    if chosen.use_ema and chosen.average_last > 1:
        raise CheckpointError(
            "--use_ema: a moving average is not averaged again; leave "
            f"--average_last={chosen.average_last} out"
        )

    def read(checkpointer: Checkpointer, at: int) -> NestedMap:
        about["step"] = at
        if chosen.average_last > 1:
            about["averaged_steps"] = steps = _last_steps(checkpointer, at, chosen.average_last)
        else:
            steps = [at]
        if engine:
            params = run.ParamsOver(engine.mesh).task
            return weights_on_devices(engine, params, checkpointer, steps, chosen.use_ema)
        if chosen.average_last == 1:
            return read_weights(checkpointer, model, at, chosen.use_ema)
        return checkpointer.RestoreMeanToNumpy("theta", steps)

    theta = read_newest(run.checkpoint_dir, read, chosen.step)
    if not engine:
        theta = merged(theta, scale_of(run.Params().task))
    if chosen.use_ema:
        about["ema"] = model.p.ema_decay
    _check_theta(f"{run.checkpoint_dir}, step {about['step']}", theta, model.VariableSpecs())
    return theta, about


def _last_steps(checkpointer: Checkpointer, step: int, number: int) -> list[int]:
    steps = [s for s in checkpointer.Steps() if s <= step]
    if step not in steps:
        raise CheckpointError(
            f"{checkpointer.directory}, step {step}: there is no such checkpoint; there are {checkpointer.Steps()}"
        )
    if len(steps) < number:
        raise CheckpointError(
            f"--average_last={number}: {checkpointer.directory} has {len(steps)} up to there, {steps}; a trainer "
            "keeps train.save_max_to_keep of them"
        )
    return steps[-number:]


def _check_theta(where: str, theta: NestedMap, specs: NestedMap) -> None:
    """Raises CheckpointError unless theta has the variables and shapes of the specs."""
    have = {path: tuple(x.shape) for path, x in theta.FlattenItems()}
    want = {path: spec.shape for path, spec in specs.FlattenItems()}
    for path in sorted(have.keys() | want.keys()):
        if have.get(path) != want.get(path):
            raise CheckpointError(
                f"{where} is not of this run's model: {path} is {have.get(path, 'missing')} in it,"
                f" {want.get(path, 'missing')} in the model"
            )
