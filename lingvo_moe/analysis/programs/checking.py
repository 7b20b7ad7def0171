"""Known faults: every compile for several devices asks whether XLA's partitioner gets the program wrong.

The module that the partitioner was given is written down by the compile itself, which takes a few percent
of its time. What is looked for is in analysis/programs/partitioner/known_faults.py. A program with a fault is not
kept in JAX's cache of compiled programs, so a program that comes from there has none.
"""

import functools
import hashlib
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from lingvo_moe.analysis.programs import hlo, partitioner
from lingvo_moe.analysis.programs.aot import partition_dump
from lingvo_moe.analysis.programs.aot.partition_dump import dump_options, read_before
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.partitioner import known_faults
from lingvo_moe.analysis.programs.partitioner.explanation import CodeLine, WrongNumbers
from lingvo_moe.core.console.command import say
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.compiled_cache import keeping_if
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.program_analysis import ERROR, OFF, WARN
from lingvo_moe.core.sharding import ShardingError

# Packages and a module whose code decides whether a program has a fault, beside this one.
_CODE: tuple[ModuleType, ...] = (hlo, partitioner, partition_dump)


def compile_checked(lowered: Any, options: dict[str, Any], program: Program, action: str) -> Any:
    """Compiles a program and looks for known faults in what its partitioner was given.

        action: ERROR to raise, WARN to say so.

    Raises:
        ShardingError: there is a fault and `action` is 'error'; names lines and remedies.
        EngineError: XLA does not write down what its partitioner was given, or in another form.
    """
    with tempfile.TemporaryDirectory(prefix="lingvo_moe_") as directory:
        find = functools.cache(lambda: find_faults(read_before(directory), program))

        def has_no_fault() -> bool:
            try:
                return not find()
            except EngineError:  # Raised again below, where JAX does not make a warning of it.
                return False

        try:
            with keeping_if(has_no_fault) as cache:
                compiled = lowered.compile(compiler_options=options | _dump(directory))
        except Exception:  # XLA's own checks refuse some of what its partitioner got wrong.
            if read_before(directory):
                act_on(find(), program.name, ERROR)
            raise
        if not cache.hit:  # The cache holds no program with a fault.
            act_on(find(), program.name, action)
    return compiled


def find_faults(text: str, program: Program) -> list[WrongNumbers]:
    """The operations of a program that XLA's partitioner is known to compute wrongly, with their lines.

    `text` is the module that the partitioner was given for it.

    Raises:
        EngineError: there is no text, or it cannot be read.
    """
    if not text:
        raise _unchecked(program, f"wrote nothing down, or {tempfile.gettempdir()} is full")
    try:
        faults = known_faults.known_faults(parse_module(text))
    except ValueError as e:  # an HloError, or a number that is none
        raise _unchecked(program, f"wrote a module that cannot be read ({e})") from e
    wrong = []
    for fault in faults:
        line = program.sources.Line(fault.op) if program.sources and fault.op else None
        wrong.append(WrongNumbers(fault, CodeLine(str(line), line.text) if line else None))
    return wrong


def _unchecked(program: Program, why: str) -> EngineError:
    return EngineError(
        f"program {program.name!r} cannot be checked for known faults of XLA's partitioner: jaxlib "
        f"{version('jaxlib')} {why}; --known_faults={OFF} runs it unchecked (or known_faults={OFF!r} of "
        f"shard_function)"
    )


def act_on(faults: list[WrongNumbers], program_name: str, action: str) -> None:
    """Raises ShardingError for faults where `action` is 'error', prints them where it is 'warn'.

    Those that depend on the values of arguments are printed in either case.
    """
    conditional = [wrong for wrong in faults if wrong.fault.is_conditional]
    try:
        known_faults.refuse(conditional, program_name, "may")
    except ShardingError as e:
        if action != OFF:
            say(f"warning: {e}")
    try:
        known_faults.refuse([wrong for wrong in faults if wrong not in conditional], program_name)
    except ShardingError as e:
        if action == ERROR:
            raise ShardingError(
                f"{e}\nknown_faults={WARN} runs it all the same (--known_faults of a command, an argument "
                f"of shard_function)"
            ) from None
        if action == WARN:
            say(f"warning: {e}")


def _dump(directory: str) -> dict[str, Any]:
    # No emitter has this name, so none writes anything down. It makes what was compiled under another
    # check, or under none, another entry of JAX's cache.
    return dump_options(directory) | {"xla_dump_emitter_re": f"checked_{_version()}"}


@functools.cache
def _version() -> str:
    """A digest of the code of the check, which changes with it."""
    digest = hashlib.sha256()
    for path in _files():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _files() -> Iterator[Path]:
    """The files of the check's code."""
    yield Path(__file__)
    for module in _CODE:
        path = Path(module.__file__ or "")
        yield from sorted(path.parent.glob("*.py")) if hasattr(module, "__path__") else [path]
