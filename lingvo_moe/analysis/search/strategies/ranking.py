"""Chooses the candidate to compile next, and learns from its plan about the others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lingvo_moe.analysis.search.strategies.candidate import Candidate
from lingvo_moe.analysis.search.strategies.estimates import Correction, Estimate

# Corrections outside of this range would rather be faults of an estimate than of a machine.
_LEAST, _MOST = 0.1, 20.0
# After each program that did not fit, candidates are to leave this share more of the memory free, by estimate.
_CAUTION = 0.9


@dataclass
class Tried:
    """A candidate that was compiled, or that could not be."""

    candidate: Candidate  # the candidate
    name: str  # what the report calls it
    overrides: Mapping[str, str]  # the parameters that set it, by path
    seconds: float  # the estimate before it was compiled
    plan: dict[str, Any] | None = None  # the plan of its program; None if there is none
    refused: str = ""  # why there is none, or why it was not taken in spite of it; ''

    @property
    def step_seconds(self) -> float:
        """The time of the compiled program's step; infinite where it does not fit or was refused."""
        if self.refused or self.plan is None or not self.plan["memory"]["fits"]:
            return math.inf
        return float(self.plan["time"]["step_seconds"])


@dataclass
class Ranking:
    """Candidates in the order of their corrected estimates."""

    estimates: Mapping[Candidate, Estimate]  # the estimate of every candidate that could fit
    memory: float  # bytes that a program may use on a device
    tried: list[Tried] = field(default_factory=list)  # those that were compiled, in order
    # The corrections by their plans.
    learnt: dict[Candidate, Correction] = field(default_factory=dict)

    def Correction(self, candidate: Candidate) -> Correction:
        """The correction of a candidate: what was learnt of the one that is most like it, of equals the last one."""
        alike = max(reversed(self.learnt), key=lambda c: likeness(c, candidate), default=None)
        return Correction() if alike is None else self.learnt[alike]

    def Next(self) -> list[Candidate]:
        """The candidates that were not tried and should beat the best one so far, the most promising first.

        Where nothing fits, neither of those that were tried nor by estimate, it is the smallest that was not tried.
        """
        seen = {tried.candidate for tried in self.tried}
        left = [c for c in self.estimates if c not in seen]
        by = {c: self.Correction(c) for c in left}
        misfits = sum(not t.plan["memory"]["fits"] for t in self.tried if t.plan is not None)
        memory = self.memory * _CAUTION**misfits
        fitting = [c for c in left if self.estimates[c].Bytes(by[c]) <= memory]
        best = min((tried.step_seconds for tried in self.tried), default=math.inf)
        if not fitting and best == math.inf and left:
            return [min(left, key=lambda c: self.estimates[c].Bytes(by[c]))]
        seconds = {c: self.estimates[c].Seconds(by[c]) for c in fitting}
        return sorted((c for c in fitting if seconds[c] < best), key=lambda c: seconds[c])

    def NothingFits(self) -> bool:
        """Whether nothing that was compiled fits, nor anything else by its corrected estimate."""
        estimates = self.estimates.items()
        return self.best is None and not any(
            e.Bytes(self.Correction(c)) <= self.memory for c, e in estimates
        )

    def Add(self, tried: Tried) -> None:
        """Takes note of a candidate; corrects the estimates of others like it by its plan."""
        self.tried.append(tried)
        if tried.plan is not None:
            before, estimate = self.Correction(tried.candidate), self.estimates[tried.candidate]
            self.learnt[tried.candidate] = corrected(before, estimate, tried.plan)

    @property
    def best(self) -> Tried | None:
        """The fastest that fits; the first of equals."""
        fastest = min(self.tried, key=lambda tried: tried.step_seconds, default=None)
        return fastest if fastest is not None and fastest.step_seconds < math.inf else None


def likeness(one: Candidate, other: Candidate) -> tuple[bool, ...]:
    """Says in which choices two candidates agree; those that change most of a program come first."""
    return (
        one.layout.stages == other.layout.stages,
        one.repeats == other.repeats,
        one.micro_batches == other.micro_batches,
        one.offload == other.offload,
        one.fprop_dtype == other.fprop_dtype,
        one.layout == other.layout,
        one.remat == other.remat,
        one.shard_state == other.shard_state,
    )


def corrected(before: Correction, estimate: Estimate, plan: Mapping[str, Any]) -> Correction:
    """The correction after a plan: the one that makes its estimate right, where the plan has the figures."""
    memory = (plan["memory"]["needed"] - estimate.state) / max(estimate.activations, 1.0)
    out = replace(before, work=dict(before.work), memory=_within(memory))
    if plan["time"] is None:
        out.memory = max(out.memory, before.memory)
        return out
    if not plan["work"]:  # measured as a whole
        factor = _within(plan["time"]["step_seconds"] / estimate.Seconds(Correction()))
        return Correction(dict.fromkeys(estimate.work, factor), factor, factor, _within(memory))
    work: dict[str, float] = {}
    for row in plan["work"]:
        work[row["part"]] = work.get(row["part"], 0.0) + row["roofline_seconds"] / estimate.idle
    for part, seconds in estimate.work.items():
        if seconds > 0:
            out.work[part] = _within(work.pop(part, 0.0) / seconds)
    out.rest = _within(sum(work.values()) / estimate.rest)
    if estimate.network > 0:
        out.network = _within(plan["time"]["collective_seconds"] / estimate.network)
    if estimate.moves > 0:
        out.waiting = _within(plan["host"]["waiting_seconds"] / estimate.moves)
    return out


def _within(factor: float) -> float:
    return min(max(factor, _LEAST), _MOST)
