"""The trainer's flags."""

import os
from collections.abc import Sequence

from lingvo_moe.analysis.search.strategies.strategy_file import AUTO, LAYOUTS
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.class_names import TRUST_RUN_HELP
from lingvo_moe.core.console.flags import BEST_HELP, Flags
from lingvo_moe.core.console.tensorflow_import import import_tensorflow
from lingvo_moe.core.engine.engines import ENGINES, engine_class
from lingvo_moe.core.engine.program_analysis import ACTIONS, ERROR, FLAG_HELP
from lingvo_moe.core.job import launchers
from lingvo_moe.core.job.job_flags import define_devices_flags, define_job_flags
from lingvo_moe.core.job.launchers import JobError

_ABOUT = """Trains an experiment, resumes a run, or shows what an experiment is.

    python -m lingvo_moe.trainer --model=mt.M4Demo --data_dir=DATA --logdir=RUN
    python -m lingvo_moe.trainer --model=mt.M4Demo --data_dir=DATA --logdir=RUN --num_devices=8
    python -m lingvo_moe.trainer --model=mt.M4MoE2048E36L --mode=inspect_model

The first runs on all GPUs or TPUs, or on the CPU; the second uses a CPU as eight devices. Ctrl-C saves; the same
command resumes. DATA is a directory that tools.prepare wrote, docs/experiments.md lists the experiments, and
docs/guide.md explains every step from data to a server.
"""
_STRATEGY_HELP = "a file that tools.parallelize wrote; --model_params_override may change it"
_LAYOUT_HELP = "instead of --mesh and of the splits, a layout by name over all devices; auto: the fastest of the others"
_AUTO_HELP = (
    "auto: search one for the devices here, by measuring; a run that is resumed keeps its own"
)
MODES = ("sync", "eval", "inspect_model", "inspect_params")


def define_flags() -> Flags:
    """Returns the trainer's flags, to be parsed."""
    flags = Flags("python -m lingvo_moe.trainer", _ABOUT, prefix="error")
    help = "the experiment, e.g. mt.M4Demo or mt.M4MoE2048E36L (default: that of the run in --init_from)"
    define_experiment_flag(flags, help, required=False)
    flags.DEFINE_enum(
        "mode",
        "sync",
        MODES,
        "train or resume (sync), score the checkpoints of --logdir while a trainer writes them (eval; it takes the "
        "trainer's flags and runs on the CPU, with --num_devices over so many), print all variables, or print all "
        "parameters with their help",
    )
    flags.DEFINE_override(
        "path=value;path=value, e.g. task.num_experts=16; may be given several times; --mode=inspect_params prints all "
        "paths"
    )
    flags.DEFINE_integer("max_steps", None, "shorthand for train.max_steps", checks.COUNT)
    # The paths are checked with those in the parameters, once it is known that the job trains.
    flags.DEFINE_string(
        "data_dir", "", "what tools.prepare wrote, or <lang>.tsv[.gz] files; see docs/data.md"
    )
    with flags.Section("the run"):
        _define_run_flags(flags)
    with flags.Section("the machine"):
        _define_machine_flags(flags)
    _declare_effects(flags)
    return flags


def _declare_effects(flags: Flags) -> None:
    """Declares which flags go with which mode; --mode=eval takes those of the trainer whose run it scores."""
    why = "--model is required, unless --init_from names a run; --model alone lists all"
    flags.Refuse(["model", "init_from"], lambda values: why * (not any(values.values())))
    flags.OnlyWith("eval_lines once", mode="eval")
    flags.OnlyWith("max_minutes restart elastic", mode="sync")
    flags.OnlyWith("init_from_step init_from_state trust_run", init_from=True)
    flags.OnlyWith(
        "logdir init_from engine known_faults verify coordinator_address num_processes process_id",
        mode=("sync", "eval"),
    )
    flags.OnlyWith("layout", mode=("sync", "eval"), elastic=False)
    flags.OnlyWith("dump_programs", mode="sync")
    flags.OnlyWith("num_devices mesh", mode=("sync", "eval", "inspect_model"))
    flags.OnlyWith("max_steps data_dir", mode=("sync", "eval", "inspect_params"))


def define_experiment_flag(flags: Flags, help: str, required: bool = True) -> None:
    """Defines --model, which lists the experiments where it is given without a value."""
    default = None if required else ""
    flags.DEFINE_string("model", default, f"{help}; --model alone lists them", required=required)
    flags.WhenAlone("model", show_experiments)


def show_experiments() -> None:
    """Prints the name of each experiment, with a sentence about it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import_tensorflow()
    from lingvo_moe.core.config import registry

    names = registry.AllNames()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {registry.About(name)}")


def define_strategy_flag(flags: Flags) -> None:
    """Defines --strategy for a command that takes a strategy file and does not search."""

    def read(text: str) -> str:
        if text == AUTO:
            raise ValueError(
                "only the trainer searches, for the devices that it runs on; run python -m tools.parallelize "
                "--model=... --topology=... --output=FILE, then give --strategy=FILE"
            )
        return text

    flags.DEFINE_parsed("strategy", "", _STRATEGY_HELP, read)
    define_layout_flag(flags)


def define_layout_flag(flags: Flags) -> None:
    """Defines --layout, which chooses what --mesh and --strategy would."""
    flags.DEFINE_enum("layout", "", LAYOUTS, _LAYOUT_HELP)
    flags.OnlyWith("layout", "a layout sets the mesh and the splits", mesh=False, strategy=False)


def _define_run_flags(flags: Flags) -> None:
    flags.DEFINE_string("logdir", "", "directory of the run: checkpoints, summaries, vocabularies")
    flags.DEFINE_boolean(
        "restart", False, "begin at step 0 although --logdir holds a run, which is moved aside"
    )
    flags.DEFINE_string(
        "init_from",
        "",
        "begin with the weights of another run's newest checkpoint. Embedding rows are matched by vocabulary piece; "
        "new rows and the optimizer state start fresh. Vocabularies may differ, sizes of layers may not",
    )
    flags.DEFINE_step("init_from_step", f"another checkpoint of that run, by its step; {BEST_HELP}")
    flags.DEFINE_boolean(
        "init_from_state",
        False,
        "with --init_from: go on where that run stood, with its optimizer's state, its step and its place in the data",
    )
    flags.DEFINE_boolean("trust_run", False, f"with --init_from: {TRUST_RUN_HELP}")
    flags.DEFINE_float(
        "max_minutes",
        None,
        "stop after so many minutes since the start of this command, as after Ctrl-C but with status 0",
        checks.POSITIVE,
    )
    flags.DEFINE_integer(
        "eval_lines",
        None,
        "with --mode=eval: held-out lines of each language to translate (default: 50)",
        checks.SIZE,
    )
    flags.DEFINE_boolean("once", False, "with --mode=eval: score the newest checkpoint and stop")


def _define_machine_flags(flags: Flags) -> None:
    flags.DEFINE_enum(
        "engine",
        None,
        tuple(ENGINES),
        "what runs the program; see the README (default: tf_graph on one CPU device without --mesh, else pjrt)",
    )
    define_devices_flags(flags)
    flags.DEFINE_string("strategy", "", f"{_STRATEGY_HELP}. {_AUTO_HELP}")
    define_layout_flag(flags)
    flags.DEFINE_enum("known_faults", ERROR, ACTIONS, FLAG_HELP)
    flags.DEFINE_string(
        "dump_programs",
        "",
        "a directory for the texts of each program that is compiled: StableHLO with shardings, and XLA's compiled HLO",
    )
    flags.DEFINE_boolean(
        "verify",
        False,
        "first run a small copy of the step over the mesh and on one device, and compare; for a new mesh or sharding",
    )
    define_job_flags(flags)
    flags.DEFINE_boolean(
        "elastic",
        False,
        "of several processes: when one but process 0 is lost, the others go on from the newest checkpoint",
    )


def _check_engine(args: Flags) -> None:
    """Ends the process with status 2 where a flag asks for what the engine of --engine cannot do."""
    needs = {"known_faults": "PJRT", "num_processes": "SEVERAL_PROCESSES", "dump_programs": "PJRT"}
    for name, ability in needs.items():
        value = args[name].value
        if args.engine and value != args[name].default:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
            if not getattr(engine_class(args.engine), ability):
                args.Fail(
                    f"--{name}={value} goes with --engine=pjrt, not with --engine={args.engine}"
                )


def parse_flags(argv: Sequence[str] | None = None) -> Flags:
    """Returns the flags' values as attributes. Ends the process with status 2 after a mistake.

    The count of processes and the number of this one are the launcher's where they are not given; only training and
    --mode=eval are a job of several.
    """
    args = define_flags().Parse(argv)
    _check_engine(args)
    count, number = 1, 0
    if args.mode in ("sync", "eval"):
        try:
            launch = launchers.find()
            if launch is not None and launch.of_machine and args.mode == "eval":
                launch = None  # the trainer's, beside which it may be alone
            count, number = launchers.place(
                launch, args.coordinator_address, args.num_processes, args.process_id
            )
        except JobError as e:
            args.Fail(str(e))
        alone = args.engine is not None and not engine_class(args.engine).SEVERAL_PROCESSES
        if launch is not None and count > 1 and alone and args.mode == "sync":
            args.Fail(
                f"--engine={args.engine}: trains in one process, and {launch.launcher} has started {count}; "
                "several need --engine=pjrt"
            )
        if args.elastic and count == 1:
            args.Fail("--elastic: goes with several processes, and this job has one")
    return args.With(num_processes=count, process_id=number)
