"""What the command lines have in common: flags, checks, a quiet TensorFlow, a translator from either source."""

import argparse
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lingvo_moe.core import checks
from lingvo_moe.core.class_names import TRUST_RUN_HELP
from lingvo_moe.core.command import run as run
from lingvo_moe.core.decode.ranges import BEAM_SIZE, LENGTH, LENGTH_ALPHA
from lingvo_moe.core.directories import Kind, check_addable, check_replaceable
from lingvo_moe.core.paths import PathError, check_local, check_portable
from lingvo_moe.core.quiet import quiet
from lingvo_moe.core.suggest import did_you_mean


def local_path(text: str) -> str:
    """The `type` of a flag that names files which Python reads or writes, or data; Parser checks it."""
    return text


def portable_path(text: str) -> str:
    """The `type` of a flag that names a run or an exported model; Parser checks it."""
    return text


_PATH_CHECKS: dict[Any, Callable[[str, str], None]] = {
    local_path: check_local,
    portable_path: check_portable,
}

# Flags that mean the same in every command that has them; Parser checks them.
_SHARED = {
    "average_last": checks.SIZE,
    "beam_size": BEAM_SIZE,
    "checkpoint_step": checks.COUNT,
    "length_alpha": LENGTH_ALPHA,
    "max_length": LENGTH,
    "max_source_length": LENGTH,
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations and says what a misspelt flag might have been."""

    def __init__(self, **kwargs: Any):
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, which reports a missing flag before a misspelt one."""
        known = [s for a in self._actions for s in a.option_strings if s.startswith("--")]
        for argument in sys.argv[1:] if args is None else args:
            flag = argument.partition("=")[0]
            if flag.startswith("--") and flag != "--" and flag not in known:
                self.error(f"no flag {flag}{did_you_mean(flag, known)}")
        parsed = super().parse_args(args, namespace)
        for action in self._actions:
            check = _PATH_CHECKS.get(action.type)
            value = getattr(parsed, action.dest, None)
            if check and value:
                try:
                    for path in value if isinstance(value, list) else [value]:
                        check(path, action.option_strings[0])
                except PathError as e:
                    self.error(str(e))
        check_numbers(self, parsed, **{k: check for k, check in _SHARED.items() if k in parsed})
        return parsed


def names(text: str) -> tuple[str, ...]:
    """The value of a flag that takes names with commas between them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace, **ranges: Any) -> None:
    """Ends the process, with a line that names the flag, where a number is not in its range, a Check."""
    try:
        checks.check_fields(args, ranges)
    except checks.ParamError as e:
        parser.error(f"--{e}")


def check_at_least(parser: argparse.ArgumentParser, args: argparse.Namespace, **least: int) -> None:
    """The same for integers, and finite numbers, that have to be at least so large."""
    ranges = {
        name: checks.Number(n) if isinstance(getattr(args, name), float) else checks.Integer(n)
        for name, n in least.items()
    }
    check_numbers(parser, args, **ranges)


def check_output_file(path: str | os.PathLike, flag: str = "--output") -> None:
    """Raises ValueError, naming the flag, unless a file can be written at `path`, and changes no run, data or model."""
    check_local(path, flag)
    if os.path.isdir(path):
        raise ValueError(f"{flag}={path} is a directory; name a file")
    parent = Path(os.path.realpath(path)).parent
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device
        if not os.access(path, os.W_OK):
            raise ValueError(f"{flag}={path}: no permission to write to it")
    elif not parent.is_dir():
        raise ValueError(f"{flag}={path}: there is no directory {parent}")
    elif not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{flag}={path}: no permission to write in {parent}")
    check_addable(path, flag)


def run_compiler(name: str, run: Callable[[Any], int], args: Any) -> int:
    """The status of `run(args)`, a tool that compiles and writes its files last; its errors as one message.

    Ctrl-C ends the process: the compiler cannot be stopped and would go on in its thread.
    """
    try:
        return run(args)
    except (ValueError, OSError) as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; nothing was written", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)


def check_output_directory(
    path: str | os.PathLike, flag: str = "--output", replaces: Kind | None = None
) -> None:
    """Raises ValueError, naming the flag, unless `path` is or can become a directory to write in.

    Args:
        path: of the directory.
        flag: that named it.
        replaces: what the command makes, and may put in the place of an older one; None for one that adds files.
    """
    check_local(path, flag)
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_dir():
        raise ValueError(f"{flag}={path} is a file; name a directory")
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{flag}={path}: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{flag}={path}: no permission to write in {place}")
    if replaces is not None:
        check_replaceable(path, replaces, flag)
    else:
        check_addable(path, flag)


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    """--beam_size, --max_length, --max_source_length, --length_alpha, --shortlist, --weights and the run's; unset ones
    are None."""
    group = parser.add_argument_group("with --logdir (an exported model has these inside)")
    add_run_flags(group)
    group.add_argument(
        "--beam_size", type=int, help="hypotheses; 1 is greedy, fastest (default: 4)"
    )
    group.add_argument("--max_length", type=int, help="tokens of a translation (default: 256)")
    group.add_argument(
        "--max_source_length", type=int, help="tokens of a line; the rest is cut (default: 256)"
    )
    group.add_argument(
        "--length_alpha", type=float, help="length normalisation, 0 for none (default: 0.6)"
    )
    group.add_argument(
        "--shortlist",
        type=local_path,
        metavar="FILE",
        help="of tools.shortlist: score only what a line's words may be translated by, faster (default: all)",
    )
    group.add_argument(
        "--weights",
        choices=("float32", "int8"),
        help="int8: those of products in 8 bits, on a CPU faster and smaller, rounded (default: float32)",
    )


def add_trust_flag(parser: Any) -> None:
    """--trust_run, for a command that opens a run."""
    parser.add_argument("--trust_run", action="store_true", help=TRUST_RUN_HELP)


def add_run_flags(parser: Any) -> None:
    """--checkpoint_step and --average_last, None where unset, and --trust_run."""
    add_trust_flag(parser)
    parser.add_argument(
        "--checkpoint_step", type=int, help="which checkpoint (default: the newest)"
    )
    parser.add_argument(
        "--average_last",
        type=int,
        metavar="N",
        help="the mean of the weights of the last N checkpoints up to it (default: 1, itself)",
    )


_SEARCH_FLAGS = ("beam_size", "max_length", "max_source_length", "length_alpha")


def search_options(args: argparse.Namespace, top_k: int = 1) -> Any:
    """TranslateOptions from the flags of add_search_flags. Raises ValueError, naming the flag."""
    from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions

    given = {k: getattr(args, k) for k in _SEARCH_FLAGS if getattr(args, k) is not None}
    try:
        return TranslateOptions(**given, top_k=top_k)
    except checks.ParamError as e:
        raise ValueError(f"--{e}") from None


def checkpoint(args: argparse.Namespace) -> tuple[int | None, int]:
    """Which step, and how many to average, from the flags of add_run_flags."""
    return args.checkpoint_step, args.average_last or 1


def load_from_run(args: argparse.Namespace, options: Any) -> tuple[Any, dict[str, Any]]:
    """`load_translator` with the flags of add_search_flags, for --logdir. Raises ValueError, OSError."""
    from lingvo_moe.tasks.mt.serving.export import load_translator

    weights = args.weights or "float32"
    return load_translator(
        args.logdir, options, *checkpoint(args), args.shortlist, weights, args.trust_run
    )


def open_translator(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The Translator of --logdir or the SavedTranslator of --saved_model, and what it is.

    Raises:
        ValueError: nothing there, a damaged checkpoint, or a flag that does not go with --saved_model.
    """
    if args.saved_model:
        for name in ("checkpoint_step", "average_last", "shortlist", "weights", *_SEARCH_FLAGS):
            if getattr(args, name) is not None:
                raise ValueError(
                    f"--{name} was fixed when {args.saved_model} was exported; use it with --logdir"
                )
        if args.trust_run:
            raise ValueError("--trust_run goes with --logdir: an exported model names no classes")
        from lingvo_moe.tasks.mt.serving.saved_translator import SavedTranslator

        return SavedTranslator(args.saved_model), {"saved_model": str(args.saved_model)}
    translator, about = load_from_run(args, search_options(args))
    return translator, {"logdir": str(args.logdir), **about}


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Imports TensorFlow without the notes that it writes to stderr; what an import that fails wrote is shown."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Tools read checkpoints with JAX, which would look for a TPU first, and tell at length.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with quiet():
        yield


def load_tensorflow() -> None:
    """Imports TensorFlow and its text ops, quietly; warnings of ours are sentences, not log records."""
    logging.basicConfig(format="%(message)s")
    with quiet_imports():
        import tensorflow
        import tensorflow_text  # registers the ops that SavedModels of ours need

        del tensorflow, tensorflow_text


class Progress:
    """Shows what is being done and for how long; the work runs in a thread, so that Ctrl-C is heard at once."""

    def __init__(self) -> None:
        from lingvo_moe.core.engine.progress import LineProgress

        self._lines = LineProgress()
        self._doing, self._since = "", time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.Close()

    def __call__(self, doing: str) -> None:
        self._doing, self._since = doing, time.monotonic()
        self._lines(f"{doing} ...")

    def Watch(self, work: Any) -> Any:
        """What `work()` returns, or raises."""
        result: dict[str, Any] = {}

        def run() -> None:
            try:
                result["value"] = work()
            except BaseException as e:
                result["error"] = e

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(timeout=1.0)
            if thread.is_alive():
                self._lines(f"{self._doing} ... {time.monotonic() - self._since:.0f} s")
        if "error" in result:
            raise result["error"]
        return result["value"]
