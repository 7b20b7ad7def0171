"""Checks flags, paths and the run directory of a job, so that mistakes are found before anything slow starts."""

import os

from lingvo_moe.analysis.search.strategies.strategy_file import read_overrides
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.console.command import UsageError
from lingvo_moe.core.console.flags import Flags, join_overrides
from lingvo_moe.core.engine.engines import engine_class
from lingvo_moe.core.files.paths import absolute, check_local
from lingvo_moe.core.files.store import check_place, is_address
from lingvo_moe.core.pipeline.params import settings_of
from lingvo_moe.core.runs.directories import check_addable, check_logdir, check_writable

# Flags that set a parameter of the experiment.
_SHORT_FOR = {"mesh": "train.mesh", "max_steps": "train.max_steps", "data_dir": "input.data_dir"}


def check_flags(args: Flags, params: Params) -> None:
    """Raises UsageError for flags that the modes with a run cannot work with, before anything slow starts."""
    if not args.logdir:
        what = "evaluate" if args.mode == "eval" else "train"
        raise UsageError(f"--logdir is needed to {what}: the directory of the run")
    check_evaluation(params)
    if args.eval_lines is not None and not params.task.cls.CHECKPOINT_SCORER:
        raise UsageError(
            f"--eval_lines={args.eval_lines}: {args.model} translates nothing, and its held-out loss is that of "
            f"train.eval_batches={params.train.eval_batches}; set that, or leave the flag out"
        )
    params.input.cls.CheckSource(params.input)
    check_paths(args, params)
    if args.engine and engine_class(args.engine).ONE_DEVICE and args.num_devices > 1:
        raise UsageError(
            f"--num_devices={args.num_devices}: --engine={args.engine} runs on one device; use --engine=pjrt"
        )
    if args.init_from and os.path.realpath(args.init_from) == os.path.realpath(args.logdir):
        raise UsageError(
            f"--init_from={args.init_from} is --logdir itself: a run that goes on needs no --init_from, and one that "
            "begins from its weights another --logdir"
        )
    if params.train.upcycle_at:
        check_upcycling(args, params)


def check_upcycling(args: Flags, params: Params) -> None:
    """Raises UsageError where train.upcycle_at has no smaller model to begin with, or no time for one of the two."""
    at, last, task = params.train.upcycle_at, params.train.max_steps, params.task
    first = task.dense_first_layers if "nth_attention" in task and task.nth_attention else 0
    grows = task.cls.Growth(task).GrowsFrom()
    # A branch of a run that has grown does not grow again.
    if args.init_from and not args.init_from_state:
        why = f"the run begins with the weights of --init_from={args.init_from}; leave one of the two out"
    elif at >= last:
        why = f"must be less than train.max_steps={last}"
    elif not grows and first:
        why = (
            f"task.dense_first_layers={first} does not go with task.nth_attention: the smaller model has no first "
            "layers and counts every n-th from others; set task.dense_first_layers=0, or task.nth_attention=None"
        )
    elif not grows:
        why = (
            "needs a model with experts that, alone or with the shared ones, are as wide as its dense layers, whose "
            "hidden units they begin with"
        )
    else:
        return
    raise UsageError(f"train.upcycle_at={at}: {why}")


def check_evaluation(params: Params) -> None:
    """Raises UsageError for early stopping without evaluations, and for decoding that is not theirs or the task's."""
    train, task = params.train, params.task
    if train.early_stopping_evals and not train.eval_interval_steps:
        raise UsageError(
            f"train.early_stopping_evals={train.early_stopping_evals}: nothing is evaluated while "
            "train.eval_interval_steps=0; set it, e.g. to 100"
        )
    every, interval, why = train.eval_decode_every, train.eval_interval_steps, ""
    if every and not task.cls.CHECKPOINT_SCORER:
        why = f"{task.cls.__name__} has no scores beside its held-out loss; set it to 0"
    elif every and not is_decoded_over_mesh(task):
        why = "a model in stages, or with adapters, is not decoded while it trains; set it to 0, and use --mode=eval"
    elif every and (not interval or every % interval):
        why = f"must be a multiple of train.eval_interval_steps={interval}, with whose evaluations it comes"
    if why:
        raise UsageError(f"train.eval_decode_every={every}: {why}")


def is_decoded_over_mesh(task: InstantiableParams) -> bool:
    """Whether a model with these Params can be decoded on the trainer's devices, or over a mesh."""
    return not (settings_of(task) or ("adapter_rank" in task and task.adapter_rank))


def check_paths(args: Flags, params: Params) -> None:
    """Checks every path of a job before anything is written.

    Raises:
        PathError: an unknown address, or characters that a library cannot work with.
        UsageError: a flag that works on disk only, with an address.
        OutputError: --logdir cannot be written; or is, lies in, or holds data, an exported model or another run.
    """
    for flag in ("logdir", "init_from", "data_dir"):
        check_place(getattr(args, flag), f"--{flag}", portable=flag != "data_dir")
    if is_address(args.logdir) and (args.restart or args.mode == "eval"):
        raise UsageError(
            f"--logdir={args.logdir}: --restart and --mode=eval work on runs on disk only; name another run"
        )
    data = params.input
    places = {f"input.{name}": data.Get(name) for name in (*data.cls.READS, *data.cls.ADDS_TO)}
    check_place(data_dir := places.pop("input.data_dir", ""), "input.data_dir", portable=False)
    for name, place in places.items():
        check_local(place, name)
    for name in (f"input.{name}" for name in data.cls.ADDS_TO):
        if places[name]:
            check_addable(places[name], name)
    if not is_address(args.logdir):
        check_logdir(args.logdir, {"--data_dir": data_dir} if data_dir else {})
        check_writable(args.logdir, f"--logdir={args.logdir}")


def strategy_override(args: Flags, defined: Params, more: str = "") -> str:
    """`--strategy` with `--model_params_override` appended, which may change it, and `more`.

    `defined` are the Params of --model: see registry.AsDefined.

    Raises:
        StrategyError, RegistryError: as read_overrides.
        UsageError: one of these sets a parameter to another value than a flag of its own does.
    """
    strategy = getattr(args, "strategy", "")
    texts = {
        f"--strategy={strategy}": read_overrides(strategy, defined) if strategy else "",
        "--model_params_override": args.model_params_override,
        "--variants": more,
    }
    for where, text in texts.items():
        values = dict(registry.split_override(text))
        for flag, path in _SHORT_FOR.items():
            value = args[flag].value if flag in args else None
            if value not in (None, "") and values.get(path, str(value)) != str(value):
                raise UsageError(
                    f"--{flag}={value}: {where} has {path}={values[path]}, which would have no effect; leave one out"
                )
    return join_overrides(*texts.values())


def full_override(args: Flags, defined: Params) -> str:
    """`--strategy` and `--model_params_override`, with the shorthand flags appended; see strategy_override."""
    parts = [strategy_override(args, defined)]
    if args.max_steps is not None:
        parts.append(f"train.max_steps={args.max_steps}")
    if args.data_dir:
        parts.append(f"input.data_dir={registry.escape(absolute(args.data_dir))}")
    return join_overrides(*parts)


def check_data_dir(args: Flags, defined: Params) -> None:
    """Raises UsageError if --data_dir is given but the experiment's input reads no directory.

    `defined` are the Params of --model: see registry.AsDefined. Raises RegistryError like GetParams.
    """
    if not args.data_dir:
        return
    data = registry.WithOverrides(defined, strategy_override(args, defined)).input
    if "data_dir" not in data:
        raise UsageError(
            f"--data_dir={args.data_dir}: {args.model} reads no directory of data ({data.cls.__name__} has no "
            "data_dir); leave the flag out"
        )


def check_data_exists(args: Flags, params: Params) -> None:
    """Raises UsageError if what the input reads does not exist: before a run is moved aside or compared."""
    for name in params.input.cls.READS:
        place = params.input.Get(name)
        if place and not is_address(place) and not os.path.exists(place):
            flag = "--data_dir" if name == "data_dir" and args.data_dir else f"input.{name}"
            raise UsageError(f"{flag}={place} does not exist")


def check_budget(train: Params, num_processes: int) -> None:
    """Raises UsageError for a budget that the processes of a job would not see used up at the same step."""
    if train.max_cpu_seconds and num_processes > 1:
        raise UsageError(
            f"train.max_cpu_seconds={train.max_cpu_seconds:g}: is the time of one process, and this job has "
            f"{num_processes}; use train.max_units or train.max_steps"
        )
