"""The result of compiling ahead of time: the compiler's results for a program, or why it does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lingvo_moe.core.console import units
from lingvo_moe.core.engine.base import EngineError


class Holder(NamedTuple):
    """A large buffer, live at the peak, of a program that does not fit."""

    bytes: int  # its size, including padding
    op_name: str  # the operation that it comes from, as far as the compiler knows; may be empty
    shape: str  # HLO's, e.g. 'f32[512,1024]{1,0:T(8,128)}'


@dataclass(eq=False)
class OutOfMemory(EngineError):
    """A program that needs more memory than a device has."""

    program: str  # its name
    topology: str
    needed_bytes: int  # on one device, as exact as the compiler says it
    limit_bytes: int  # the bytes that a device has for a program, likewise
    # The largest buffers, largest first; empty if the compiler listed none, as when it rejects a program at once.
    holders: Sequence[Holder] = ()
    compiler_message: str = ""
    hlo_text: str = ""  # the scheduled module that did not fit; '' if the compiler left none

    def __str__(self) -> str:
        needed, limit = self.needed_bytes, self.limit_bytes
        return (
            f"program {self.program!r} does not fit {self.topology}: it needs {units.size(needed)} on each device, "
            f"which has {units.size(limit)}; it misses by {units.size(needed - limit)}"
        )


@dataclass(frozen=True)
class AotResult:
    """The compiler's results for a program, for one device."""

    hlo_text: str  # the scheduled module
    # Bytes of arguments, outputs, aliased, temporaries, code, peak (the compiler's figure for the most live bytes of
    # arguments, outputs and temporaries), and needed (on a device, by all of it).
    memory: dict[str, int]
    # XLA's cost analysis; a loop's body is counted once. Empty if the compiler gives none.
    cost: dict[str, float]
    compile_seconds: float  # time to compile
    host_peak_bytes: int  # peak memory of this process so far
    partitioner_input: str = ""  # the module that the SPMD partitioner was given; '' for one device
