"""The limits of a server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits, which are checked before any work is done, so that one client's request costs others little."""

    max_body_bytes: int = 1 << 20  # the largest body of a request
    max_lines: int = 128  # the most lines of a request
    max_line_chars: int = 10_000  # the longest line. The model sees fewer tokens: `truncated`
    # The lines of all requests, those being translated too; at least max_lines.
    max_waiting_lines: int = 1024
    max_connections: int = 256  # open at once
    cache_mib: int = 1024  # keys and values of all texts that a language model continues
    request_timeout: float = 60.0  # seconds from a whole request to its translations
    # Seconds for a client to send headers, then for it to send a body, to take the answer, and to come back on a
    # connection that it keeps open.
    read_timeout: float = 20.0
    shutdown_timeout: float = 30.0  # seconds that requests have to end when the server is stopped
    # By which browsers may call it, besides localhost and addresses; None for any. See callers.py.
    server_names: tuple[str, ...] | None = ()
