"""A TensorFlow function of weights whose graph is kept for the next start, since tracing takes longer than reading."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core.engine.kept_programs import find_bytes, keep_bytes, name_of


class KeptGraph:
    """A function of tensors and of variables, which is traced at its first call unless its graph is kept.

    Args:
        function: returns a dictionary of tensors. Beside its arguments it reads the variables, and nothing else.
        specs: those of its arguments, or a function that returns them, which is called only before a trace.
        variables: their values may be others at the next start, not their order, shapes and types.
        key: see `key_of`; '' keeps nothing.
    """

    def __init__(
        self,
        function: Callable[..., dict[str, tf.Tensor]],
        specs: Sequence[tf.TensorSpec] | Callable[[], Sequence[tf.TensorSpec]],
        variables: Sequence[tf.Variable],
        key: str = "",
    ):
        self._function, self._specs, self._variables = function, specs, variables
        self._key = key
        self._call: Callable[..., dict[str, tf.Tensor]] | None = None

    def __call__(self, *args: Any) -> dict[str, tf.Tensor]:
        if self._call is None:
            with tf.init_scope():  # where another function is traced
                content = find_bytes(self._key)
                self._call = self._Traced() if content is None else self._Read(content)
        return self._call(*args)

    def _Traced(self) -> Callable[..., dict[str, tf.Tensor]]:
        """The function, traced, and kept."""
        specs = self._specs() if callable(self._specs) else self._specs
        function = tf.function(self._function, input_signature=specs, autograph=False)
        concrete = function.get_concrete_function()
        numbers = {id(variable.handle): i for i, variable in enumerate(self._variables)}
        captured = [numbers.get(id(x)) for x in concrete.captured_inputs]
        if self._key and None not in captured:
            names = sorted(concrete.structured_outputs)  # the order of outputs
            about = {
                "inputs": [x.name for x in concrete.inputs],
                "specs": [(x.shape.as_list(), x.dtype.name) for x in specs],
                "captured": captured,
                "outputs": {name: x.name for name, x in zip(names, concrete.outputs, strict=True)},
            }
            head = json.dumps(about).encode() + b"\n"
            keep_bytes(self._key, head + concrete.graph.as_graph_def().SerializeToString())
        return concrete  # which looks for no other trace

    def _Read(self, content: bytes) -> Callable[..., dict[str, tf.Tensor]]:
        """The function of a graph that was kept."""
        head, _, graph = content.partition(b"\n")
        about = json.loads(head)
        definition = tf.compat.v1.GraphDef.FromString(graph)

        def imported(*inputs: tf.Tensor) -> list[tf.Tensor]:
            input_map = dict(zip(about["inputs"], inputs, strict=True))
            outputs = list(about["outputs"].values())
            return tf.graph_util.import_graph_def(definition, input_map, outputs, name="")

        handles = [self._variables[i].handle for i in about["captured"]]
        specs = [tf.TensorSpec(shape, dtype) for shape, dtype in about["specs"]]
        specs += [*(tf.TensorSpec(x.shape, x.dtype) for x in handles)]
        function = tf.compat.v1.wrap_function(imported, specs)

        def call(*args: Any) -> dict[str, tf.Tensor]:
            outputs = function(*map(tf.convert_to_tensor, args), *handles)
            return dict(zip(about["outputs"], outputs, strict=True))

        return call


def key_of(kind: str, text: str, variables: Sequence[tf.Variable], *parts: Any) -> str:
    """The name under which a graph of variables is kept, see `name_of`; '' where the text is."""
    shapes = [(x.shape.as_list(), x.dtype.name) for x in variables]  # as packed for the processor
    return name_of(kind, text, *parts, shapes) if text else ""
