"""Shared parts of the commands: flags, checks of outputs, errors as one line, quiet imports, opening a translator."""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lingvo_moe.core.config import checks, registry
from lingvo_moe.core.config.class_names import TRUST_RUN_HELP
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.collection import paused_collection
from lingvo_moe.core.console.command import as_typed, run as run, say
from lingvo_moe.core.console.flags import (
    BEST,
    BEST_HELP,
    NEWEST,
    Flags,
    join_overrides,
    names as names,
)
from lingvo_moe.core.console.interrupt import StopRequest
from lingvo_moe.core.console.mistakes import report
from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.console.tensorflow_import import import_tensorflow
from lingvo_moe.core.console.waiting import Waiting
from lingvo_moe.core.decode.ranges import BEAM_SIZE, LENGTH, LENGTH_ALPHA, Sampling
from lingvo_moe.core.files.copies import local, push_all
from lingvo_moe.core.files.paths import check_local
from lingvo_moe.core.files.store import is_address
from lingvo_moe.core.runs import directories
from lingvo_moe.core.runs.directories import check_addable, check_replaceable, check_writable
from lingvo_moe.core.runs.run_dir import RunDir

if TYPE_CHECKING:  # they import NumPy or TensorFlow
    from lingvo_moe.core.engine.checkpoints.run_weights import Chosen
    from lingvo_moe.core.sharding import Mesh
    from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions
    from lingvo_moe.tasks.text.preparing.beam import BeamRunner

CHAT_LENGTH = 4096  # tokens of a conversation, where no flag says how many
DEVICES = 8  # of a mesh that no flag sizes


def check_output_file(path: str | os.PathLike, flag: str = "--output") -> None:
    """Raises ValueError, naming the flag, unless `path` can be written without damage to a run, data or model."""
    check_local(path, flag)
    if os.path.isdir(path):
        raise ValueError(f"{flag}={path} is a directory; name a file")
    parent = Path(os.path.realpath(path)).parent
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device
        if not os.access(path, os.W_OK):
            raise ValueError(f"{flag}={path}: no permission to write to it")
    elif not parent.is_dir():
        raise ValueError(f"{flag}={path}: there is no directory {parent}")
    else:
        check_writable(parent, f"{flag}={path}")
    check_addable(path, flag)


def check_output_files(args: Flags, *names: str) -> None:
    """Raises ValueError as check_output_file for the files that flags of these names name; '' names none."""
    for name in names:
        if path := getattr(args, name):
            check_output_file(path, f"--{name}")


def made(*files: str | os.PathLike, next: str = "") -> None:
    """Prints which files a command wrote and, where one command uses them best, that command."""
    print(f"written: {', '.join(map(str, files))}")
    if next:
        print(f"next: {as_typed(next)}")


def attempt(name: str, work: Callable[[], int], interrupted: str = "") -> int:
    """Runs the work of a command; mistakes and Ctrl-C end it as mistakes.py reports them instead of with a traceback.

    `interrupted` is the line after Ctrl-C; '' for none.

    Returns:
        The status of `work`, 1 after a mistake or a process that failed, or 130 after Ctrl-C (143 after SIGTERM,
        where that is caught).
    """
    try:
        status = work()
        push_all()
        return status
    except subprocess.CalledProcessError as e:
        say(f"{name}: training ended with status {e.returncode}; see above")
        return 1
    except KeyboardInterrupt as e:
        if interrupted:
            say(f"{name}: {interrupted}")
        return getattr(e, "status", 130)  # of SIGTERM
    except Exception as e:
        if not report(name, e):
            raise
        return 1


def train(model: str, data_dir: Path, logdir: Path, overrides: Sequence[str], *more: str) -> None:
    """Runs the trainer in a process of its own, with a cache beside the data.

    `overrides` are texts as for --model_params_override, `more` are further flags.

    Raises CalledProcessError: it ended with an error, which is on standard error.
    """
    cache = registry.escape(str((data_dir.parent / "cache").resolve()))
    override = join_overrides(*overrides, f"input.cache_dir={cache}")
    flags = {"model": model, "data_dir": data_dir, "logdir": logdir}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    arguments += [*more, f"--model_params_override={override}"]
    subprocess.run([sys.executable, "-m", "lingvo_moe.trainer", *arguments], check=True)


def attempt_compiling(name: str, work: Callable[[], int]) -> int:
    """Runs, as `attempt` does, a command that compiles and writes its files last.

    Ctrl-C and SIGTERM end the process: the compiler cannot be stopped and would go on in its thread.
    """
    with StopRequest() as stop, stop.AtOnce():
        status = attempt(name, work, "interrupted; nothing was written")
    if status > 128:
        os._exit(status)
    return status


def request_devices(count: int) -> None:
    """Makes virtual CPU devices, unless this process has as many devices already, as in tests.

    Raises EngineError: it has fewer, and they are fixed.
    """
    from lingvo_moe.core.engine.base import EngineError
    from lingvo_moe.core.engine.devices import device_count, request_cpu_devices

    try:
        request_cpu_devices(count)
    except EngineError:
        if device_count() < count:
            raise


def plan_cache(cache_dir: str | None) -> Path | None:
    """The directory of plans and compiled programs that --cache_dir chooses; None for none.

    Raises ValueError: nothing can be written there.
    """
    if cache_dir is not None:
        if cache_dir:
            check_output_directory(cache_dir, "--cache_dir")
        return local(cache_dir) if cache_dir else None
    from lingvo_moe.analysis.programs.aot import aot_cache

    return aot_cache.default_cache_dir()


def check_output_directory(
    path: str | os.PathLike, flag: str = "--output", replaces: directories.OutputKind | None = None
) -> None:
    """Raises ValueError, naming the flag, unless `path` is or can become a directory to write in.

    `replaces` is the kind of directory that the command writes and may replace; None for a command that adds files.
    """
    if is_address(path):
        return check_replaceable(path, replaces, flag) if replaces else None
    check_local(path, flag)
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_dir():
        raise ValueError(f"{flag}={path} is a file; name a directory")
    check_writable(path, f"{flag}={path}")
    if replaces is not None:
        check_replaceable(path, replaces, flag)
    else:
        check_addable(path, flag)


def define_cache_flag(flags: Flags) -> None:
    """Defines --cache_dir, which plan_cache reads."""
    help = "directory for plans, verified steps and compiled programs; '' keeps none"
    flags.DEFINE_path("cache_dir", None, help, address=True)


def define_mesh_flags(flags: Flags, most: int) -> None:
    """Defines --mesh and --num_devices, of `most` devices, of which at most one may be given."""
    flags.DEFINE_string("mesh", "", "axis:size,... (default: the experiment's own)")
    help = "lay the experiment's mesh over this many devices (default: 8)"
    flags.DEFINE_integer("num_devices", None, help, checks.Integer(2, most))
    flags.OnlyWith("num_devices", "a mesh says how many devices there are", mesh=False)


def mesh_of(args: Flags, params: Params) -> "Mesh":
    """The mesh that the flags of define_mesh_flags choose for an experiment."""
    from lingvo_moe.core.task.meshes import make_mesh

    return make_mesh(params, args.mesh, 0 if args.mesh else args.num_devices or DEVICES)


def define_runner_flags(flags: Flags) -> None:
    """Defines --runner and --runner_option, which beam_runner reads."""
    with flags.Section("many machines, with Apache Beam (docs/data.md)"):
        help = "the runner of Apache Beam that does the work, e.g. FnApiRunner or FlinkRunner (default: none)"
        flags.DEFINE_string("runner", None, help)
        flags.DEFINE_multi_string(
            "runner_option", "an option of the pipeline, e.g. direct_num_workers=4"
        )
    flags.OnlyWith("runner_option", "no pipeline is run", runner=True)


def beam_runner(args: Flags) -> "BeamRunner | None":
    """The runner of --runner, if it is given. Raises DataError: Beam is not installed, or has no such runner."""
    if args.runner is None:
        return None
    from lingvo_moe.tasks.text.preparing.beam import BeamRunner

    runner = BeamRunner(args.runner, tuple(args.runner_option))
    runner.Check()
    return runner


def define_known_faults_flag(flags: Flags) -> None:
    from lingvo_moe.core.engine import program_analysis  # imports NumPy

    kinds = program_analysis.ERROR, program_analysis.ACTIONS
    flags.DEFINE_enum("known_faults", *kinds, program_analysis.FLAG_HELP)


def define_model_flags(flags: Flags) -> None:
    """Defines --saved_model and --logdir, of which exactly one must be given."""
    flags.DEFINE_path("saved_model", None, "what tools.export wrote", portable=True, address=True)
    flags.DEFINE_path("logdir", None, "a run, as given to the trainer", portable=True, address=True)
    why = "give exactly one of --saved_model and --logdir"
    flags.Refuse(
        ["saved_model", "logdir"],
        lambda values: why * ((values["saved_model"] is None) is (values["logdir"] is None)),
    )


def define_logdir_flag(flags: Flags) -> None:
    """Defines --logdir, for a command that needs a run."""
    help = "the run, as given to the trainer"
    flags.DEFINE_path("logdir", None, help, required=True, portable=True, address=True)


def define_data_flag(flags: Flags) -> None:
    """Defines --data_dir, which data_dir reads, for a command that reads pairs."""
    help = "the corpus with the pairs (default: what RUN trained on)"
    flags.DEFINE_path("data_dir", None, help, address=True)


def define_quiet_flag(flags: Flags) -> None:
    """Defines --quiet, for a command that shows how far it is."""
    flags.DEFINE_boolean("quiet", False, "no progress on standard error")


SEARCH_FLAGS = ("beam_size", "max_source_length", "length_alpha", "max_length")
_TRANSLATION_FLAGS = ("max_length", "shortlist")
# The flags that an exported model does not take.
OF_RUNS = (*SEARCH_FLAGS, "shortlist", "weights", "checkpoint_step", "average_last", "use_ema")


def define_search_flags(flags: Flags, translates: bool = True) -> None:
    """Defines the flags of a search in a run, which are None where they are not given; after --logdir.

    These are OF_RUNS and the others of define_run_flags; only a command that translates has _TRANSLATION_FLAGS.
    """
    with flags.Section("with --logdir (an exported model has these inside)"):
        define_run_flags(flags)
        default = "4; 1 for a language model" if translates else "1"
        help = f"hypotheses; 1 is greedy search, the fastest (default: {default})"
        flags.DEFINE_integer("beam_size", None, help, BEAM_SIZE)
        help = f"tokens of a line; longer ones are cut (default: 256; {CHAT_LENGTH} of a model for chats)"
        flags.DEFINE_integer("max_source_length", None, help, LENGTH)
        help = "length normalisation, 0 for none (default: the run's task.length_alpha; 0.6 where it has none)"
        flags.DEFINE_float("length_alpha", None, help, LENGTH_ALPHA)
        if translates:
            help = "tokens of a translation at most (default: 256)"
            flags.DEFINE_integer("max_length", None, help, LENGTH)
            help = (
                "a file by tools.shortlist: scores only the tokens that a line's words are likely translated by, "
                "which is faster (default: all tokens)"
            )
            flags.DEFINE_path("shortlist", None, help)
        define_weights_flag(flags)
    of_runs = [name for name in OF_RUNS if translates or name not in _TRANSLATION_FLAGS]
    flags.OnlyWith(" ".join(of_runs), "it was fixed when the model was exported", logdir=True)
    flags.OnlyWith("trust_run", "an exported model names no classes", logdir=True)


def define_weights_flag(flags: Flags) -> None:
    """Defines --weights, None where it is not given."""
    help = "int8 rounds the weights of matrix products to 8 bits: faster and smaller on a CPU (default: float32)"
    flags.DEFINE_enum("weights", None, ("float32", "int8"), help)


def define_trust_flag(flags: Flags) -> None:
    """Defines --trust_run, for a command that opens a run."""
    flags.DEFINE_boolean("trust_run", False, TRUST_RUN_HELP)


def define_step_flag(flags: Flags) -> None:
    """Defines --checkpoint_step, None where it is not given."""
    default = f"'{BEST}'; '{NEWEST}' where none was evaluated, or several are averaged"
    help = f"the checkpoint of this step, or '{NEWEST}'; {BEST_HELP} (default: {default})"
    flags.DEFINE_step("checkpoint_step", help, (BEST, NEWEST))


def define_ema_flag(flags: Flags) -> None:
    """Defines --use_ema, for a command that reads a run's weights."""
    flags.DEFINE_boolean(
        "use_ema", False, "use the moving average of the weights, of a run with task.ema_decay"
    )


def define_run_flags(flags: Flags) -> None:
    """Defines --checkpoint_step and --average_last, None where not given, --use_ema and --trust_run."""
    define_trust_flag(flags)
    define_step_flag(flags)
    flags.DEFINE_integer(
        "average_last",
        None,
        "average the weights of this many checkpoints, up to that one (default: 1)",
        checks.SIZE,
    )
    define_ema_flag(flags)


def search_options(args: Flags, top_k: int = 1) -> "TranslateOptions":
    """Returns TranslateOptions from the flags of define_search_flags. Raises ValueError, naming the flag."""
    from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions

    options = {k: getattr(args, k) for k in SEARCH_FLAGS if getattr(args, k) is not None}
    if args.Values().get("temperature"):
        drawn = {k: getattr(args, k) for k in ("temperature", "top_k", "seed")}
        options["sampling"] = Sampling(**drawn)
    try:
        return TranslateOptions(**options, top_k=top_k, weights=args.weights or "float32")
    except checks.ParamError as e:
        raise ValueError(f"--{e}") from None


def chosen(args: Flags, logdir: str | None = None) -> "Chosen":
    """The Chosen weights of the flags of define_run_flags, in --logdir or another run."""
    from lingvo_moe.core.engine.checkpoints.run_weights import Chosen

    return Chosen(checkpoint_step(args, logdir), args.average_last or 1, args.use_ema)


def checkpoint_step(args: Flags, logdir: str | None = None) -> int | None:
    """Returns the step that --checkpoint_step names in --logdir, or in another run; None for the newest.

    Without the flag it is the best one, which is said, where the run knows it and not several are averaged.

    Raises:
        RunDirError: the best one of a run that was not evaluated while it trained.
    """
    run, step = RunDir(logdir or args.logdir), args.checkpoint_step
    if step == BEST:
        return run.BestStep("--checkpoint_step")
    if step is None and not args.Values().get("average_last"):
        best, newest = run.best_step, max(run.steps, default=None)
        if best != newest and best is not None:
            say(f"step {best}, the best one; --checkpoint_step={NEWEST} takes the last, {newest}")
            return best
    return None if step == NEWEST else step


def data_dir(args: Flags, inputs: Params) -> str:
    """Returns --data_dir; without it the directory that a run trained on, which is printed on standard error.

    Raises:
        ValueError: the run trained on no directory either.
    """
    if args.data_dir:
        return args.data_dir
    directory = inputs.data_dir if "data_dir" in inputs else ""
    if not directory:
        raise ValueError(f"--data_dir is needed: {args.logdir} trained on no directory of data")
    say(f"data: {directory}, which {args.logdir} trained on; --data_dir names another")
    return directory


def logdirs(args: Flags) -> list[str]:
    """The runs that --logdir names: one, or several with commas between them."""
    return [args.logdir] if os.path.isdir(args.logdir) else list(names(args.logdir))


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Silences what TensorFlow writes to stderr while it is imported; where an import fails, shows it after all."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Tools read checkpoints with JAX, which would look for a TPU first, with many lines.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with quiet(), paused_collection():
        yield


def load_tensorflow() -> None:
    """Imports TensorFlow and its text ops silently; makes log records of ours appear as plain lines."""
    logging.basicConfig(format="%(message)s")
    with quiet_imports():
        import_tensorflow()
        import tensorflow_text  # registers the ops that SavedModels of ours need

        del tensorflow_text


class CompilerProgress(Waiting):
    """Shows the current activity and its duration, at first the loading of the compiler."""

    def __init__(self) -> None:
        super().__init__("loading TensorFlow and the compiler", interval=5.0)
