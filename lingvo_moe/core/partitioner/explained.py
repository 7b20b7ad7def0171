"""The shardings and the communication of a program, as data, and the words for them that page and terminal share."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_moe.core.console import units
from lingvo_moe.core.hlo.sharding import TensorSharding
from lingvo_moe.core.pages.tables import Table, numbers, words
from lingvo_moe.core.partitioner import known_faults, spmd
from lingvo_moe.core.sharding import DimsMapping, Mesh

_WIDEST = 46
_DTYPES = {"pred": "bool"}


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the user's code: its place, e.g. 'file.py:12', and its text."""

    place: str
    text: str = ""

    def __str__(self) -> str:
        return self.place


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """A tensor of the program after sharding propagation."""

    name: str  # the TensorFlow operation that produces it, or the path of an argument
    dtype: str  # HLO's element type, e.g. 'f32'
    shape: tuple[int, ...]  # the global shape
    sharding: TensorSharding  # which part each device holds
    mesh: Mesh  # the program's mesh
    phase: str = "forward"  # forward, recompute, backward or optimizer
    in_loop: bool = False  # whether it is computed in the body of a loop
    annotates: str = ""  # for an annotation, the operation or argument that it annotates
    line: Line | None = None  # the source line that created it, if known

    @property
    def mapping(self) -> DimsMapping | None:
        """The mesh axis, axes or None of each dimension, as `mesh_split` takes them.

        None if axes of the mesh cannot express the sharding.
        """
        found = self.sharding.OnMesh(self.mesh)
        return (None,) * len(self.shape) if found == () else found

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one device's part, including padding."""
        return self.sharding.PartShape(self.shape)

    @property
    def padding(self) -> tuple[int, ...]:
        """For each dimension, how many elements the parts together have beyond the tensor's own."""
        return self.sharding.Padding(self.shape)

    def ToJson(self) -> dict[str, Any]:
        """Returns a plain dict; `Explanation.ToJson` describes its fields."""
        mapping = self.mapping
        return {
            "name": self.name,
            "annotates": self.annotates,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "sharding": self.sharding.Text(),
            "mapping": None if mapping is None else [_axes(axis) for axis in mapping],
            "part_shape": list(self.part_shape),
            "padding": list(self.padding),
            "phase": self.phase,
            "in_loop": self.in_loop,
            "line": self.line and self.line.place,
        }

    def __str__(self) -> str:
        return (
            f"{self.name}: {tensor_type(self.dtype, self.shape)}, {axes_text(self.sharding, self.mesh)}; "
            f"{dims(self.part_shape)} on a device"
        )


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective that the partitioner inserted, and the source lines that caused it."""

    what: spmd.Communication  # the collective
    tensor: str = ""  # the name of the moved tensor
    # The line that caused it: the annotation that requests the new sharding, else the annotation that set the old one,
    # else the operation itself.
    line: Line | None = None
    op_line: Line | None = None  # the line of the operation that it was inserted for

    @property
    def total_bytes(self) -> int:
        """Bytes in one run of the program; in one execution if the number of executions is unknown."""
        return self.what.num_bytes * (1 if self.what.times is None else self.what.times)

    def ToJson(self) -> dict[str, Any]:
        """Returns a plain dict; `Explanation.ToJson` describes its fields."""
        out = dataclasses.asdict(self.what)
        for key in ("source", "target"):
            found = getattr(self.what, key)
            out[key] = found and found.Text()
        out["shape"] = list(self.what.shape)
        out["tensor"] = self.tensor
        for key in ("line", "op_line"):
            out[key] = getattr(self, key) and getattr(self, key).place
        return out


@dataclasses.dataclass(frozen=True)
class WrongNumbers:
    """An operation for which XLA's partitioner computes wrong numbers."""

    fault: known_faults.Fault  # what goes wrong, and the remedy
    # The operation's source line; for a gradient, the line of the forward operation.
    line: Line | None = None

    def ToJson(self) -> dict[str, Any]:
        """Returns a plain dict; `Explanation.ToJson` describes its fields."""
        return dataclasses.asdict(self.fault) | {"line": self.line and self.line.place}

    def __str__(self) -> str:
        return f"{self.line.place}: {self.fault}" if self.line else str(self.fault)


@dataclasses.dataclass(frozen=True)
class Explained:
    """The shardings and the communication of one program."""

    name: str  # the program's name
    mesh: Mesh  # its mesh
    tensors: Sequence[ShardedTensor]  # the annotated tensors, in program order
    exchanges: Sequence[Exchange]  # the collectives that the partitioner inserted, in program order
    # Kind -> number of collectives in the compiled program, where XLA has joined, moved or removed some after
    # partitioning.
    compiled: dict[str, int]
    # Operations for which the partitioner is known to compute other values than one device; known_faults.py describes
    # what it detects.
    wrong: Sequence[WrongNumbers]
    # The function behind `Sharding`.
    find: Callable[[str], list[ShardedTensor]] = dataclasses.field(repr=False, compare=False)

    @property
    def reshards(self) -> list[Exchange]:
        """The exchanges that change the sharding of a tensor."""
        return [e for e in self.exchanges if e.what.reason == spmd.RESHARD]

    def Bytes(self, *reasons: str) -> int:
        """Bytes that one device exchanges in one run, for the given reasons (spmd.REASONS) or for all."""
        return sum(e.total_bytes for e in self.exchanges if not reasons or e.what.reason in reasons)


def exchanges_table(explained: Explained, most: int) -> Table:
    """A row for each of `most` exchanges, the largest first."""
    columns = [*numbers("bytes", "times", "devices"), *words("collective", "why", "tensor", "from")]
    largest = sorted(explained.exchanges, key=lambda e: -e.total_bytes)[:most]
    rows = [_exchange_row(exchange, explained.mesh) for exchange in largest]
    return Table([*columns, *words("to", "line")], rows)


def _exchange_row(exchange: Exchange, mesh: Mesh) -> list[str]:
    what = exchange.what
    return [
        units.size(what.num_bytes),
        "?" if what.times is None else f"{what.times:,}",
        f"{what.participants}",
        what.kind,
        what.reason + (f", {what.phase}" if what.phase != "forward" else ""),
        short(exchange.tensor),
        axes_text(what.source, mesh) if what.source else "",
        axes_text(what.target, mesh) if what.target else "",
        str(exchange.line or ""),
    ]


def axes_text(sharding: TensorSharding, mesh: Mesh) -> str:
    """The mesh axis of each dimension, e.g. 'expert,-,-'; words if axes cannot express the sharding."""
    mapping = sharding.OnMesh(mesh)
    if mapping is None:
        return str(sharding)
    if not any(mapping):
        return "replicated"
    return ",".join("-" if a is None else a if isinstance(a, str) else "+".join(a) for a in mapping)


def tensor_type(dtype: str, shape: Sequence[int]) -> str:
    """Element type and shape, e.g. 'f32[8,16]'."""
    return f"{_DTYPES.get(dtype, dtype)}[{','.join(map(str, shape))}]"


def dims(shape: Sequence[int]) -> str:
    """A shape, e.g. '8x16', or 'scalar'."""
    return "x".join(map(str, shape)) or "scalar"


def short(name: str) -> str:
    """Drops the prefix 'gradient_tape/'. Of a name that is still longer than 46 characters, keeps '…' and the end."""
    name = name.removeprefix("gradient_tape/")
    return name if len(name) <= _WIDEST else "…" + name[1 - _WIDEST :]


def _axes(axis: Any) -> Any:
    return list(axis) if isinstance(axis, tuple) else axis
