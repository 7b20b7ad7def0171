"""`--mode=eval`: scores the checkpoints of a run as its trainer writes them, in a process of its own.

It runs on the CPU with TensorFlow's kernels, or over the mesh of several devices. It reads what the trainer writes and
writes only to RUN/eval/scores. A lock of its own, which no trainer looks at, keeps a second evaluator out of there. It
can be stopped at any time: a checkpoint is scored again unless its line was written.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

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
    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.job import ending

    run_dir, several = RunDir(args.logdir), devices.process_count() > 1
    while True:
        ending.together(partial(_await_run, run_dir, args.once), on=[0])
        run = run_dir.identity
        with RunLock(args.logdir, holder=EVALUATOR) as lock:
            try:
                ending.together(lock.Acquire, on=[0])
                if is_run_of(run_dir, args.model) and not devices.process_index():
                    overrides_of_run(run_dir, override)
                read_params = partial(evaluated_params, args, defined, override)
                if _score_run(run_dir, run, args, read_params):
                    return 0
            except (OSError, ValueError):
                if several or run_dir.identity == run:  # else it was moved while it was read
                    raise
        if run_dir.identity != run and not devices.process_index():
            say(f"the run that was in {run_dir.path} is there no more; the next one is read afresh")


def _score_run(
    run_dir: RunDir, run: tuple[int, int] | None, args: Flags, read_params: Callable[[], Params]
) -> bool:
    """Scores the run with this RunDir.identity; returns False once it, or all its checkpoints, have gone.

    The first process of a job chooses what to score, and writes. `read_params` returns the run's parameters, with the
    flags' override.
    """
    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.engine.checkpoints.checkpoints import CheckpointError
    from lingvo_moe.core.engine.loop.summaries import Summaries

    params, tell = read_params(), (lambda text: None) if devices.process_index() else say
    check_data_exists(args, params)
    check_same_run(run_dir, params, "give the flags of the trainer")
    engine, laid = mesh_engine(args, params)
    scorer = _Scorer(run_dir, laid, args.eval_lines, engine)
    directory = str(run_dir.scores_dir)
    steps = _Steps(run_dir, run, args.once, read_params)
    with Summaries(directory, enabled=not devices.process_index()) as summaries:
        while found := _from_first(steps.Next):
            if why := found.get("why"):
                tell(
                    f"scored step {max(steps.scored, default=0)}, the last one ({why}): {directory}"
                )
                return True
            if "step" not in found:
                time.sleep(POLL_SECONDS)
                continue
            step = found["step"]
            try:
                scores = scorer.Score(step)
            except CheckpointError as e:
                say(f"step {step}: {steps.WhyLeftOut(step, e)}")
                continue
            summaries.Write(step, scores.metrics)
            for name, text in scores.notes.items():
                summaries.Text(name, text)
            steps.scored.add(step)
            tell(f"step {step}: {scores.text}")
    return False


class _Steps:
    """The checkpoints of a run that are to be scored, as the first process of a job sees them.

    Args:
        run: see RunDir.identity.
        read_params: see _score_run.
    """

    def __init__(
        self,
        run_dir: RunDir,
        run: tuple[int, int] | None,
        once: bool,
        read_params: Callable[[], Params],
    ):
        from lingvo_moe.core.engine.loop.summaries import read_metrics

        self._run_dir, self._run, self._once, self._read_params = run_dir, run, once, read_params
        self.scored = {row["step"] for row in read_metrics(str(run_dir.scores_dir))}
        self._before, self._tried = len(self.scored), {0} | self.scored

    def Next(self) -> dict[str, Any]:
        """The next `step`; or `why` there is none any more, '' while there may be; {} where the run has gone."""
        steps = self._run_dir.steps if self._run_dir.identity == self._run else []
        if not steps:
            return {}
        new = [s for s in (steps[-1:] if self._once else steps) if s not in self._tried]
        if new and not (self._once and len(self.scored) > self._before):
            self._tried.add(new[0])
            return {"step": new[0]}
        # A later command may have changed its end.
        why = "--once" if self._once else _why_done(self._run_dir, steps[-1], self._read_params())
        return {"why": why}

    def WhyLeftOut(self, step: int, error: Exception) -> str:
        """Says why a step cannot be scored. Raises the error where it is the only one, and still there."""
        from lingvo_moe.core.engine.checkpoints.run_weights import was_deleted

        if was_deleted(self._run_dir.checkpoint_dir, step):
            return "its checkpoint has made place for newer ones"
        if self._once and self._run_dir.identity == self._run:
            raise error
        return str(error)


def _from_first(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns on each process of a job the result, which JSON can hold, of work that the first one does alone."""
    from lingvo_moe.core.engine import devices

    said = b"" if devices.process_index() else json.dumps(work()).encode()
    found: dict[str, Any] = json.loads(devices.from_first_process(said))
    return found


def mesh_engine(args: Flags, params: Params) -> "tuple[Engine | None, Params]":
    """The engine over the mesh that the flags choose, and the Params with a task as it lies there in inference.

    None: TensorFlow's kernels of this process. Those score models in stages and with adapters, too; and where --mesh is
    of accelerators, which the trainer uses.

    Raises:
        ShardingError, EngineError: the devices do not fit the mesh, or the model does not.
        UsageError: several processes, for a model that is scored by one.
    """
    from lingvo_moe.core.engine import devices
    from lingvo_moe.core.engine.engines import engine_for_inference

    several = devices.process_count() > 1
    count = devices.device_count() if args.mesh or several else args.num_devices
    if count > 1 and is_decoded_over_mesh(params.task):
        return engine_for_inference(params, args.mesh, count)
    if several:
        raise UsageError(
            f"--num_processes={devices.process_count()}: a model in stages, or with adapters, is scored by one "
            "process; leave the flags of a job out, and the launcher"
        )
    return None, params


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
        self._run_dir, self._params = run_dir, params.task
        self._engine: Engine = engine or TfGraphEngine()
        self._task: BaseTask = params.task.Instantiate().Unpacked()
        inputs = params.input.Instantiate().Prepare(artifacts=artifacts)
        try:
            self._batches = first_batches(inputs, params.train.eval_batches)
        except NoHeldOutError as e:
            raise UsageError(f"--mode=eval: there is nothing to evaluate on: {e}") from None
        self._evaluator = Evaluator(self._task, inputs, self._engine)
        self._scorer: BaseCheckpointScorer | None = None
        if name := self._task.CHECKPOINT_SCORER:
            self._scorer = any_class(name)(self._task, inputs, artifacts, lines, engine)

    def Score(self, step: int) -> CheckpointScores:
        """The held-out loss and further scores of a checkpoint. All processes of a job call it.

        Raises CheckpointError: one of them cannot read it, or it was deleted.
        """
        from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
        from lingvo_moe.core.engine.checkpoints.run_weights import read_newest, read_weights
        from lingvo_moe.core.engine.checkpoints.sharded_weights import weights_on_devices

        engine, average = self._engine, bool(self._task.p.ema_decay)

        def read(saved: Checkpointer, at: int) -> NestedMap:
            if engine.PJRT:
                return weights_on_devices(engine, self._params, saved, [at], average)
            return read_weights(saved, self._task, at, average)

        theta, failed = NestedMap(), None
        try:
            theta = read_newest(self._run_dir.checkpoint_dir, read, step)
        except CheckpointError as e:
            failed = e
        if engine.AnyProcess(failed is not None):
            raise failed or CheckpointError("another process of the job cannot read its checkpoint")
        metrics = self._evaluator(theta, self._batches)
        text = f"held-out loss {self._evaluator.InWords(metrics)}"
        if self._scorer is None:
            return CheckpointScores(metrics, text)
        scores = self._scorer(theta)
        for path, value in scores.metrics.FlattenItems():
            metrics.Set(path, value)
        return CheckpointScores(metrics, f"{text}, {scores.text}", scores.notes)
