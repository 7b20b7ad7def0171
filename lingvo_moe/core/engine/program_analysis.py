"""The two questions that engines ask the analysis of programs, which they do not import: does XLA's partitioner get a
program wrong in a known way, and which collectives does the compiled program have?

The module that answers has its name in `lingvo_moe/__init__.py`. So it is there whichever module of the package a user
imports, and no program for several devices is compiled unchecked, but where the user says so.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lingvo_moe.core.config import checks
from lingvo_moe.core.sharding import ShardingError

if TYPE_CHECKING:  # it imports JAX
    from lingvo_moe.core.engine.lowering.program import Program

# What to do with a program that has a fault.
ERROR, WARN, OFF = "error", "warn", "off"
ACTIONS = (ERROR, WARN, OFF)
FLAG_HELP = (
    "what to do with a program that XLA's partitioner is known to compute wrongly: error, warn, or off, which does "
    "not look for any"
)


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program."""

    kind: str  # e.g. 'all-reduce'
    name: str  # the name of the HLO instruction
    # Dtype and dimensions of its results on one device, e.g. (('f32', (8, 16)),).
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    num_bytes: int  # bytes of these results. A loop's body is counted once
    op_name: str = ""  # the model's operation that it comes from, if XLA names it


class ProgramAnalysis(Protocol):
    """A module that answers."""

    def compile_checked(
        self, lowered: Any, options: dict[str, Any], program: "Program", action: str
    ) -> Any:
        """The compiled program, after known faults were looked for in it; see analysis/programs/checking.py."""

    def parse_collectives(self, hlo_text: str) -> list[Collective]:
        """All collectives of a compiled module that devices carry out themselves, in order of appearance."""


def program_analysis() -> ProgramAnalysis:
    """The module that the package names."""
    module: Any = importlib.import_module(importlib.import_module("lingvo_moe").PROGRAM_ANALYSIS)
    return module


def check_action(action: str, name: str = "known_faults") -> None:
    """Raises ShardingError, naming the flag or argument `name`, unless `action` is one of ACTIONS."""
    checks.check_one_of(name, action, ACTIONS, ShardingError)
