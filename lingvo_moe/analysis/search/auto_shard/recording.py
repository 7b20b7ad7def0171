"""Watches the operations that a TensorFlow function makes while it is traced, and can change what they read.

A function that is traced twice makes the same operations in the same order, so the number of an operation says
which one it is in both traces. `Recording` lists them, and can let each read other tensors than it was given, e.g.
annotated ones. Tapes see what is read, so gradients are right.

Operations in the bodies of loops and of called functions are not seen; the loop or the call is one operation.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lingvo_moe.core.private.tensorflow import creating

# Stands for a tensor from outside; how many there are depends on what TensorFlow has captured before.
_UNCOUNTED = ("Placeholder",)
# (number, type, inputs) -> the inputs to read instead.
Rewrite = Callable[[int, str, Sequence[Any]], Sequence[Any]]


class Recording:
    """Inside, the operations of the default graph, which has to be a function's, are listed.

    Args:
        rewrite: says what each operation reads; None: what it was given.

    Attributes:
        operations: those made so far, in order, without those of `rewrite` and of `Uncounted`.
    """

    def __init__(self, rewrite: Rewrite | None = None):
        self._rewrite, self._busy = rewrite, False
        self.operations: list[Any] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Recording":
        self._stack.enter_context(creating(self._Create))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

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
        if self._rewrite:
            with self.Uncounted():
                inputs = list(self._rewrite(len(self.operations), op_type, inputs))
        op = make(op_type, inputs, *rest, **named)
        self.operations.append(op)
        return op

    @contextlib.contextmanager
    def Uncounted(self) -> Iterator[None]:
        """Operations made inside are no part of the function."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before
