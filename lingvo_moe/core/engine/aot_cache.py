"""Compiled programs, kept on disk: compiling a large step for a pod takes a minute, reading it back a moment.

An entry holds what the compiler gave (its HLO text, sizes and timings), under the hashes of the program and
of its operations' names, the topology and the compiler's version: never what the planner makes of it, so
that a better planner needs no new compile.
"""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

from lingvo_moe.core import files
from lingvo_moe.core.engine.aot import AotResult
from lingvo_moe.core.engine.program import Program
from lingvo_moe.core.user_cache import user_cache_dir

_FORMAT = 1


def default_cache_dir() -> Path:
    """Where compiled programs are kept: lingvo_moe/plans in the user's cache directory."""
    return user_cache_dir() / "plans"


def cached(
    program: Program,
    topology_name: str,
    compiler: str,
    cache_dir: Path | None,
    compile_program: Callable[[], AotResult],
) -> AotResult:
    """What compiling gives, read from disk where it was compiled before.

    Args:
        program: what is compiled.
        topology_name: for which machine.
        compiler: `aot.compiler_identity()`.
        cache_dir: None: keep nothing.
        compile_program: compiles, where there is no entry. What it raises is not kept.
    """
    if cache_dir is None:
        return compile_program()
    machine = topology_name.replace(":", "-")
    hashes = f"{program.hash[:32]}-{program.names_hash[:16]}"
    path = cache_dir / f"{hashes}-{machine}-{compiler}.json.gz"
    result = _read(path)
    if result is None:
        result = compile_program()
        cache_dir.mkdir(parents=True, exist_ok=True)
        data = {"format": _FORMAT, **dataclasses.asdict(result)}
        files.write_atomic(path, gzip.compress(json.dumps(data).encode(), 6))
    return result


def _read(path: Path) -> AotResult | None:
    """The entry, or None where there is none, or none that can be used."""
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        if data.pop("format") != _FORMAT:
            return None
        return AotResult(**data)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError):
        return None
