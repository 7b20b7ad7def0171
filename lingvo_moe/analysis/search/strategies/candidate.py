"""A candidate: a layout and all else that a strategy chooses, and the parameters that set it."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lingvo_moe.analysis.search.strategies.mesh_layout import MeshLayout, letter_sizes
from lingvo_moe.analysis.search.strategies.workload import Workload
from lingvo_moe.core.config.checks import STATE_LEVELS
from lingvo_moe.core.layers.kept import DOTS, FULL
from lingvo_moe.core.pipeline.schedule import DATA
from lingvo_moe.core.sharding.letters import axes_of
from lingvo_moe.core.state.offload import ACTIVATIONS, EXPERTS, SLOTS
from lingvo_moe.core.tensors import Kept

# Micro-batches for each stage of a pipeline.
_PER_STAGE = (1, 2, 4)
# What may be in the memory of the hosts: see core/state/offload.py.
OFFLOADS = (
    (SLOTS,),
    (ACTIVATIONS,),
    (SLOTS, ACTIVATIONS),
    (EXPERTS,),
    (EXPERTS, SLOTS),
    (EXPERTS, SLOTS, ACTIVATIONS),
)


@dataclass(frozen=True)
class Candidate:
    """A strategy for a model on a machine."""

    layout: MeshLayout  # mesh and letters
    shard_state: str = "none"  # one of checks.STATE_LEVELS
    remat: str | tuple[str, ...] = FULL  # what a loop over blocks keeps: see layers/kept.py
    fprop_dtype: str = ""  # the activations' dtype; '' for the experiment's own
    # Of a pipeline, those that pass through each device of axis `data`; else those of a step.
    micro_batches: int = 1
    offload: tuple[str, ...] = ()  # what is in the memory of the hosts, () or one of OFFLOADS
    # Of a pipeline, how many parts of a stack each stage has: 1 (1F1B) or 2 (interleaved).
    repeats: int = 1

    def Overrides(self) -> dict[str, str]:
        """The parameters that set it, by path, as texts that an override takes."""
        layout = self.layout
        pipelined = layout.stages > 1
        out = {
            "train.mesh": str(layout.mesh),
            "train.shard_state": self.shard_state,
            "train.offload": repr(list(self.offload)) if self.offload else "none",
            "train.num_micro_batches": "1" if pipelined else str(self.micro_batches),
            "task.activation_split": repr(dict(layout.activations)),
            "task.weight_split": repr(dict(layout.weights)),
            "task.repeat": "True",
            "task.remat": _kept_text(self.remat),
            "task.pipeline.stages": str(layout.stages),
            "task.pipeline.micro_batches": str(
                self.micro_batches * layout.size(DATA) if pipelined else 1
            ),
            "task.pipeline.schedule": "1f1b" if self.repeats == 1 else "interleaved",
            "task.pipeline.repeats": str(self.repeats),
            "task.pipeline.splits": "[]",
        }
        if self.fprop_dtype:
            out["task.fprop_dtype"] = self.fprop_dtype
        return out

    def __str__(self) -> str:
        """The candidate in one line, without the settings that are those of the plainest strategy."""
        letters = ", ".join(f"{n} {'+'.join(axes_of(axis))}" for n, axis in self.layout.activations)
        more = [
            "" if self.shard_state == "none" else f"shard_state={self.shard_state}",
            "" if self.remat == FULL else f"remat={_kept_text(self.remat)}",
            self.fprop_dtype,
            "" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches",
            "" if self.repeats == 1 else "interleaved",
            f"offload={', '.join(self.offload)}" if self.offload else "",
        ]
        return "; ".join([str(self.layout.mesh), letters, *filter(None, more)])


def _kept_text(remat: str | tuple[str, ...]) -> str:
    return remat if isinstance(remat, str) else str(list(remat))


def candidates(
    each_layout: Iterable[MeshLayout],
    work: Workload,
    dtypes: Sequence[str] = ("",),
    offloads: Sequence[tuple[str, ...]] = ((),),
) -> Iterator[Candidate]:
    """All candidates with these layouts, in a fixed order.

    Args:
        dtypes: of activations that are allowed; '' is the experiment's own.
        offloads: what may be in the memory of the hosts.
    """
    sizes = letter_sizes(work)
    rows = [max(sizes[n]) for n in "BG" if n in sizes]
    remats = _remats(work)
    for layout in each_layout:
        levels = STATE_LEVELS if layout.mesh.size > 1 else STATE_LEVELS[:1]
        for micro_batches in _micro_batches(layout, rows):
            rest = itertools.product(levels, remats, dtypes, offloads, _repeats(layout, work))
            for level, remat, dtype, offload, repeats in rest:
                if _goes_with(offload, layout, micro_batches):
                    yield Candidate(layout, level, remat, dtype, micro_batches, offload, repeats)


def _remats(work: Workload) -> list[str | tuple[str, ...]]:
    """Values of task.remat. Outputs of layers save more time for their bytes than what is inside of layers."""

    def having(kind: Kept) -> tuple[str, ...]:
        return tuple(name for name, kinds in work.names.items() if kinds & kind)

    outputs, moved = having(Kept.OUTPUT), having(Kept.MOVED)
    lists = [outputs]
    if moved:
        lists += [moved, (*outputs, *moved), having(Kept.PRODUCT | Kept.MOVED)]
    return [FULL, DOTS, *filter(None, lists)]


def _repeats(layout: MeshLayout, work: Workload) -> tuple[int, ...]:
    """The numbers of parts of a stack that a stage can have."""
    both = layout.stages > 1 and 2 * layout.stages <= min(work.blocks.values())
    return (1, 2) if both else (1,)


def _goes_with(offload: tuple[str, ...], layout: MeshLayout, micro_batches: int) -> bool:
    """Whether an offload is worth trying.

    The trainer refuses experts with micro-batches, and experts and activations with stages. With stages, the update of
    offloaded slots would gather each layer on all stages.
    """
    if not offload:
        return True
    return layout.stages == 1 and (micro_batches == 1 or EXPERTS not in offload)


def _micro_batches(layout: MeshLayout, rows: Sequence[int]) -> list[int]:
    if layout.stages > 1:
        wanted = [layout.stages * n for n in _PER_STAGE]
    else:
        wanted = [1, 2, 4]
    per_device = [size // layout.rows for size in rows]
    return [n for n in wanted if all(size % n == 0 for size in per_device)]
