"""Explanation: the sharding of a program's tensors, the collectives, and the source lines behind them."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lingvo_moe.core import units
from lingvo_moe.core.hlo.sharding import TensorSharding
from lingvo_moe.core.partitioner import known_faults, spmd
from lingvo_moe.core.sharding import DimsMapping, Mesh

VERSION = 1
_MOST_ROWS = 40
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
    """A tensor of the program after sharding propagation.

    Attributes:
        name: the TensorFlow operation that produces it, or the path of an argument.
        dtype: HLO's element type, e.g. 'f32'.
        shape: the global shape.
        sharding: which part each device holds.
        mesh: the program's mesh.
        phase: forward, recompute, backward or optimizer.
        in_loop: whether it is computed in the body of a loop.
        annotates: for an annotation, the operation or argument that it annotates.
        line: the source line that created it, if known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sharding: TensorSharding
    mesh: Mesh
    phase: str = "forward"
    in_loop: bool = False
    annotates: str = ""
    line: Line | None = None

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
    """A collective that the partitioner inserted, and the source lines that caused it.

    Attributes:
        what: the collective.
        tensor: the name of the moved tensor.
        line: the line that caused it: the annotation that requests the new sharding, else the
            annotation that set the old one, else the operation itself.
        op_line: the line of the operation that it was inserted for.
    """

    what: spmd.Communication
    tensor: str = ""
    line: Line | None = None
    op_line: Line | None = None

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
    """An operation for which XLA's partitioner computes wrong numbers.

    Attributes:
        fault: what goes wrong, and the remedy.
        line: the operation's source line; for a gradient, the line of the forward operation.
    """

    fault: known_faults.Fault
    line: Line | None = None

    def ToJson(self) -> dict[str, Any]:
        """Returns a plain dict; `Explanation.ToJson` describes its fields."""
        return dataclasses.asdict(self.fault) | {"line": self.line and self.line.place}

    def __str__(self) -> str:
        return f"{self.line.place}: {self.fault}" if self.line else str(self.fault)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The shardings and the communication of one program.

    Attributes:
        name: the program's name.
        mesh: its mesh.
        tensors: the annotated tensors, in program order.
        exchanges: the collectives that the partitioner inserted, in program order.
        compiled: kind -> number of collectives in the compiled program, where XLA has joined, moved or
            removed some after partitioning.
        wrong: operations for which the partitioner is known to compute other values than one device;
            known_faults.py describes what it detects.
        find: the function behind `Sharding`.
    """

    name: str
    mesh: Mesh
    tensors: Sequence[ShardedTensor]
    exchanges: Sequence[Exchange]
    compiled: dict[str, int]
    wrong: Sequence[WrongNumbers]
    find: Callable[[str], list[ShardedTensor]] = dataclasses.field(repr=False, compare=False)

    @property
    def reshards(self) -> list[Exchange]:
        """The exchanges that change the sharding of a tensor."""
        return [e for e in self.exchanges if e.what.reason == spmd.RESHARD]

    def Sharding(self, name: str) -> list[ShardedTensor]:
        """Returns the sharding of any tensor of the program, annotated or not.

        Args:
            name: an argument ('batch.src.ids'), an operation or tensor ('ffn/einsum/Einsum',
                'Relu:0'), or a scope: the name given to an operation (`tf.einsum(.., name=..)`) or a
                layer's path ('encoder.body.layers_0'). `tf.identity(x, name=..)` leaves nothing in a
                compiled program, so its name works only in the process that traced the program, not
                for a program loaded from a file.

        Returns:
            The tensors in program order. An operation usually has one, or several if several loops
            contain it (e.g. when it is recomputed for the gradients). A scope has all of its tensors.

        Raises:
            ValueError: no tensor has this name; the message says which ones have a similar name.
        """
        return self.find(name)

    def Check(self) -> None:
        """Refuses a program that would compute wrong numbers.

        Raises:
            ShardingError: `wrong` is not empty; the message names each operation with its line and
                remedy.
        """
        known_faults.refuse(self.wrong, self.name)

    def Bytes(self, *reasons: str) -> int:
        """Bytes that one device exchanges in one run, for the given reasons (spmd.REASONS) or for all."""
        return sum(e.total_bytes for e in self.exchanges if not reasons or e.what.reason in reasons)

    def ToJson(self) -> dict[str, Any]:
        """Returns a plain dict: `version`, `program`, `mesh`, `annotated`, `exchanges`, `compiled`, `wrong`.

        Shardings are in HLO's notation. `mapping` has for each dimension a mesh axis, a list of axes
        or None; it is None as a whole if axes cannot express the sharding. Bytes are for one device
        and one execution; `times` is None if a loop's trip count is unknown.
        """
        return {
            "version": VERSION,
            "program": self.name,
            "mesh": str(self.mesh),
            "annotated": [tensor.ToJson() for tensor in self.tensors],
            "exchanges": [exchange.ToJson() for exchange in self.exchanges],
            "compiled": dict(self.compiled),
            "wrong": [found.ToJson() for found in self.wrong],
        }

    def ToHtml(self) -> str:
        """Returns one self-contained HTML page."""
        from lingvo_moe.core.partitioner.sharding_page import html_page

        return html_page(self)

    def __str__(self) -> str:
        parts = [f"Program {self.name!r} on mesh {self.mesh}, {self.mesh.size} devices"]
        if self.wrong:
            parts += ["", "WRONG NUMBERS will come out of", *(f"  {found}" for found in self.wrong)]
        parts += ["", *self._annotated_text(), "", *self._exchanges_text()]
        return "\n".join(parts)

    def _annotated_text(self) -> list[str]:
        shown = [t for t in self.tensors if t.phase == "forward"]
        rest = len(self.tensors) - len(shown)
        title = f"Annotated tensors: {len(self.tensors)}"
        if rest:
            title += (
                f", of which {rest} in gradients and recomputation, sharded like the forward ones"
            )
        heads = ("tensor", "shape", "sharding", "on a device", "line")
        rows = [
            (
                short(t.annotates or t.name),
                tensor_type(t.dtype, t.shape),
                axes_text(t.sharding, self.mesh),
                dims(t.part_shape) + (", padded" if any(t.padding) else ""),
                str(t.line or ""),
            )
            for t in shown[:_MOST_ROWS]
        ]
        more = [f"  {len(shown) - _MOST_ROWS} more"] if len(shown) > _MOST_ROWS else []
        return [title, *table(heads, rows), *more] if shown else [title]

    def _exchanges_text(self) -> list[str]:
        if not self.exchanges:
            return ["No communication"]
        title = (
            f"Communication: {len(self.exchanges)} collectives, {units.size(self.Bytes())} on one "
            f"device in one run"
        )
        ordered = sorted(self.exchanges, key=lambda e: -e.total_bytes)
        heads = ("bytes", "times", "devices", "collective", "why", "tensor", "from", "to", "line")
        rows = [exchange_row(e, self.mesh) for e in ordered[:_MOST_ROWS]]
        lines = [title, *table(heads, rows, right=3)]
        rest = ordered[_MOST_ROWS:]
        if rest:
            held = units.size(sum(e.total_bytes for e in rest))
            lines.append(f"  {len(rest)} more, {held}")
        return lines + self._compiled_text()

    def _compiled_text(self) -> list[str]:
        made: dict[str, int] = {}
        for exchange in self.exchanges:
            made[exchange.what.kind] = made.get(exchange.what.kind, 0) + 1
        changed = [
            f"{kind} {made.get(kind, 0)} -> {self.compiled.get(kind, 0)}"
            for kind in sorted(made.keys() | self.compiled.keys())
            if made.get(kind, 0) != self.compiled.get(kind, 0)
        ]
        if not self.compiled or not changed:
            return []
        return [f"In the compiled program XLA has joined or removed some: {', '.join(changed)}"]


def exchange_row(exchange: Exchange, mesh: Mesh) -> tuple[str, ...]:
    """The cells of one row in a table of exchanges; `Explanation._exchanges_text` has the headings."""
    what = exchange.what
    return (
        units.size(what.num_bytes),
        "?" if what.times is None else f"{what.times:,}",
        f"{what.participants}",
        what.kind,
        what.reason + (f", {what.phase}" if what.phase != "forward" else ""),
        short(exchange.tensor),
        axes_text(what.source, mesh) if what.source else "",
        axes_text(what.target, mesh) if what.target else "",
        str(exchange.line or ""),
    )


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


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> list[str]:
    """Formats rows as aligned lines; the first `right` columns are right-aligned, empty columns left out."""
    rows = list(rows)
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    lines = []
    widths = {i: max(len(row[i]) for row in [heads, *rows]) for i in kept}
    for row in [heads, *rows]:
        cells = [row[i].rjust(widths[i]) if i < right else row[i].ljust(widths[i]) for i in kept]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _axes(axis: Any) -> Any:
    return list(axis) if isinstance(axis, tuple) else axis
