"""Explanation: the sharding of a program's tensors, the collectives, and the source lines behind them."""

from typing import Any

from lingvo_moe.core.console import units
from lingvo_moe.core.pages.tables import Table, lines, words
from lingvo_moe.core.partitioner import known_faults
from lingvo_moe.core.partitioner.explained import (
    Explained,
    ShardedTensor,
    axes_text,
    dims,
    exchanges_table,
    short,
    tensor_type,
)
from lingvo_moe.core.partitioner.sharding_page import html_page

VERSION = 1
_MOST_ROWS = 40


class Explanation(Explained):
    """An `Explained` program whose tensors can be looked up by name, printed, and written as JSON or a page."""

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

        Raises ShardingError: `wrong` is not empty; the message names each operation with its line and remedy.
        """
        known_faults.refuse(self.wrong, self.name)

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
        rows = [
            [
                short(t.annotates or t.name),
                tensor_type(t.dtype, t.shape),
                axes_text(t.sharding, self.mesh),
                dims(t.part_shape) + (", padded" if any(t.padding) else ""),
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
        ordered = sorted(self.exchanges, key=lambda e: -e.total_bytes)
        said = [title, *_lines(exchanges_table(self, _MOST_ROWS))]
        rest = ordered[_MOST_ROWS:]
        if rest:
            held = units.size(sum(e.total_bytes for e in rest))
            said.append(f"  {len(rest)} more, {held}")
        return said + self._compiled_text()

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


def _lines(table: Table) -> list[str]:
    return [f"  {line}" for line in lines(table)]
