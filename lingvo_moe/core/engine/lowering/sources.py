"""Finds the source line that the user wrote for each TensorFlow operation of a traced function.

Tracing keeps only TensorFlow's own tracebacks, which cost nothing until they are read. The line of an
operation is the innermost frame that is neither in a library nor in this package's plumbing. The line
of a gradient is that of its forward operation.
"""

import contextlib
import functools
import re
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_moe.core.console.source_lines import SourceLine, is_model_code
from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.randomness import is_draw

_TAPE = "gradient_tape"
# Operations that return their input and leave nothing in the compiled program.
_SAME_VALUE = frozenset(
    ["Identity", "IdentityN", "StopGradient", "PreventGradient", "EnsureShape", "Snapshot"]
)
_ANNOTATION = "XlaSharding"
# TensorFlow's messages. Where an operation was made stands between its name and why it failed.
_RUNNING = re.compile(r"Detected at node (\S+) defined at .*\n(?:(?:  File .*|<.*>|)\n)*(.+)")
_NODE = re.compile(r"\{\{node ([^}\s]+)\}\}()")
_NO_KERNEL = re.compile(r"No registered '(\w+)' OpKernel")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_READING = _SAME_VALUE | {_ANNOTATION}


class _Entry(NamedTuple):
    line: SourceLine | None = None  # not the traceback, which lives no longer than its graph
    type: str = ""
    reads: str = ""
    forward: str = ""


_UNKNOWN = _Entry()


class Sources:
    """Looks up a traced function's operations by name.

    Operations in the bodies of loops and branches are known by the names that they have there.
    """

    def __init__(self, entries: dict[str, _Entry]):
        self._entries = entries

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """The names of all operations."""
        return list(self._entries)

    def Line(self, name: str) -> SourceLine | None:
        """The user's source line of operation `name`, or, for a gradient, of its forward operation.

        An operation of a call that has a name of its own, as draws of random bits have, has the line of the call.
        """
        caller = name
        while caller and caller not in self._entries:
            caller = caller.rpartition("/")[0]
        if self._entries.get(caller, _UNKNOWN).type in _CALLS:
            return self._entries[caller].line
        return self._entries.get(name, _UNKNOWN).line

    def Same(self, name: str) -> list[str]:
        """`name`, followed by the operations whose value it forwards, e.g. through tf.identity."""
        names = [name]
        entry = self._entries.get(name, _UNKNOWN)
        while entry.type in _SAME_VALUE and entry.reads not in names:
            names.append(entry.reads)
            entry = self._entries.get(entry.reads, _UNKNOWN)
        return names

    def Annotated(self, name: str) -> str:
        """The operation whose tensor the annotation `name` annotates; '' for any other operation."""
        entry = self._entries.get(name, _UNKNOWN)
        return entry.reads if entry.type == _ANNOTATION else ""

    def Forward(self, name: str) -> str:
        """The forward operation of the gradient operation `name`; '' if it is no gradient."""
        return self._entries.get(name, _UNKNOWN).forward


def record(graph: tf.Graph) -> Sources:
    """The operations of a traced function and of all functions that it calls."""
    entries: dict[str, _Entry] = {}
    waiting, seen = [graph], {id(graph)}
    while waiting:
        graph = waiting.pop(0)
        operations = graph.get_operations()
        annotations = _annotations_of_gradients(operations)
        for op in operations:
            # Reading a traceback is dear, and names return in copies of a function.
            if op.name in entries:
                continue
            original = private.forward_operation(op) or annotations.get(op.name)
            reads = ""
            if op.type in _READING and len(op.inputs) == 1:
                reads = op.inputs[0].op.name
            line = _user_line((op if original is None else original).traceback)
            forward = "" if original is None else original.name
            entries[op.name] = _Entry(line, op.type, reads, forward)
        draws = {op.get_attr("f").name for op in operations if is_draw(op)}  # known by the calls
        for name, inner in private.inner_graphs(graph).items():
            if id(inner) not in seen and name not in draws:
                seen.add(id(inner))
                waiting.append(inner)
    return Sources(entries)


def failed_operation(message: str, graph: tf.Graph) -> str:
    """Says with the user's line which operation failed, by TensorFlow's message about a function that it compiles or
    runs; '' where the message names none.
    """
    failed = _RUNNING.search(message) or _NODE.search(message)
    if failed is None:
        return ""
    node, why = failed.groups()
    line = record(graph).Line(node)
    at = f"{line} in {line.function}: {line.text}: " if line else ""
    if (kind := _NO_KERNEL.search(message)) is None:
        return f"{at}{why or message} (operation {node!r})"
    return (
        f"{at}XLA has no operation {kind[1]} ({node!r}); leave out what prints, calls Python or makes text, or run it "
        "with --engine=tf_graph, on one CPU device"
    )


def remembering_forward() -> contextlib.AbstractContextManager[None]:
    """Inside the block, operations that a GradientTape adds to a graph record their forward operation.

    TensorFlow's older `tf.gradients` does this itself.
    """

    def around(usual: private.Gradient) -> private.Gradient:
        @functools.wraps(usual)
        def gradient(op_name: str, attrs: Any, count: int, inputs: Any, outputs: Any, *rest: Any):
            forward = _forward_op(op_name, inputs, outputs)
            if forward is None:
                return usual(op_name, attrs, count, inputs, outputs, *rest)
            with private.recording_forward(forward):
                return usual(op_name, attrs, count, inputs, outputs, *rest)

        return gradient

    return private.differentiating(around)


def _forward_op(op_name: str, inputs: Any, outputs: Any) -> Any:
    """The operation with these inputs and outputs; None if they do not determine it.

    The tape drops inputs and outputs that the gradient does not need.
    """
    if tf.executing_eagerly():
        return None
    for tensor in outputs or ():
        op = getattr(tensor, "op", None)
        if op is not None and op.type == op_name:
            return op
    for tensor in inputs or ():
        if getattr(tensor, "op", None) is not None:
            users = (op for op in tensor.consumers() if op.type == op_name)
            return next((op for op in users if _takes(op, inputs)), None)
    return None


def _takes(op: Any, inputs: Any) -> bool:
    return len(op.inputs) == len(inputs) and all(
        want is None or want.name == taken.name for want, taken in zip(inputs, op.inputs)
    )


def _annotations_of_gradients(operations: list[Any]) -> dict[str, Any]:
    """Name of an annotation that a tape made -> the annotation that it is the gradient of.

    The tape records nothing about them. They are matched by sharding, shape and name scope; several
    matches are paired in reverse order.
    """
    waiting: dict[tuple, list[Any]] = {}
    originals: dict[str, Any] = {}
    for op in operations:
        if op.type != _ANNOTATION:
            continue
        scope = op.name.rpartition("/")[0]
        is_gradient = scope == _TAPE or scope.startswith(f"{_TAPE}/")
        scope = scope[len(_TAPE) + 1 :] if is_gradient else scope
        key = (scope, op.get_attr("sharding"), str(op.outputs[0].shape))
        if not is_gradient:
            waiting.setdefault(key, []).append(op)
        elif waiting.get(key):
            same = waiting[key]
            originals[op.name] = same.pop() if len(same) > 1 else same[0]
    return originals


def _user_line(traceback: Any) -> SourceLine | None:
    for place in range(len(traceback or ()) - 1, -1, -1):
        frame = traceback[place]
        if is_model_code(frame.filename):
            return SourceLine(frame.filename, frame.lineno, frame.name)
    return None
