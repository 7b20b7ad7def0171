"""task.fprop_dtype=auto: the type of the activations is chosen where a run begins, and stays that of the run."""

import functools
from collections.abc import Callable

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.stored_params import stored_values
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags, join_overrides
from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.engine.engines import engine_class
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.training.checks import UsageError
from lingvo_moe.training.same_run import dense_logdir, has_begun

AUTO = "auto"
_PATH = "task.fprop_dtype"
# Where products of both types are equally fast, the step of benchmarks/train_step.py takes 1.2 to 1.3 times as
# long in bfloat16, for its casts. Products that are so many times as fast make up for that.
_LEAST = 1.5


def with_chosen_type(args: Flags, default_engine: Callable[[Flags], str]) -> Flags:
    """The flags, whose override names a type where it said task.fprop_dtype=auto, so that nothing after this sees it.

    The type is that of the run in --logdir, if it has begun, whichever machine goes on with it; else the faster one
    here. With --mode=eval none is named: each run that is scored has its own.

    Args:
        default_engine: the name of the engine for flags without --engine.

    Raises UsageError: a run is to begin on devices that are not measured.
    """
    override = args.model_params_override
    types = [v.strip("'\"") for path, v in registry.split_override(override) if path == _PATH]
    if AUTO not in types:
        return args
    chosen = types[-1]
    if chosen == AUTO:
        chosen = "" if args.mode == "eval" else _of_run(args) or _faster(args, default_engine)
    rest = registry.part_of(override, lambda path: path != _PATH)
    named = f"{_PATH}={registry.escape(chosen)}" if chosen else ""
    return args.With(model_params_override=join_overrides(rest, named))


def _of_run(args: Flags) -> str:
    """The type that the run in --logdir began with, or the smaller model that it grows out of; '' for a new run."""
    if not args.logdir or args.restart:
        return ""
    for run in (RunDir(args.logdir), RunDir(dense_logdir(args.logdir))):
        if run.exists and has_begun(run):
            recorded = stored_values(run.params_text).get(_PATH, "None").strip("'\"")
            say(f"{_PATH}={AUTO}: {recorded}, as in the run in {run.path}")
            return recorded
    return ""


def _faster(args: Flags, default_engine: Callable[[Flags], str]) -> str:
    """The type with which training is faster here; a line says which, and why."""
    name = args.engine or default_engine(args)
    if not _is_measured(name):
        where = "" if engine_class(name).XLA else " on an accelerator"
        raise UsageError(
            f"{_PATH}={AUTO}: is chosen for --engine=tf_graph on a CPU, which is measured, and this run has "
            f"--engine={name}{where}; give {_PATH}=bfloat16 or {_PATH}=float32"
        )
    times = bfloat16_speed()
    chosen = "bfloat16" if times >= _LEAST else "float32"
    say(
        f"{_PATH}={AUTO}: {chosen}, since bfloat16 products are {times:.2f} times as fast as float32's on this "
        f"processor (bfloat16 from {_LEAST} times on)"
    )
    return chosen


def warn_of_slow_type(dtype: str | None, engine: str) -> None:
    """Says, of activations of bfloat16, that a run that began on this processor with auto would have float32."""
    if dtype == "bfloat16" and _is_measured(engine) and (times := bfloat16_speed()) < _LEAST:
        say(
            f"warning: {_PATH}=bfloat16: bfloat16 products are {times:.2f} times as fast as float32's on this "
            f"processor; a new run with {_PATH}={AUTO} would take float32"
        )


def _is_measured(engine: str) -> bool:
    """Whether an engine multiplies by TensorFlow's kernels, on a CPU."""
    kind = engine_class(engine)
    return not kind.XLA and kind.RunsOnCpu()


@functools.cache
def bfloat16_speed() -> float:
    """The speed of TensorFlow's products of bfloat16 on the CPUs of this process, in times that of float32."""
    from lingvo_moe.training.peak import matmul_flops_per_second

    with quiet():  # TensorFlow tells of kernels that this processor lacks
        narrow, wide = (
            max(matmul_flops_per_second(0.1, dtype) for _ in range(2))
            for dtype in ("bfloat16", "float32")
        )
    return narrow / wide
