"""Watches the operations that a TensorFlow function makes while it is traced, and can change what they read.

A function that is traced twice makes the same operations in the same order, so the number of an operation says
which one it is in both traces. `recorded` lists them; `rewriting` lets each read other tensors than it was given,
e.g. annotated ones. Tapes see what is read, so gradients are right.

TensorFlow has no public way to do this: the method of the graph that makes operations is replaced, in this file only.
Operations in the bodies of loops and of called functions are not seen; the loop or the call is one operation.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# Stands for a tensor from outside; how many there are depends on what TensorFlow has captured before.
_UNCOUNTED = ("Placeholder",)
# (number, type, inputs) -> the inputs to read instead.
Rewrite = Callable[[int, str, Sequence[Any]], Sequence[Any]]


@contextlib.contextmanager
def recorded() -> Iterator[list[Any]]:
    """Inside, the list fills with the operations of the default graph, in order. The graph has to be a function's."""
    operations: list[Any] = []

    def create(
        make: Callable[..., Any], op_type: str, inputs: Sequence[Any], *rest: Any, **named: Any
    ):
        op = make(op_type, inputs, *rest, **named)
        if op_type not in _UNCOUNTED:
            operations.append(op)
        return op

    with _creating(create):
        yield operations


class Rewriting:
    """Inside, each operation reads what `rewrite` says.

    Attributes:
        operations: those made so far, in order, without those of `rewrite` and of `Uncounted`.
    """

    def __init__(self, rewrite: Rewrite):
        self._rewrite, self._busy = rewrite, False
        self.operations: list[Any] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Rewriting":
        self._stack.enter_context(_creating(self._Create))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def Uncounted(self) -> Iterator[None]:
        """Operations made inside are no part of the function."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _Create(
        self,
        make: Callable[..., Any],
        op_type: str,
        inputs: Sequence[Any],
        *rest: Any,
        **named: Any,
    ) -> Any:
        if self._busy or op_type in _UNCOUNTED:
            return make(op_type, inputs, *rest, **named)
        with self.Uncounted():
            inputs = list(self._rewrite(len(self.operations), op_type, inputs))
        op = make(op_type, inputs, *rest, **named)
        self.operations.append(op)
        return op


@contextlib.contextmanager
def _creating(create: Callable[..., Any]) -> Iterator[None]:
    graph = tf.compat.v1.get_default_graph()
    make = graph._create_op_internal

    def instead(op_type: str, inputs: Sequence[Any], *rest: Any, **named: Any) -> Any:
        return create(make, op_type, inputs, *rest, **named)

    graph._create_op_internal = instead
    try:
        yield
    finally:
        del graph._create_op_internal
