"""Silences standard error while a library loads that has no setting for it."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(refusal: type[Exception] | None = None) -> Iterator[None]:
    """Silences standard error inside the block, also for native code.

    If the block fails, the suppressed output is printed, unless its error is a `refusal`, which says it all.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said, contextlib.ExitStack() as stack:
        stderr = os.dup(2)
        stack.callback(os.close, stderr)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException as e:
            said.seek(0)
            if refusal is None or not isinstance(e, refusal):
                os.write(stderr, said.read())
            raise
        finally:
            os.dup2(stderr, 2)
