"""The interface of a compiler that needs no device: it describes devices and says what does not fit them."""

import abc
import os
from collections.abc import Mapping
from typing import Any

import jax

from lingvo_moe.analysis.programs.aot.aot_result import AotResult, OutOfMemory
from lingvo_moe.core.engine.base import EngineError


class Compiler(abc.ABC):
    """Compiles programs for devices of one kind that this machine does not have."""

    label: str  # its name in messages, e.g. 'the TPU compiler'
    platform: str  # JAX's name of the platform to lower for
    environment: tuple[str, ...]  # variables whose flags change what is compiled

    @abc.abstractmethod
    def Devices(self, topology: str) -> tuple[Any, ...]:
        """The devices of a machine, as JAX lists them.

        Raises EngineError: the compiler is not installed, or knows no such machine.
        """

    @abc.abstractmethod
    def Versions(self) -> dict[str, str]:
        """The versions of the packages that hold the compiler. Raises EngineError without them."""

    def Mark(self, topology: str) -> str:
        """A text that identifies the description of a machine besides its name; '' where the compiler has its own."""
        return ""

    def Flags(self) -> str:
        """The flags that the environment sets for the compiler."""
        return "".join(os.environ.get(name, "") for name in self.environment)

    def Options(self) -> dict[str, bool]:
        """The options that programs get when they run on such devices; {} where it has its own."""
        return {}

    def Refusal(self, program: str, topology: str, message: str, lowered: Any) -> EngineError:
        """The error for a program that the compiler refused.

        `message` is the compiler's, `lowered` the `jax.stages.Lowered` that was refused.
        """
        why = first_line(message)
        return EngineError(f"{self.label} refuses program {program!r} for {topology}: {why}")

    def Needed(self, memory: Mapping[str, int]) -> int:
        """Bytes that a program needs on a device, from the sizes in `AotResult.memory`."""
        return memory["peak"] + memory["code"]

    def Misfit(self, program: str, topology: str, result: AotResult) -> OutOfMemory | None:
        """The error for a program that was compiled and needs more memory than a device has; None if it fits."""
        return None


def use_cpu() -> None:
    """Keeps JAX from looking for accelerators of this machine."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not jax.config.jax_platforms:  # JAX was imported before the variable was set
        jax.config.update("jax_platforms", "cpu")


def first_line(text: str) -> str:
    """The first line of a compiler's message."""
    lines = text.strip().splitlines()
    return lines[0] if lines else ""
