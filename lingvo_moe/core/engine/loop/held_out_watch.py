"""The held-out loss of a run while it trains: when it is computed, the best step, and when training stops early."""

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from lingvo_moe.core.config.class_names import any_class
from lingvo_moe.core.config.hyperparams import ParamError, Params
from lingvo_moe.core.console.command import say
from lingvo_moe.core.engine.engines import engine_for_inference
from lingvo_moe.core.engine.loop.evaluation import Evaluator
from lingvo_moe.core.engine.loop.summaries import Summaries
from lingvo_moe.core.engine.loop.trained import Trained
from lingvo_moe.core.engine.lowering.specs import numpy_dtype
from lingvo_moe.core.input.base_input import BaseInput, HeldOutBatch
from lingvo_moe.core.input.input_errors import NoHeldOutError
from lingvo_moe.core.nested_map import NestedMap, flatten_items, map_structure
from lingvo_moe.core.runs.evaluations import Evaluations
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.sharding.letters import WEIGHTS
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.checkpoint_scorer import BaseCheckpointScorer


class HeldOutWatch:
    """Evaluates the state of a run on the same held-out batches at an interval.

    Every process of a job has one and makes each call; one of them writes.

    Args:
        trained: its checkpointer keeps the best step.
        batches: what to evaluate on, at least one.
        run_dir: where losses and metrics go.
        writes: whether this process writes them: the first of a job.

    Attributes:
        why_stopped: why training ends at the last evaluation, by train.early_stopping_evals; '' if it goes on.
    """

    def __init__(
        self,
        trained: Trained,
        batches: Sequence[HeldOutBatch],
        run_dir: RunDir,
        writes: bool = True,
    ):
        self._task, self._train, self._batches = trained.task, trained.train, batches
        self._checkpointer, self._run_dir, self._writes = trained.checkpointer, run_dir, writes
        self._summaries = Summaries(str(run_dir.held_out_dir), enabled=writes)
        average = bool(self._task.p.ema_decay)
        self._evaluator = Evaluator(self._task, trained.inputs, trained.engine, average)
        self._score = _scorer(trained, run_dir) if self._train.eval_decode_every else None
        self._of_weights: Evaluator | None = None  # beside their average
        if average:
            self._of_weights = Evaluator(self._task, trained.inputs, trained.engine)
        self._evaluations = Evaluations(_digest(batches))
        # Before anything is written: process 0 may be ahead of the others later.
        self._before = run_dir.evaluations
        self._first: int | None = None
        self._done_at = time.monotonic()
        self.why_stopped = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type | None, *rest: object) -> None:
        self._summaries.__exit__(error, *rest)

    def Begin(self, first: int | None) -> None:
        """Restores the run's evaluations up to step `first`, from which it resumes; None begins a run."""
        before, self._first, self._done_at = self._before, first, time.monotonic()
        if first is None or before is None:
            return
        if before.batches != self._evaluations.batches:
            say(
                "the held-out batches are not those of the run's evaluations so far, since train.eval_batches or the "
                "data differ: the best step is looked for from here"
            )
            return
        self._Record(before.UpTo(first))

    def _Record(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations
        best = self._evaluations.best
        self.why_stopped = self._evaluations.WhyStopped(self._train.early_stopping_evals)
        self._checkpointer.rotation.best = best.step if best else None
        if self._writes and evaluations != self._before:
            self._run_dir.WriteEvaluations(self._evaluations)

    def Due(self, step: int, last: int) -> bool:
        """Whether the state after `step` steps is to be evaluated, and was not yet; `last` is the run's last step."""
        done = self._evaluations.done
        if not step or (done and done[-1].step == step):
            return False
        return step % self._train.eval_interval_steps == 0 or step == last

    def Evaluate(self, step: int, state: NestedMap) -> bool:
        """Evaluates the state after `step` steps: its moving average, where the task keeps one, and its weights.

        Returns:
            Whether this is the best step so far, so that its checkpoint is needed.
        """
        start = time.monotonic()
        if not self._evaluator.compiled:
            say("compiling the evaluation ...")
        metrics = self._evaluator(state.get("ema", state.theta), self._batches)
        in_words = f"{self._evaluator.InWords(metrics)}{_in_words(metrics, self._task)}"
        if self._of_weights:
            metrics.weights = self._of_weights(state.theta, self._batches)
            in_words += f", of the weights themselves {self._of_weights.InWords(metrics.weights)}"
        if self._score and step and step % self._train.eval_decode_every == 0:
            in_words += f", {self._score(state.get('ema', state.theta), metrics)}"
        loss = float(metrics[self._task.HELD_OUT_METRICS[0]])
        self._summaries.Write(step, metrics)
        self._Record(self._evaluations.With(step, loss))
        best = self._evaluations.best
        end = time.monotonic()
        share = f", {(end - start) / max(end - self._done_at, 1e-9):.0%} of the time"
        if step == self._first:  # nothing was trained since the start
            share = ""
        self._done_at = end
        what = f"best {best.loss:.4f} at step {best.step}" if best else "not finite"
        if is_best := best is not None and best.step == step:
            what = "best so far"
        say(f"step {step}: held-out loss {in_words}, {what} ({end - start:.1f} s{share})")
        return is_best


def _scorer(trained: Trained, run_dir: RunDir) -> Callable[[NestedMap, NestedMap], str]:
    """A function that adds the task's own scores of weights to metrics, and says them in words.

    Weights that each step of a search would have to gather are copied, as they lie in inference: see
    laid_for_inference.
    """
    task, engine = trained.task, trained.engine
    if engine.PJRT and task.p.shard_state == WEIGHTS:
        params, mesh = trained.params.Copy().Set(task=task.p.Copy()), engine.mesh
        params.train.mesh = str(mesh)
        engine, laid = engine_for_inference(params, "", mesh.size, quiet=True)
        engine.known_faults, task = trained.engine.known_faults, laid.task.Instantiate()
    over_mesh = engine if engine.PJRT else None
    scorer: BaseCheckpointScorer = any_class(task.CHECKPOINT_SCORER)(
        task, trained.inputs, run_dir.artifacts, engine=over_mesh
    )
    specs = task.VariableSpecs()
    types = specs.Transform(lambda spec: numpy_dtype(spec.dtype))

    def score(weights: NestedMap, metrics: NestedMap) -> str:
        theta = weights if over_mesh else engine.Get(weights)
        if task.p.ema_decay:
            theta = map_structure(lambda x, dtype: x.astype(dtype), theta, types)
        scores = scorer(engine.Put(theta, specs) if over_mesh else theta)
        for path, number in scores.metrics.FlattenItems():
            metrics.Set(path, number)
        return scores.text

    return score


def first_batches(inputs: BaseInput, count: int) -> list[HeldOutBatch]:
    """The first `count` held-out batches, at least one; fewer where there are no more.

    Raises:
        NoHeldOutError: there are none.
        ValueError: the data is damaged.
    """
    batches = list(itertools.islice(inputs.HeldOut(), count))
    if not batches:
        raise NoHeldOutError("none of the held-out examples fits into a batch")
    return batches


def read_batches(inputs: BaseInput, train: Params) -> list[HeldOutBatch]:
    """The first `train.eval_batches` held-out batches to evaluate on while a run trains.

    Empty where `train.eval_interval_steps` is 0; and, which is said, where there is no held-out data.

    Raises:
        ParamError: early stopping needs them.
        ValueError: the data is damaged.
    """
    if not train.eval_interval_steps:
        return []
    try:
        batches = first_batches(inputs, train.eval_batches)
    except NoHeldOutError as e:
        if train.early_stopping_evals:
            value = str(train.early_stopping_evals)
            why = f"needs held-out data, and there is none: {e}"
            raise ParamError("train.early_stopping_evals", value, why) from None
        say(f"train.eval_interval_steps={train.eval_interval_steps}: not evaluated, since {e}")
        return []
    count = f"{len(batches)} held-out batches"
    if len(batches) < train.eval_batches:
        count = f"all {count} (train.eval_batches={train.eval_batches})"
    say(f"{count} are evaluated every {train.eval_interval_steps} steps")
    return batches


def _digest(batches: Sequence[HeldOutBatch]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for one in batches:
        for path, value in flatten_items(one.batch):
            array = np.asarray(value)
            digest.update(f"{one.group} {path} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return f"{len(batches)} of {digest.hexdigest()}"


def _in_words(metrics: NestedMap, task: BaseTask) -> str:
    """The metrics beside the loss, e.g. ', perplexity 75.20, accuracy 31.2%'."""
    parts = [f"perplexity {metrics.perplexity:,.2f}"] if "perplexity" in metrics else []
    parts += [f"{name} {metrics[name]:.4g}" for name in task.HELD_OUT_METRICS[1:]]
    return "".join(f", {part}" for part in parts)
