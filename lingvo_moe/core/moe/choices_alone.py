"""Whether routers are asked for nothing but who goes where.

Where nothing is ever dropped and nobody looks at losses and metrics, as in a search, all that counts is which
experts a token has and by how much. XLA removes the rest from a program; TensorFlow's own kernels would load it,
optimise it and, in a loop, run it.
"""

import contextlib
import contextvars
from collections.abc import Iterator

_current: contextvars.ContextVar[bool] = contextvars.ContextVar("choices_alone", default=False)


@contextlib.contextmanager
def choices_alone() -> Iterator[None]:
    """In what is traced inside, a routing has choices and gates, but positions of zero, no loss and no metrics."""
    token = _current.set(True)
    try:
        yield
    finally:
        _current.reset(token)


def is_choices_alone() -> bool:
    """See `choices_alone`."""
    return _current.get()
