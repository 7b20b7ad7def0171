"""Silence on standard error while a library that cannot be told is loaded, or loads something."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps libraries from writing to standard error, native code included, as some do whatever they are told.

    Where the block fails, what they said is shown.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said, contextlib.ExitStack() as stack:
        stderr = os.dup(2)
        stack.callback(os.close, stderr)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(stderr, said.read())
            raise
        finally:
            os.dup2(stderr, 2)
