"""The candidates of an experiment on a machine, with their estimates."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lingvo_moe.analysis.plans.machines.base_machine import Machine
from lingvo_moe.analysis.search.strategies.candidate import OFFLOADS, Candidate, candidates
from lingvo_moe.analysis.search.strategies.estimates import Correction, Estimate, Estimator
from lingvo_moe.analysis.search.strategies.mesh_layout import layouts
from lingvo_moe.analysis.search.strategies.state_bytes import StateBytes
from lingvo_moe.analysis.search.strategies.workload import Workload
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.state.offload import OffloadError
from lingvo_moe.core.task.inspect import itemsize_of

NO_OFFLOAD: tuple[str, ...] = ()


@dataclass
class Estimates:
    """Candidates that were estimated."""

    kept: dict[Candidate, Estimate]  # those that may fit, in a fixed order
    # The one that needs the least memory, and its estimate; None if there was none.
    least: tuple[Candidate, Estimate] | None
    count: int = 0  # how many there were
    may_fit: int = 0  # how many of them may fit
    seconds: float = 0.0  # how long estimating them took
    offloads: bool = False  # whether those that offload are among them

    def Fastest(self, memory: int) -> float | None:
        """The least seconds of those that fit by their estimate, or else of those that may fit; None where none may."""
        by = Correction()
        fit = [estimate for estimate in self.kept.values() if estimate.Bytes(by) <= memory]
        return min((estimate.Seconds(by) for estimate in fit or self.kept.values()), default=None)


class Space:
    """The search space.

    Args:
        dtypes: of activations that are allowed; '' is the experiment's own.
    """

    def __init__(
        self, params: Params, work: Workload, machine: Machine, dtypes: Sequence[str] = ("",)
    ):
        self._params, self._work, self._machine = params, work, machine
        dtype = params.task.fprop_dtype or params.task.dtype
        self._itemsizes = {d: itemsize_of(d or dtype or "float32") for d in dtypes}
        self._states: dict[tuple[str, tuple[str, ...]], StateBytes] = {}
        self.estimator = Estimator(work, self._State, machine, self._itemsizes)

    def _State(self, dtype: str, offload: tuple[str, ...]) -> StateBytes:
        key = dtype, offload
        if key not in self._states:
            self._states[key] = StateBytes(self._params, dtype, offload)
        return self._states[key]

    def Estimated(self, memory: int) -> Estimates:
        """All candidates, with those that offload only where no other one fits by its estimate.

        Args:
            memory: bytes that a program may use on a device.
        """
        estimates = Estimates({}, None)
        self._Add(estimates, (NO_OFFLOAD,), memory)
        if not any(estimate.Bytes(Correction()) <= memory for estimate in estimates.kept.values()):
            self.AddOffloads(estimates, memory)
        return estimates

    def AddOffloads(self, to: Estimates, memory: int) -> None:
        """Adds the candidates that offload, if the machine has hosts; changes nothing the second time."""
        if not to.offloads and self._machine.host_devices:
            to.offloads = True
            self._Add(to, list(filter(self._Frees, OFFLOADS)), memory)

    def _Frees(self, offload: tuple[str, ...]) -> bool:
        try:
            self._State("", offload)
        except OffloadError:
            return False
        return True

    def _Add(self, to: Estimates, offloads: Sequence[tuple[str, ...]], memory: int) -> None:
        started = time.monotonic()
        each_layout = layouts(self._work, self._machine.num_devices)
        for candidate in candidates(each_layout, self._work, tuple(self._itemsizes), offloads):
            to.count += 1
            estimate = self.estimator.Of(candidate)
            if not self._HostHolds(estimate):
                continue
            if to.least is None or estimate.least < to.least[1].least:
                to.least = candidate, estimate
            if estimate.least <= memory:
                to.may_fit += 1
                to.kept[candidate] = estimate
        to.seconds += time.monotonic() - started

    def _HostHolds(self, estimate: Estimate) -> bool:
        """Whether a host can hold what its devices offload; it can, where its memory is not known."""
        there = self._machine.host_memory_bytes
        return not there or estimate.hosted * self._machine.host_devices <= there
