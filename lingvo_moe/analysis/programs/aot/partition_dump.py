"""Reads the files that XLA writes in a compile: the module before and after its SPMD partitioner."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The pass is called spmd-partitioning, on TPUs tpu-spmd-partitioning.
_BEFORE = "*.before_*spmd-partitioning.txt"
_AFTER = "*.after_*spmd-partitioning.before_*.txt"
_FINAL = ("*after_optimizations.txt", "*after_codegen.txt")


@dataclass(frozen=True)
class Partitioned:
    """A program's module at three moments of its compilation."""

    before: str  # after sharding propagation: whole shapes, a sharding on every instruction
    after: str  # after partitioning: one device's shapes, with collectives
    final: str  # the module as it runs; '' where the compiler did not come so far


def dump_options(directory: str | Path) -> dict[str, Any]:
    """The compile options with which XLA writes these modules into a directory."""
    return {
        "xla_dump_to": str(directory),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_pass_re": ".*spmd-partitioning",
    }


def read_dump(directory: str | Path) -> Partitioned | None:
    """The largest module in a directory, or None where none was partitioned."""
    directory = Path(directory)
    after = _largest(directory, _AFTER)
    if after is None:
        return None
    module = after.name.split(".")[0]
    before = _largest(directory, f"{module}{_BEFORE}")
    finals = [_largest(directory, f"{module}{pattern}") for pattern in _FINAL]
    final = next((path for path in finals if path is not None), None)
    if before is None:
        return None
    return Partitioned(_text(before), _text(after), _text(final) if final else "")


def read_before(directory: str | Path) -> str:
    """The module that the partitioner was given, '' where none was partitioned."""
    before = _largest(Path(directory), _BEFORE)
    return _text(before) if before else ""


def _largest(directory: Path, pattern: str) -> Path | None:
    return max(directory.glob(pattern), key=lambda path: path.stat().st_size, default=None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
