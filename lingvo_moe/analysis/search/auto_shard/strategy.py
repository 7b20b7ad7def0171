"""The result of a search, as text: the sharding of arguments, results and the tensors between operators.

A strategy is bound to the operations of the function that it was found for, by their numbers and types. Read for
another function, or for the same function of other shapes, it is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lingvo_moe.core.console.units import size
from lingvo_moe.core.sharding.letters import DimsMapping, axes_of, axis_of
from lingvo_moe.core.sharding.mesh import Mesh, ShardingError

_VERSION = 1


@dataclass(frozen=True)
class ReadSharding:
    """The sharding of a tensor as one operation reads it."""

    # The number of the operation; -1 for a result of the function, which is wanted in this sharding.
    op: int
    name: str  # its name; of an argument or a result its path
    type: str  # the operation's type
    operand: int  # which of its operands
    shape: tuple[int, ...]  # the tensor's shape
    mapping: DimsMapping  # a mesh axis, axes or None for each dimension
    made: DimsMapping = ()  # the mapping in which the tensor was made
    collectives: tuple[str, ...] = ()  # what brings the one to the other, forward
    backward: tuple[str, ...] = ()  # the same for its gradient


@dataclass(frozen=True)
class Tensor:
    """An argument, a result, or an operation's result: its sharding."""

    name: str  # path of an argument or a result, else the operation's name
    shape: tuple[int, ...]  # global
    mapping: DimsMapping  # a mesh axis, axes or None for each dimension
    # `op`, `index`: the operation that makes it and which of its results; -1 for arguments and results of the
    # function.
    op: int = -1
    index: int = 0
    type: str = ""  # the operation's type


@dataclass(frozen=True)
class Strategy:
    """A found strategy."""

    mesh: Mesh  # which it is for
    machine: str  # on which the seconds are estimated
    seconds: float  # estimated, of the function, and of its gradient if it was wanted
    num_bytes: int  # estimated, on a device
    # `arguments`, `results`: of the function.
    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    operators: tuple[Tensor, ...]  # the result of each operator
    reads: tuple[ReadSharding, ...]  # tensors that an operation reads otherwise than they were made
    notes: tuple[str, ...] = ()  # what is not as one might expect, e.g. operations without a rule
    # How large the search was and how long it took; no part of the text.
    search: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        lines = [
            f"over mesh {self.mesh} on {self.machine}: {self.seconds * 1e3:.4g} ms, "
            f"{size(self.num_bytes)} on a device (estimates)"
        ]
        parts = {
            "arguments": self.arguments,
            "operators": self.operators,
            "results": self.results,
        }
        for title, tensors in parts.items():
            lines.append(f"{title}:")
            lines += [f"  {t.name}{list(t.shape)}: {mapping_text(t.mapping)}" for t in tensors]
        moved = [r for r in self.reads if r.collectives or r.backward]
        lines.append(f"redistributions: {len(moved) or 'none'}")
        for r in moved:
            ways = f"{', '.join(r.collectives) or 'slice'}; gradient: {', '.join(r.backward) or 'slice'}"
            what = r.name if r.op < 0 else f"operand {r.operand} of {r.name}"
            lines.append(
                f"  {what}{list(r.shape)}: {mapping_text(r.made)} to "
                f"{mapping_text(r.mapping)} ({ways})"
            )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def Text(self) -> str:
        """The strategy as JSON, the same bytes in every run."""
        fields = {
            "version": _VERSION,
            "mesh": str(self.mesh),
            "device_ids": list(self.mesh.device_ids),
            **{
                name: value
                for name, value in asdict(self).items()
                if name not in ("mesh", "search")
            },
        }
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def FromText(cls, text: str, what: str = "strategy") -> "Strategy":
        """Reads what `Text` wrote. Raises ShardingError: any other text."""
        try:
            fields = json.loads(text)
            version = fields.pop("version")
            if version != _VERSION:
                raise ShardingError(f"{what}: is of version {version}; this reads {_VERSION}")
            mesh = Mesh.parse(fields.pop("mesh"), what)
            mesh = Mesh(mesh.axis_names, mesh.shape, tuple(fields.pop("device_ids")))
            rest: dict[str, Any] = {
                name: tuple(Tensor(**_tuples(t)) for t in fields.pop(name))
                for name in ("arguments", "results", "operators")
            }
            reads = tuple(ReadSharding(**_tuples(r)) for r in fields.pop("reads"))
            notes = tuple(fields.pop("notes"))
            return cls(mesh=mesh, reads=reads, notes=notes, **rest, **fields)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
            raise ShardingError(f"{what}: is no text of a strategy ({e!r})") from None


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    def change(value: Any) -> Any:
        return tuple(map(change, value)) if isinstance(value, list) else value

    return {name: change(value) for name, value in entry.items()}


def mapping_text(mapping: DimsMapping) -> str:
    """A mapping as text for people: 'data,-' is sharded by rows over the axis data; 'whole' is not sharded."""
    if not any(mapping):
        return "whole"
    return ",".join("+".join(axes_of(axis)) or "-" for axis in mapping)


def mapping_of(layout: Sequence[tuple[str, ...]]) -> DimsMapping:
    """A layout as `mesh_split` takes it."""
    return tuple(map(axis_of, layout))
