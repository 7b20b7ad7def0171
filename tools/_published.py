"""--from: a published checkpoint in the place of --logdir, imported once, or of --model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags, join_overrides
from lingvo_moe.core.console.waiting import LineProgress
from lingvo_moe.core.files.files import only_one
from lingvo_moe.core.files.paths import user_cache_dir
from lingvo_moe.core.files.store import check_place
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.version import VERSION

_HELP = "a published checkpoint, a directory, here or in a bucket, or a GGUF (docs/importing.md), in the place of"


def define_from_flag(flags: Flags) -> None:
    """Defines --from, which sets --logdir to the run that `imported` makes."""
    _define(flags, "logdir", f"{_HELP} --logdir; it is imported once, into the user's cache")


def define_from_model_flag(flags: Flags) -> None:
    """Defines --from, which sets --model, for `name_experiment`."""
    _define(flags, "model", f"{_HELP} --model; without its weights")


def _define(flags: Flags, other: str, help: str) -> None:
    def read(text: str) -> str:
        check_place(text, "--from", portable=False)
        if "saved_model" in flags and flags["saved_model"].present:
            raise ValueError("goes without --saved_model")
        flags[other].value = _cached_run(text) if other == "logdir" else text
        return text

    def why(values: Mapping[str, Any]) -> str:
        both = flags[other].present and values["from"] is not None
        return f"give one of --from and --{other}" * both

    flags.DEFINE_parsed("from", None, help, read)
    flags.Refuse(["from", other], why)


def _cached_run(path: str) -> str:
    """The run of a checkpoint in the user's cache: another one where a file has changed, or this package."""
    from lingvo_moe.core.weights.open_source import state_of

    return str(
        user_cache_dir() / "imported" / f"{Path(path).resolve().name}-{VERSION}-{state_of(path)}"
    )


def imported(args: Flags) -> None:
    """Imports --from into its run, unless that is there. Loads TensorFlow before; raises as import_checkpoint."""
    if (path := args["from"].value) is None or RunDir(args.logdir).steps:
        return
    from lingvo_moe.tasks.families.importing import import_checkpoint, open_published

    published = open_published(path)
    say(f"importing {path} into {args.logdir}, once")
    with only_one(Path(args.logdir)), LineProgress() as progress:
        if not RunDir(args.logdir).steps:  # another command may have done it meanwhile
            import_checkpoint(published, Path(args.logdir), progress)


def name_experiment(args: Flags) -> None:
    """Sets --model, and the override before that of the flag, to those of --from. Raises WeightsError, DataError."""
    if (path := args["from"].value) is None:
        return
    from lingvo_moe.tasks.families.importing import published_model

    experiment, override = published_model(path)
    args["model"].value = experiment
    args["model_params_override"].value = join_overrides(override, args.model_params_override or "")
