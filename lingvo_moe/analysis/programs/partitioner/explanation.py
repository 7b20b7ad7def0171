"""Explanation: the sharding of a program's tensors, the collectives, and the source lines behind them."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding
from lingvo_moe.analysis.programs.partitioner import known_faults, spmd
from lingvo_moe.analysis.programs.partitioner.sharding_figure import figure
from lingvo_moe.core.console import units
from lingvo_moe.core.pages import rendering
from lingvo_moe.core.pages.tables import Piece, Table, lines, numbers, words
from lingvo_moe.core.sharding import DimsMapping, Mesh
from lingvo_moe.core.sharding.letters import axes_of

VERSION = 1
_MOST_ROWS = 40
_MOST_ON_PAGE = 400
_WIDEST = 46
_DTYPES = {"pred": "bool"}
_COLOURS = {
    spmd.RESHARD: "network",
    spmd.PARTIAL: "slots",
    spmd.HALO: "activations",
    spmd.RESULT: "padding",
}


@dataclasses.dataclass(frozen=True)
class CodeLine:
    """A line of the user's code: its place, e.g. 'file.py:12', and its text."""

    place: str
    text: str = ""

    def __str__(self) -> str:
        return self.place


def _place(line: CodeLine | None) -> str | None:
    """The place of a source line, e.g. 'file.py:12'; None where the line is not known."""
    return None if line is None else line.place


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
    line: CodeLine | None = None  # the source line that created it, if known

    @property
    def mapping(self) -> DimsMapping | None:
        """The mesh axis, axes or None of each dimension, as `mesh_split` takes them.

        None if axes of the mesh cannot express the sharding.
        """
        mapping = self.sharding.OnMesh(self.mesh)
        return (None,) * len(self.shape) if mapping == () else mapping

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one device's part, including padding."""
        return self.sharding.PartShape(self.shape)

    @property
    def padding(self) -> tuple[int, ...]:
        """The number of elements that the parts together have beyond the tensor's own, by dimension."""
        return self.sharding.Padding(self.shape)

    def ToJson(self) -> dict[str, Any]:
        """The tensor as a plain dict, with lists for tuples; `Explanation.ToJson` describes its fields."""
        mapping = self.mapping
        axes = [list(axis) if isinstance(axis, tuple) else axis for axis in mapping or ()]
        return {
            "name": self.name,
            "annotates": self.annotates,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "sharding": self.sharding.Text(),
            "mapping": None if mapping is None else axes,
            "part_shape": list(self.part_shape),
            "padding": list(self.padding),
            "phase": self.phase,
            "in_loop": self.in_loop,
            "line": _place(self.line),
        }

    def __str__(self) -> str:
        return (
            f"{self.name}: {_tensor_type(self.dtype, self.shape)}, {_axes_text(self.sharding, self.mesh)}; "
            f"{_dims(self.part_shape)} on a device"
        )


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective that the partitioner inserted, and the source lines that caused it."""

    what: spmd.Communication  # the collective
    tensor: str = ""  # the name of the moved tensor
    # The line that caused it: the annotation that requests the new sharding, else the annotation that set the old one,
    # else the operation itself.
    line: CodeLine | None = None
    op_line: CodeLine | None = None  # the line of the operation that it was inserted for

    @property
    def total_bytes(self) -> int:
        """Bytes in one run of the program; in one execution if the number of executions is unknown."""
        return self.what.num_bytes * (1 if self.what.times is None else self.what.times)

    def ToJson(self) -> dict[str, Any]:
        """The collective's fields as a plain dict, with the moved tensor and the places of the source lines."""
        source, target = self.what.source, self.what.target
        return dataclasses.asdict(self.what) | {
            "source": source.Text() if source else None,
            "target": target.Text() if target else None,
            "shape": list(self.what.shape),
            "tensor": self.tensor,
            "line": _place(self.line),
            "op_line": _place(self.op_line),
        }


@dataclasses.dataclass(frozen=True)
class WrongNumbers:
    """An operation for which XLA's partitioner computes wrong numbers."""

    fault: known_faults.Fault  # what goes wrong, and the remedy
    # The operation's source line; for a gradient, the line of the forward operation.
    line: CodeLine | None = None

    def ToJson(self) -> dict[str, Any]:
        """The fault's fields as a plain dict, with the place of the source line as `line`."""
        return dataclasses.asdict(self.fault) | {"line": _place(self.line)}

    def __str__(self) -> str:
        return f"{self.line.place}: {self.fault}" if self.line else str(self.fault)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The shardings and the communication of one program, to be looked up, printed, or written as JSON or a page."""

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

        Raises ShardingError: `wrong` has operations whose faults do not depend on the values of arguments; the message
        names each with its line and remedy.
        """
        certain = [wrong for wrong in self.wrong if not wrong.fault.is_conditional]
        known_faults.refuse(certain, self.name)

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
            "wrong": [wrong.ToJson() for wrong in self.wrong],
        }

    def ToHtml(self) -> str:
        """Returns one self-contained HTML page."""
        headline = [
            ("devices", f"{self.mesh.size:,}", ""),
            ("annotated tensors", f"{len(self.tensors):,}", ""),
            ("collectives", f"{len(self.exchanges):,}", ""),
            ("reshards", f"{len(self.reshards):,}", ""),
            ("sent for reshards", units.size(self.Bytes(spmd.RESHARD)), ""),
            ("in all, one device, one run", units.size(self.Bytes()), ""),
        ]
        reasons = [
            Piece(reason, _COLOURS[reason], size, units.size(size))
            for reason in spmd.REASONS
            if (size := self.Bytes(reason))
        ]
        return rendering.html(
            __package__,
            "sharding.html",
            e=self,
            headline=headline,
            reasons=sorted(reasons, key=lambda piece: -piece.value),
            explained=spmd.REASONS,
            flows=_flows(self),
            exchanges=_exchanges_table(self, _MOST_ON_PAGE),
            cards=[t for t in self.tensors if t.phase == "forward"] or self.tensors,
            padding=_padding_text,
            figure=figure,
            axes_text=_axes_text,
            dims=_dims,
            tensor_type=_tensor_type,
        )

    def __str__(self) -> str:
        parts = [f"Program {self.name!r} on mesh {self.mesh}, {self.mesh.size} devices"]
        if self.wrong:
            parts += ["", "WRONG NUMBERS will come out of", *(f"  {wrong}" for wrong in self.wrong)]
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
        rows = [
            [
                _short(t.annotates or t.name),
                _tensor_type(t.dtype, t.shape),
                _axes_text(t.sharding, self.mesh),
                _dims(t.part_shape) + (", padded" if any(t.padding) else ""),
                str(t.line or ""),
            ]
            for t in shown[:_MOST_ROWS]
        ]
        table = Table(words("tensor", "shape", "sharding", "on a device", "line"), rows)
        more = [f"  {len(shown) - _MOST_ROWS} more"] if len(shown) > _MOST_ROWS else []
        return [title, *_lines(table), *more] if shown else [title]

    def _exchanges_text(self) -> list[str]:
        if not self.exchanges:
            return ["No communication"]
        title = (
            f"Communication: {len(self.exchanges)} collectives, {units.size(self.Bytes())} on one "
            f"device in one run"
        )
        said = [title, *_lines(_exchanges_table(self, _MOST_ROWS))]
        if rest := self._Largest()[_MOST_ROWS:]:
            size = units.size(sum(e.total_bytes for e in rest))
            said.append(f"  {len(rest)} more, {size}")
        return said + self._compiled_text()

    def _Largest(self) -> list[Exchange]:
        """The exchanges, the largest first."""
        return sorted(self.exchanges, key=lambda e: -e.total_bytes)

    def _compiled_text(self) -> list[str]:
        made = Counter(exchange.what.kind for exchange in self.exchanges)
        changed = [
            f"{kind} {made[kind]} -> {self.compiled.get(kind, 0)}"
            for kind in sorted(made.keys() | self.compiled.keys())
            if made[kind] != self.compiled.get(kind, 0)
        ]
        if not self.compiled or not changed:
            return []
        return [f"In the compiled program XLA has joined or removed some: {', '.join(changed)}"]


def _lines(table: Table) -> list[str]:
    return [f"  {line}" for line in lines(table)]


def _exchanges_table(explained: Explanation, most: int) -> Table:
    """A row for each of `most` exchanges, the largest first."""
    columns = [*numbers("bytes", "times", "devices"), *words("collective", "why", "tensor", "from")]
    rows = [_exchange_row(exchange, explained.mesh) for exchange in explained._Largest()[:most]]
    return Table([*columns, *words("to", "line")], rows)


def _exchange_row(exchange: Exchange, mesh: Mesh) -> list[str]:
    what = exchange.what
    return [
        units.size(what.num_bytes),
        "?" if what.times is None else f"{what.times:,}",
        f"{what.participants}",
        what.kind,
        what.reason + (f", {what.phase}" if what.phase != "forward" else ""),
        _short(exchange.tensor),
        _axes_text(what.source, mesh) if what.source else "",
        _axes_text(what.target, mesh) if what.target else "",
        str(exchange.line or ""),
    ]


def _axes_text(sharding: TensorSharding, mesh: Mesh) -> str:
    """The mesh axis of each dimension, e.g. 'expert,-,-'; words if axes cannot express the sharding."""
    mapping = sharding.OnMesh(mesh)
    if mapping is None:
        return str(sharding)
    if not any(mapping):
        return "replicated"
    return ",".join("+".join(axes_of(axis)) or "-" for axis in mapping)


def _tensor_type(dtype: str, shape: Sequence[int]) -> str:
    """Element type and shape, e.g. 'f32[8,16]'."""
    return f"{_DTYPES.get(dtype, dtype)}[{','.join(map(str, shape))}]"


def _dims(shape: Sequence[int]) -> str:
    """A shape, e.g. '8x16', or 'scalar'."""
    return "x".join(map(str, shape)) or "scalar"


def _short(name: str) -> str:
    """Drops the prefix 'gradient_tape/'. Of a name that is still longer than 46 characters, keeps '…' and the end."""
    name = name.removeprefix("gradient_tape/")
    return name if len(name) <= _WIDEST else "…" + name[1 - _WIDEST :]


def _flows(explanation: Explanation) -> list[list[Exchange]]:
    """The reshards, the largest first; those of one tensor that follow each other are together."""
    groups: dict[tuple, list[Exchange]] = {}
    for exchange in sorted(explanation.reshards, key=lambda e: -e.total_bytes):
        what = exchange.what
        if what.shape:
            key = (exchange.tensor, what.op, what.shape, what.source, what.phase, what.times)
            groups.setdefault(key, []).append(exchange)
    return list(groups.values())


def _padding_text(tensor: ShardedTensor) -> str:
    """The number of elements that pad each dimension, e.g. '2 of dimension 0, 1 of dimension 3'; '' for none."""
    return ", ".join(
        f"{elements} of dimension {dimension}"
        for dimension, elements in enumerate(tensor.padding)
        if elements
    )
