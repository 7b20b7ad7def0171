"""Caches ahead-of-time compilations on disk: compiling a large step takes a minute, reading it back a moment.

An entry holds the compiler's results (HLO text, sizes and timings). Its name is made of the hashes of the program
and of its operations' names, the topology and the compiler's version. It holds nothing of the planner's, so a newer
planner needs no new compile. A damaged entry, or one under another's name, is compiled again.
"""

import dataclasses
import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path

from lingvo_moe.analysis.programs.aot.aot import AotResult
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.files.paths import user_cache_dir
from lingvo_moe.core.files.sealed import read_sealed, write_sealed

_FORMAT = 2
_log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """The directory of compiled programs: lingvo_moe/plans in the user's cache directory."""
    return user_cache_dir() / "plans"


def cached(
    program: Program,
    topology_name: str,
    compiler: str,
    cache_dir: Path | None,
    compile_program: Callable[[], AotResult],
) -> AotResult:
    """Returns the compiler's results for a program, from the cache if it was compiled before.

    `compiler` is `aot.compiler_identity()`. Nothing is cached without a `cache_dir`, nor are exceptions of
    `compile_program`.

    Raises:
        OSError: the entry cannot be written.
    """
    if cache_dir is None:
        return compile_program()
    machine = topology_name.replace(":", "-").replace("*", "_")
    hashes = f"{program.hash[:32]}-{program.names_hash[:16]}"
    path = cache_dir / f"{hashes}-{machine}-{compiler}.aot"
    result = _read(path)
    if result is None:
        result = compile_program()
        data = {"format": _FORMAT, **dataclasses.asdict(result)}
        write_sealed(path, gzip.compress(json.dumps(data).encode(), 6))
    return result


def _read(path: Path) -> AotResult | None:
    """The entry; None if there is none, or, with a warning, if it is damaged."""
    warning = "compiled programs: %s; the program is compiled again"
    body = read_sealed(path, lambda why: _log.warning(warning, why))
    if body is None:
        return None
    data = json.loads(gzip.decompress(body))
    return AotResult(**data) if data.pop("format") == _FORMAT else None
