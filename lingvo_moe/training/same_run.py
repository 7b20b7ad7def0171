"""The run in --logdir beside what the flags ask for: the same one, another one, or none yet."""

import contextlib
import os
from collections.abc import Collection

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.class_names import own_class
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.config.param_text import classes_first
from lingvo_moe.core.config.stored_params import difference, has_effect, stored_values
from lingvo_moe.core.console.command import flags_line, say
from lingvo_moe.core.console.flags import BEST, Flags, join_overrides
from lingvo_moe.core.files.paths import absolute
from lingvo_moe.core.runs.bucket_lock import TrainerLock
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.training.checks import UsageError

# Directories that are those of a run alone.
_PLACES = ("input.data_dir.", "input.vocab_dir.", "input.cache_dir.")
_MOST_RESTORED = 8  # parameters that a message tells the user to set


def has_begun(run_dir: RunDir) -> bool:
    """Whether the run has a checkpoint. Without one, the directory may be reused for another experiment."""
    return bool(run_dir.steps)


def prepare_run_dir(
    run_dir: RunDir, model: str, override: str, params: Params, lock: TrainerLock, restart: bool
) -> None:
    """Checks that --logdir is unused or holds the run that the flags describe.

    With `restart`, renames a run that is there, so that the directory is free.

    Args:
        params: those of the experiment `model`, to which `override` has been applied.
        lock: holds the directory; locks the new one after a rename.

    Raises:
        UsageError: the directory holds another experiment, or a run without a checkpoint or description.
        RunDirError: the run is damaged, links lead out of it, or experiment.json is another program's.
        RunLockError: another trainer took the new directory.
    """
    from lingvo_moe.core.engine.loop.summaries import read_metrics

    if restart and (run_dir.exists or has_begun(run_dir)):
        path = run_dir.path.resolve()
        number = 1
        while (aside := path.with_name(f"{path.name}.before_restart_{number}")).exists():
            number += 1
        path.rename(aside)
        lock.Acquire()
        say(f"--restart: the run that was in {path} is now in {aside}")
    for name in ("train", "checkpoints", "eval"):  # into which it writes
        run_dir.Inside(name)
    if not has_begun(run_dir):
        if read_metrics(str(run_dir.summaries_dir)):
            raise UsageError(
                f"--logdir={run_dir.path} holds a run that has trained, but no checkpoint of it; "
                "--restart begins at step 0"
            )
        run_dir.CheckReplaceable()
        return
    if not run_dir.exists:
        raise UsageError(
            f"--logdir={run_dir.path} holds checkpoints, but does not say of what (experiment.json is missing); "
            "give another --logdir, or --restart to start over"
        )
    remedy = "give another --logdir, or --restart to start over"
    if all(map(_is_of_data, difference(stored_values(run_dir.params_text), params))):
        remedy += f"; {with_its_weights(run_dir.path, model, override, params)}"
    check_same_run(run_dir, params, remedy)


def with_its_weights(logdir: str | os.PathLike, model: str, override: str, params: Params) -> str:
    """The end of an error about data: the command that begins another run with the weights of the one in --logdir."""
    flags = {
        "model": model,
        "data_dir": params.input.data_dir if "data_dir" in params.input else "",
        "logdir": f"{logdir}-2",
        "init_from": str(logdir),
        "model_params_override": registry.part_of(override, lambda path: path != "input.data_dir"),
    }
    return (
        f"or begin another run with its weights: python -m lingvo_moe.trainer {flags_line(**flags)}"
    )


def _is_of_data(path: str) -> bool:
    """Whether runs may differ in a parameter and yet begin with each other's weights; see --init_from."""
    return path.startswith("input.") or path.endswith(("_vocab_size", ".num_tasks"))


def is_run_of(run_dir: RunDir, model: str) -> bool:
    """Whether the run in --logdir is this user's, and of this experiment."""
    if not (run_dir.exists and run_dir.is_own):
        return False
    began = run_dir.experiment["model"]
    with contextlib.suppress(registry.RegistryError):
        return began == model or registry.GetExperiment(began) is registry.GetExperiment(model)
    return False


def overrides_of_run(run_dir: RunDir, override: str, left_out: Collection[str] = ()) -> str:
    """The overrides of a run, but for those of the parameters `left_out`, and of others that `override` sets.

    A line says what they are, and another one which of `train` are left out.
    """
    changed = [path for path, _ in registry.split_override(override)]

    def is_in(path: str, names: Collection[str]) -> bool:
        return any(f"{path}.".startswith(f"{name}.") for name in names)

    rest = registry.part_of(run_dir.override, lambda path: not is_in(path, changed))
    taken = registry.part_of(rest, lambda path: not is_in(path, left_out))
    train = registry.part_of(rest, lambda path: is_in(path, {"train"} & {*left_out}))
    if taken:
        say(f"{flags_line(model_params_override=taken)}: from the run in {run_dir.path}")
    if train:
        say(f"not from the run, whose last command had them: {train}")
    return taken


def with_overrides_of_run(args: Flags, defined: Params, override: str) -> str:
    """The override for a run that goes on: after those that it began with, where the flags leave them out.

    Parameters of `train`, and those of `task` that a run may change, are as the flags say. `defined` are the Params of
    --model: see registry.AsDefined.
    """
    if args.mode != "sync" or not args.logdir or args.restart:
        return override
    run_dir = RunDir(args.logdir)
    if not has_begun(run_dir) or not is_run_of(run_dir, args.model):
        return override
    left_out = ["train", *(f"task.{name}" for name in defined.task.cls.MAY_CHANGE)]
    return join_overrides(overrides_of_run(run_dir, override, left_out), override)


def evaluated_params(args: Flags, defined: Params, override: str) -> Params:
    """The parameters to evaluate with: those that the run in --logdir was trained with, and the flags' override on top.

    Those of the flags alone, where there is no run yet, or one that is by somebody else or of another experiment.
    `defined` are the Params of --model: see registry.AsDefined.
    """
    run_dir = RunDir(args.logdir)
    if not has_begun(run_dir) or not is_run_of(run_dir, args.model):
        return registry.WithOverrides(defined, override)
    params = run_dir.Params(defined)
    for path, value in registry.split_override(override):
        registry.set_from_text(params, path, value, "--model_params_override")
    registry.configure(params)
    return params


def with_source(args: Flags, run_dir: RunDir) -> Flags:
    """The flags, with --init_from as the run in --logdir has it that was ended before its first checkpoint.

    Raises UsageError: the run is by somebody else.
    """
    if args.init_from or args.restart or has_begun(run_dir):
        return args
    run_dir.CheckReplaceable()
    if not (about := run_dir.began_from):
        return args
    values = {"init_from": about["logdir"], "init_from_step": about["step"]}
    flags = f"--init_from={about['logdir']} --init_from_step={about['step']}"
    if about.get("state"):
        values, flags = {**values, "init_from_state": True}, f"{flags} --init_from_state"
    why = f"the run in {run_dir.path}, which was ended before its first checkpoint"
    if not run_dir.is_own:
        raise UsageError(
            f"--logdir: {why}, was to begin with {flags}, but has no mark as one of yours; give these flags, or "
            "--restart to begin without"
        )
    say(f"{flags}: from {why}; --restart begins without")
    return args.With(**values)


def with_model_of_source(args: Flags) -> Flags:
    """The flags; without --model, with that of the run in --init_from, its parameters and its vocabularies; with
    --init_from_state its data, too.

    Raises UsageError: the run is by somebody else, and not trusted.
    """
    if args.model:
        return args
    run = RunDir(args.init_from, "--init_from", args.trust_run)
    model = run.experiment["model"]
    if not (run.is_own or args.trust_run):
        raise UsageError(
            f"--model is required: {run.path} has no mark as a run of yours; or give --trust_run"
        )
    # A run that goes on at a place in the data has these data.
    others = ("train.", *(() if args.init_from_state else _PLACES))
    override = registry.part_of(run.override, lambda path: not f"{path}.".startswith(others))
    vocabularies = run.path / "vocab"
    if vocabularies.is_dir() and not args.init_from_state:
        override = join_overrides(
            override, f"input.vocab_dir={registry.escape(absolute(vocabularies))}"
        )
    flags = {"model": model, "model_params_override": override}
    say(f"{flags_line(**flags)}: from {run.path}")
    override = join_overrides(override, args.model_params_override)
    return args.With(model=model, model_params_override=override)


def check_not_to_grow(args: Flags, params: Params) -> None:
    """Raises UsageError for a new run beside the smaller model that a run in --logdir was to grow out of."""
    grows = params.task.cls.Growth(params.task).GrowsFrom()
    if args.restart or RunDir(args.logdir).exists or not grows:
        return
    dense = RunDir(dense_logdir(args.logdir))
    at = stored_values(dense.params_text).get("train.upcycle_at", "0") if dense.exists else "0"
    if at != "0":
        raise UsageError(
            f"--logdir={args.logdir}: the run there was to grow out of that in {dense.path}; give "
            f"--model_params_override=train.upcycle_at={at} to go on, --restart to begin without, or another --logdir"
        )


def dense_logdir(logdir: str) -> str:
    """The directory of the smaller model that the one in --logdir grows out of; see train.upcycle_at."""
    return f"{logdir.rstrip('/')}-dense"


def check_same_run(run_dir: RunDir, params: Params, remedy: str) -> None:
    """Raises UsageError unless the run has these `task.` and `input.` parameters; see run_difference."""
    # The text, not the experiment evaluated again: its definition may have changed since.
    differing = run_difference(run_dir.params_text, params)
    if not differing:
        return
    began = run_dir.experiment
    override = _part_of_run(began["params_override"], params)
    flags = flags_line(model=began["model"], model_params_override=override)
    if restored := flags_line(model_params_override=_restoring(run_dir.params_text, params)):
        flags += f". With {restored} added, it goes on"
    raise UsageError(
        f"--logdir={run_dir.path} holds a run of {began['model']} with other parameters; {remedy}. The run began with "
        f"{flags}. '>' is the run there, '<' is what would run now:\n{differing}"
    )


def _restoring(stored: str, params: Params) -> str:
    """The override that gives `params` the values of a stored text, also where an experiment was edited since.

    '' if there is none, or one of many parameters, or one that names a class outside this package.
    """
    then, restored = stored_values(stored), params.Copy()
    paths = sorted(difference(then, params), key=classes_first)
    if len(paths) > _MOST_RESTORED:
        return ""
    try:
        for path in paths:
            registry.set_from_text(restored, path, then[path], "", own_class)
        registry.configure(restored)
    except (KeyError, AttributeError, ValueError):  # it is not there now, or was not then
        return ""
    if difference(then, restored):
        return ""
    return join_overrides(*(f"{path}={then[path]}".replace(";", r"\;") for path in paths))


def _part_of_run(override: str, params: Params) -> str:
    """The part of a run's override that the run cannot change, as run_difference has it."""
    may_change = {f"task.{name}" for name in params.task.cls.MAY_CHANGE}
    may_change |= {f"input.{name}" for name in params.input.cls.MAY_CHANGE}
    return registry.part_of(
        override, lambda path: not path.startswith("train.") and path not in may_change
    )


def override_without_unused(override: str, params: Params) -> str:
    """The part of an override that has an effect on these parameters."""
    return registry.part_of(override, lambda path: has_effect(params, path))


def check_same_input(run_dir: RunDir, params: Params) -> None:
    """Raises UsageError unless the run has the same `input.` parameters, so that its place in the data is one here."""
    if differing := run_difference(run_dir.params_text, params, "input."):
        raise UsageError(
            f"--init_from_state: {run_dir.path} has other data, so this run cannot go on at its place in them; leave "
            f"the flag out. '>' is the run there, '<' is what would run now:\n{differing}"
        )


def check_began_from(args: Flags, run_dir: RunDir) -> None:
    """Raises UsageError if --init_from differs from the run that --logdir's run was initialised from."""
    about = run_dir.began_from
    if not args.init_from or (
        about
        and os.path.realpath(args.init_from) == os.path.realpath(about["logdir"])
        and args.init_from_step in (None, BEST, about["step"])
    ):
        return
    how = f"from {about['logdir']} at step {about['step']}" if about else "from nothing"
    raise UsageError(
        f"--init_from={args.init_from}: the run in {args.logdir} began {how}, and has trained since; leave the flag "
        "out to go on with it, give another --logdir, or --restart to start over"
    )


def run_difference(stored: str, params: Params, part: str = "") -> str:
    """Returns a diff of the `task.` and `input.` parameters of two experiments, one per line; '' if there is none.

    '>' marks lines of `stored`, the text of a run's, '<' lines of `params`; all paths begin with `part`. Parameters
    that a run may change (e.g. its length, or how often it is saved) are left out. So is a parameter that `stored`
    lacks and that has its default in `params`: it did not exist when the run began.
    """
    there, here = stored_values(stored), stored_values(params.ToText())
    return "\n".join(
        f"{sign} {path} : {values[path]}"
        for path in difference(there, params)
        for sign, values in ((">", there), ("<", here))
        if path in values and path.startswith(part)
    )
