"""The candidates of an experiment on a machine, with their estimates."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lingvo_moe.core.hyperparams import Params
from lingvo_moe.core.offload import OffloadError
from lingvo_moe.core.planner.machine import Machine
from lingvo_moe.core.strategies.candidate import OFFLOADS, Candidate, candidates
from lingvo_moe.core.strategies.estimates import Correction, Estimate, Estimator
from lingvo_moe.core.strategies.host import Host
from lingvo_moe.core.strategies.layout import layouts
from lingvo_moe.core.strategies.state_bytes import StateBytes
from lingvo_moe.core.strategies.workload import Workload

NO_OFFLOAD: tuple[str, ...] = ()


@dataclass
class Estimates:
    """Candidates that were estimated.

    Attributes:
        kept: those that may fit, in a fixed order.
        least: the one that needs the least memory, and its estimate; None if there was none.
        count: how many there were.
        seconds: how long estimating them took.
    """

    kept: dict[Candidate, Estimate]
    least: tuple[Candidate, Estimate] | None
    count: int
    seconds: float

    def Fastest(self) -> float | None:
        """The least seconds of a step, uncorrected; None where nothing may fit."""
        return min((each.Seconds(Correction()) for each in self.kept.values()), default=None)


class Space:
    """The search space.

    Args:
        params: of the experiment.
        work: of its step.
        machine: the devices.
        dtypes: of activations that are allowed; '' is the experiment's own.
    """

    def __init__(
        self, params: Params, work: Workload, machine: Machine | Host, dtypes: Sequence[str] = ("",)
    ):
        self._params, self._work, self._machine = params, work, machine
        own = params.task.fprop_dtype or params.task.dtype
        self._itemsizes = {d: _itemsize(d or own) for d in dtypes}
        self._states: dict[tuple[str, tuple[str, ...]], StateBytes] = {}
        self.estimator = Estimator(work, self._State, machine, self._itemsizes)

    def _State(self, dtype: str, offload: tuple[str, ...]) -> StateBytes:
        key = dtype, offload
        if key not in self._states:
            narrow = self._itemsizes[dtype] == 2
            self._states[key] = StateBytes(self._params, narrow, offload)
        return self._states[key]

    def Estimated(self, memory: int) -> Estimates:
        """All candidates, with those that offload only where no other one fits by its estimate.

        Args:
            memory: bytes that a program may use on a device.
        """
        started = time.monotonic()
        found = Estimates({}, None, 0, 0.0)
        self._Add(found, self._Candidates((NO_OFFLOAD,)), memory)
        fit = any(each.Bytes(Correction()) <= memory for each in found.kept.values())
        if not fit and not isinstance(self._machine, Host):
            self._Add(found, self._Candidates(list(filter(self._Frees, OFFLOADS))), memory)
        found.seconds = time.monotonic() - started
        return found

    def _Frees(self, offload: tuple[str, ...]) -> bool:
        try:
            self._State("", offload)
        except OffloadError:
            return False
        return True

    def _Candidates(self, offloads: Sequence[tuple[str, ...]]) -> Iterator[Candidate]:
        each = layouts(self._work, self._machine.num_devices)
        return candidates(each, self._params, self._work, tuple(self._itemsizes), offloads)

    def _Add(self, to: Estimates, found: Iterator[Candidate], memory: int) -> None:
        for candidate in found:
            to.count += 1
            estimate = self.estimator.Of(candidate)
            if to.least is None or estimate.least < to.least[1].least:
                to.least = candidate, estimate
            if estimate.least <= memory and self._HostHolds(estimate):
                to.kept[candidate] = estimate

    def _HostHolds(self, estimate: Estimate) -> bool:
        """Whether a host can hold what its devices offload; it can, where its memory is not known."""
        if not estimate.hosted or isinstance(self._machine, Host):
            return True
        there = self._machine.host_memory_bytes
        return not there or estimate.hosted * self._machine.host_devices <= there


def _itemsize(dtype: str | None) -> int:
    return 2 if dtype in ("bfloat16", "float16") else 4
