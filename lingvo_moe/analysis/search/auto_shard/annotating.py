"""Puts the annotations of a strategy onto a function while it is traced."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.analysis.search.auto_shard.recording import Recording
from lingvo_moe.analysis.search.auto_shard.strategy import Strategy
from lingvo_moe.core.private.tensorflow import record, tapes
from lingvo_moe.core.sharding import ShardingError, mesh_split
from lingvo_moe.core.sharding.annotate import free_letters
from lingvo_moe.core.sharding.letters import DimsMapping


def annotated(call: Callable[[], Any], strategy: Strategy, name: str) -> Any:
    """Calls a function whose tensors are those of the graph that is being traced, with annotations.

    Raises:
        ShardingError: the function makes other operations than when the strategy was found.
    """
    with free_letters(), _Annotating(strategy, name):
        return call()


class _Annotating(Recording):
    """Annotates the tensors that each operation reads, as a strategy says."""

    def __init__(self, strategy: Strategy, name: str):
        super().__init__(self._Inputs)
        self._strategy, self._name = strategy, name
        self._reads = {(r.op, r.operand): r for r in strategy.reads}
        self._types = {r.op: r.type for r in strategy.reads}
        self._made = {(t.op, t.index): t for t in strategy.operators}
        self._types |= {t.op: t.type for t in strategy.operators}
        self._known = 0
        self._places: dict[Any, tuple[int, int]] = {}
        self._versions: dict[tuple[Any, DimsMapping], Any] = {}

    def _Inputs(self, number: int, kind: str, inputs: Sequence[Any]) -> list[Any]:
        if self._types.get(number, kind) != kind:
            raise ShardingError(
                f"{self._name}: operation {number} is a {kind}, but was a {self._types[number]} when the strategy "
                "was found; a function under auto_shard makes the same operations whenever it is traced"
            )
        for done in range(self._known, len(self.operations)):
            for i, tensor in enumerate(self.operations[done].outputs):
                if (done, i) in self._made:
                    self._places[tensor.ref()] = (done, i)
        self._known = len(self.operations)
        return [self._Read(number, i, x) for i, x in enumerate(inputs)]

    def _Read(self, number: int, operand: int, x: Any) -> Any:
        if not isinstance(x, tf.Tensor):
            return x
        place = self._places.get(x.ref())
        if place is not None:
            made = self._made[place]
            x = self._Version(x, made.shape, made.mapping)
        read = self._reads.get((number, operand))
        return x if read is None else self._Version(x, read.shape, read.mapping)

    def _Version(self, x: Any, shape: Sequence[int], mapping: DimsMapping) -> Any:
        """The tensor with an annotation; each is made once."""
        if tuple(x.shape) != tuple(shape):
            raise ShardingError(
                f"{self._name}: {x.name} has shape {list(x.shape)}, but had {list(shape)} when the strategy was found"
            )
        if not shape or self._strategy.mesh.size == 1:
            return x
        key = (x.ref(), mapping)
        # A tape that began to watch the tensor after it was annotated would not see the annotated one.
        if key not in self._versions or tapes(x) > tapes(self._versions[key]):
            self._versions[key] = self._Annotated(x, mapping)
        return self._versions[key]

    def _Annotated(self, x: Any, mapping: DimsMapping) -> Any:
        """An annotation whose gradient, which annotates likewise, is no operation of the function either."""
        mesh = self._strategy.mesh
        with record.stop_recording():
            y = mesh_split(x, mesh, mapping)
        scope = y.op.name.rpartition("/")[0]

        def gradient(dy: Any) -> list[Any]:
            # As TensorFlow names gradients, so that explain finds what they belong to.
            with self.Uncounted(), tf.name_scope(f"gradient_tape/{scope}/".replace("//", "/")):
                return [mesh_split(dy, mesh, mapping)]

        record.record_operation("XlaSharding", [y], [x], gradient)
        return y
