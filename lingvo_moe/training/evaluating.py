"""`--mode=eval`: scores the checkpoints of a run as its trainer writes them, in a process of its own.

It runs on the CPU with TensorFlow's kernels, or over the mesh of several devices. It reads what the trainer writes and
writes only to RUN/eval/scores. A lock of its own, which no trainer looks at, keeps a second evaluator out of there. It
can be stopped at any time: a checkpoint is scored again unless its line was written.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lingvo_moe.core.config.class_names import any_class
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.input.input_errors import NoHeldOutError
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.runs.run_lock import EVALUATOR, RunLock
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.checkpoint_scorer import BaseCheckpointScorer, CheckpointScores
from lingvo_moe.training.checks import UsageError, check_data_exists, is_decoded_over_mesh
from lingvo_moe.training.same_run import (
    check_same_run,
    evaluated_params,
    has_begun,
    is_run_of,
    overrides_of_run,
)

if TYPE_CHECKING:  # it imports NumPy
    from lingvo_moe.core.engine.base import Engine

POLL_SECONDS = 5.0  # between two looks at the directory of checkpoints


def evaluate_run(args: Flags, defined: Params, override: str) -> int:
    """Scores every checkpoint of --logdir but that of step 0, and those that follow, each once, oldest first.

    Ends after the last step, where training stopped early, and with --once after the newest checkpoint. Where the
    trainer begins another run in the directory (--restart), it goes on with that.

    Args:
        defined: the Params of --model: see registry.AsDefined.
        override: that of the flags.

    Raises:
        UsageError: another experiment's run, or no run with --once.
        RunLockError: another evaluator is at work there.
        ValueError: nothing is held out, or it is damaged.
    """
    run_dir = RunDir(args.logdir)
    while True:
        _await_run(run_dir, args.once)
        run = run_dir.identity
        with RunLock(args.logdir, holder=EVALUATOR) as lock:
            try:
                lock.Acquire()
                if is_run_of(run_dir, args.model):
                    overrides_of_run(run_dir, override)
                read_params = partial(evaluated_params, args, defined, override)
                if _score_run(run_dir, run, args, read_params):
                    return 0
            except (OSError, ValueError):
                if run_dir.identity == run:  # else it was moved while it was read
                    raise
        if run_dir.identity != run:
            say(f"the run that was in {run_dir.path} is there no more; the next one is read afresh")


def _score_run(
    run_dir: RunDir, run: tuple[int, int] | None, args: Flags, read_params: Callable[[], Params]
) -> bool:
    """Scores the run with this RunDir.identity; returns False once it, or all its checkpoints, have gone.

    `read_params` returns its parameters, with the flags' override.
    """
    from lingvo_moe.core.engine.checkpoints.checkpoints import CheckpointError
    from lingvo_moe.core.engine.checkpoints.run_weights import was_deleted
    from lingvo_moe.core.engine.loop.summaries import Summaries, read_metrics

    once, params = args.once, read_params()
    check_data_exists(args, params)
    check_same_run(run_dir, params, "give the flags of the trainer")
    engine, laid = mesh_engine(args, params)
    scorer = _Scorer(run_dir, laid, args.eval_lines, engine)
    directory = str(run_dir.scores_dir)
    scored = {row["step"] for row in read_metrics(directory)}
    tried = {0} | scored
    with Summaries(directory) as summaries:
        while run_dir.identity == run and (steps := run_dir.steps):
            new = [s for s in (steps[-1:] if once else steps) if s not in tried]
            if new:
                tried.add(new[0])
                try:
                    step, scores = scorer.Score(None if once else new[0])
                except CheckpointError as e:
                    if once or run_dir.identity != run:
                        raise
                    gone = was_deleted(run_dir.checkpoint_dir, new[0])
                    why = "its checkpoint has made place for newer ones" if gone else str(e)
                    say(f"step {new[0]}: {why}")
                    continue
                summaries.Write(step, scores.metrics)
                for name, text in scores.notes.items():
                    summaries.Text(name, text)
                say(f"step {step}: {scores.text}")
                scored.add(step)
                if not once:
                    continue  # the next look may find that others are gone
            params = read_params()  # a later command may have changed its end
            if why := "--once" if once else _why_done(run_dir, steps[-1], params):
                last = max(scored, default=0)
                say(f"scored step {last}, the last one ({why}): {directory}")
                return True
            time.sleep(POLL_SECONDS)
    return False


def mesh_engine(args: Flags, params: Params) -> "tuple[Engine | None, Params]":
    """The engine over the mesh that the flags choose, and the Params with a task as it lies there in inference.

    None: TensorFlow's kernels of this process. Those score models in stages and with adapters, too; and where --mesh is
    of accelerators, which the trainer uses.

    Raises ShardingError, EngineError: the devices do not fit the mesh, or the model does not.
    """
    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.engine.engines import engine_for_inference

    count = devices.device_count() if args.mesh else args.num_devices
    if count <= 1 or not is_decoded_over_mesh(params.task):
        return None, params
    return engine_for_inference(params, args.mesh, count)


def _await_run(run_dir: RunDir, once: bool) -> None:
    """Waits until the run has a checkpoint. Raises UsageError: it has none, and the newest one is to be scored."""
    if once and not (run_dir.exists and any(run_dir.steps)):
        raise UsageError(
            f"--once: --logdir={run_dir.path} holds no run with a checkpoint after step 0"
        )
    if not (run_dir.exists and has_begun(run_dir)):
        say(f"waiting for a run in {run_dir.path} ...")
    while not (run_dir.exists and has_begun(run_dir)):
        time.sleep(POLL_SECONDS)


def _why_done(run_dir: RunDir, last: int, params: Params) -> str:
    """Says why no further checkpoint follows that of step `last`; '' if one may."""
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
    from lingvo_moe.core.engine.loop.budget import Budget, part_of_run

    train = params.train
    budget = Budget(train, until=part_of_run(params.task, train))
    if train.max_units or train.max_cpu_seconds:
        try:
            with Checkpointer(str(run_dir.checkpoint_dir), read_only=True) as saved:
                budget.Begin(last, saved.ReadExtra(last).get("used", {}))
        except CheckpointError:  # it has made place for newer ones, or the run was begun again
            return ""
    if why := budget.WhyDone(last):
        return why
    evaluations = run_dir.evaluations
    if evaluations is None or not evaluations.done or evaluations.done[-1].step != last:
        return ""
    return evaluations.WhyStopped(train.early_stopping_evals)


class _Scorer:
    """Computes the held-out loss of a run's checkpoints, and the task's own scores."""

    def __init__(self, run_dir: RunDir, params: Params, lines: int | None, engine: "Engine | None"):
        from lingvo_moe.core.engine.loop.evaluation import Evaluator
        from lingvo_moe.core.engine.loop.held_out_watch import first_batches
        from lingvo_moe.core.engine.tf_engine import TfGraphEngine

        artifacts = run_dir.artifacts
        self._run_dir, self._params, self._engine = run_dir, params.task, engine
        self._task: BaseTask = params.task.Instantiate().Unpacked()
        inputs = params.input.Instantiate().Prepare(artifacts=artifacts)
        try:
            self._batches = first_batches(inputs, params.train.eval_batches)
        except NoHeldOutError as e:
            raise UsageError(f"--mode=eval: there is nothing to evaluate on: {e}") from None
        self._evaluator = Evaluator(self._task, inputs, engine or TfGraphEngine())
        self._scorer: BaseCheckpointScorer | None = None
        if name := self._task.CHECKPOINT_SCORER:
            self._scorer = any_class(name)(self._task, inputs, artifacts, lines, engine)

    def Score(self, step: int | None) -> tuple[int, CheckpointScores]:
        """The held-out loss and further scores of a checkpoint, None for the newest; and its step.

        Raises CheckpointError: it cannot be read, or was deleted.
        """
        from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
        from lingvo_moe.core.engine.checkpoints.run_weights import read_newest, read_weights
        from lingvo_moe.core.engine.checkpoints.sharded_weights import weights_on_devices

        engine, average = self._engine, bool(self._task.p.ema_decay)

        def read(saved: Checkpointer, at: int) -> tuple[int, NestedMap]:
            if engine:
                return at, weights_on_devices(engine, self._params, saved, [at], average)
            return at, read_weights(saved, self._task, at, average)

        step, theta = read_newest(self._run_dir.checkpoint_dir, read, step)
        metrics = self._evaluator(theta, self._batches)
        text = f"held-out loss {self._evaluator.InWords(metrics)}"
        if self._scorer is None:
            return step, CheckpointScores(metrics, text)
        scores = self._scorer(theta)
        for path, value in scores.metrics.FlattenItems():
            metrics.Set(path, value)
        return step, CheckpointScores(metrics, f"{text}, {scores.text}", scores.notes)
