"""Explanation: how a program's tensors are cut, what the partitioner sends, and which lines caused it."""

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
    """A line of the user's: 'file.py:12' and what it says."""

    place: str
    text: str = ""

    def __str__(self) -> str:
        return self.place


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """A tensor of the program as sharding propagation left it.

    Attributes:
        name: the TensorFlow operation that makes it, or the path of an argument.
        dtype, shape: of the whole tensor.
        sharding: which part lies where.
        mesh: the program's.
        phase: forward, recompute, backward or optimizer.
        in_loop: whether the body of a loop makes it.
        annotates: of an annotation, what it annotates.
        line: where it was written, if that is known.
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
        """The mesh axis, axes or None of each dimension, as `mesh_split` takes them; None where no axes
        can name it."""
        found = self.sharding.OnMesh(self.mesh)
        return (None,) * len(self.shape) if found == () else found

    @property
    def part_shape(self) -> tuple[int, ...]:
        """What one device holds, padding included."""
        return self.sharding.PartShape(self.shape)

    @property
    def padding(self) -> tuple[int, ...]:
        """Of each dimension, how many elements all parts have more than the tensor."""
        return self.sharding.Padding(self.shape)

    def ToJson(self) -> dict[str, Any]:
        """A plain dict; docs of `Explanation.ToJson`."""
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
            f"{self.name}: {tensor_type(self.dtype, self.shape)}, {cut(self.sharding, self.mesh)}; "
            f"{dims(self.part_shape)} on a device"
        )


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective that the partitioner put in, and the lines behind it.

    Attributes:
        what: the collective.
        tensor: what it moves, in the user's words.
        line: the one that caused it: of the annotation that asks for another sharding, else of the one
            that was left, else of the operation itself.
        op_line: of the operation for which it is there.
    """

    what: spmd.Communication
    tensor: str = ""
    line: Line | None = None
    op_line: Line | None = None

    @property
    def total_bytes(self) -> int:
        """Of one run of the program; of one execution where it is not known how many there are."""
        return self.what.num_bytes * (1 if self.what.times is None else self.what.times)

    def ToJson(self) -> dict[str, Any]:
        """A plain dict; docs of `Explanation.ToJson`."""
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
    """An operation that XLA's partitioner gets wrong, and its line.

    Attributes:
        fault: what goes wrong and what is right instead.
        line: of the operation; a gradient has that of what it is the gradient of.
    """

    fault: known_faults.Fault
    line: Line | None = None

    def ToJson(self) -> dict[str, Any]:
        """A plain dict; docs of `Explanation.ToJson`."""
        return dataclasses.asdict(self.fault) | {"line": self.line and self.line.place}

    def __str__(self) -> str:
        return f"{self.line.place}: {self.fault}" if self.line else str(self.fault)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How one program is cut and what it sends.

    Attributes:
        name: the program's.
        mesh: its mesh.
        tensors: those that were annotated, in the order of the program.
        exchanges: the collectives that the partitioner put in, in the order of the program.
        compiled: kind -> number of collectives in the finished program: XLA joins, moves and drops some
            after the partitioner.
        wrong: operations of which the partitioner is known to compute something else than one device
            does; see known_faults.py for how far that is known.
        find: see `Sharding`.
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
        """The exchanges that change how a tensor is cut."""
        return [e for e in self.exchanges if e.what.reason == spmd.RESHARD]

    def Sharding(self, name: str) -> list[ShardedTensor]:
        """How any tensor of the program is cut, annotated or not.

        Args:
            name: an argument ('batch.src.ids'), an operation or tensor ('ffn/einsum/Einsum',
                'Relu:0'), or a scope: the name that an operation was given (`tf.einsum(.., name=..)`)
                or a layer's path ('encoder.body.layers_0'). A `tf.identity(x, name=..)` leaves nothing
                in a compiled program; its name is known while the program is at hand in which it was
                traced, not of one that was loaded from a file.

        Returns:
            The tensors in the order of the program: of an operation usually one, several where it is in
            several loops (as one that is computed again for the gradients); of a scope all.

        Raises:
            ValueError: no tensor has this name; the message says which ones have a similar name.
        """
        return self.find(name)

    def Check(self) -> None:
        """Refuses a program that would compute wrong numbers.

        Raises:
            ShardingError: there are such operations; each is named with its line and what is right
                instead.
        """
        known_faults.refuse(self.wrong, self.name)

    def Bytes(self, *reasons: str) -> int:
        """What one device exchanges in one run, for some reasons (spmd.REASONS) or all."""
        return sum(e.total_bytes for e in self.exchanges if not reasons or e.what.reason in reasons)

    def ToJson(self) -> dict[str, Any]:
        """A plain dict: `version`, `program`, `mesh`, `annotated`, `exchanges`, `compiled`,
        `wrong`.

        Shardings are in HLO's notation; `mapping` has a mesh axis, a list of them or None for each
        dimension, or is None where axes cannot name it. Bytes are those of one device and one
        execution; `times` is None where the trips of a loop are not known.
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
        """One page that needs nothing else."""
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
                f", of which {rest} in gradients and what they recompute, cut as the forward ones"
            )
        heads = ("tensor", "shape", "cut", "on a device", "line")
        rows = [
            (
                short(t.annotates or t.name),
                tensor_type(t.dtype, t.shape),
                cut(t.sharding, self.mesh),
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
        return [f"In the finished program XLA has joined or dropped some: {', '.join(changed)}"]


def exchange_row(exchange: Exchange, mesh: Mesh) -> tuple[str, ...]:
    """The cells that a table of exchanges has: see `Explanation._exchanges_text`."""
    what = exchange.what
    return (
        units.size(what.num_bytes),
        "?" if what.times is None else f"{what.times:,}",
        f"{what.participants}",
        what.kind,
        what.reason + (f", {what.phase}" if what.phase != "forward" else ""),
        short(exchange.tensor),
        cut(what.source, mesh) if what.source else "",
        cut(what.target, mesh) if what.target else "",
        str(exchange.line or ""),
    )


def cut(sharding: TensorSharding, mesh: Mesh) -> str:
    """How a tensor is cut, for people: 'expert,-,-', or words where no axes name it."""
    mapping = sharding.OnMesh(mesh)
    if mapping is None:
        return str(sharding)
    if not any(mapping):
        return "whole"
    return ",".join("-" if a is None else a if isinstance(a, str) else "+".join(a) for a in mapping)


def tensor_type(dtype: str, shape: Sequence[int]) -> str:
    """'f32[8,16]'."""
    return f"{_DTYPES.get(dtype, dtype)}[{','.join(map(str, shape))}]"


def dims(shape: Sequence[int]) -> str:
    """'8x16'; 'scalar'."""
    return "x".join(map(str, shape)) or "scalar"


def short(name: str) -> str:
    """A name's end, where it is long."""
    name = name.removeprefix("gradient_tape/")
    return name if len(name) <= _WIDEST else "…" + name[1 - _WIDEST :]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> list[str]:
    """Aligned lines; the first `right` columns to the right, columns without anything left out."""
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
