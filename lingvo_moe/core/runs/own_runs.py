"""Recognises the runs that this user made, by an HMAC-SHA256 of experiment.json with a key of this user's.

The key, `lingvo_moe/key` in XDG_CONFIG_HOME or `~/.config`, is made when first needed; only its owner can read it.
A run by somebody else, or one whose experiment.json was changed, has no mark that this key gives.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from lingvo_moe.core.console.command import say

_BYTES = 32


def make_mark(description: bytes) -> bytes | None:
    """The mark of a run that this user makes.

    Returns:
        The digits of the HMAC; None where there is no key and none can be made, which a line on standard error says.
    """
    try:
        with contextlib.suppress(FileExistsError):
            _make_key()
        return _mark(description)
    except (OSError, RuntimeError) as e:
        say(
            "warning: the run gets no mark as one of yours, so that commands ask for --trust_run where it names "
            f"classes outside lingvo_moe: {e}"
        )
        return None


def is_own(mark: bytes, description: bytes) -> bool:
    """Whether this user's key gives this mark; False where there is no key, or one that others can read."""
    try:
        return hmac.compare_digest(mark, _mark(description))
    except (OSError, RuntimeError):
        return False


def _key_file() -> Path:
    """Raises RuntimeError: there is no home directory."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "lingvo_moe" / "key"


def _make_key() -> None:
    """Makes the key complete at once, for other processes may make it too. Raises FileExistsError: there is one."""
    path = _key_file()
    if path.exists():
        raise FileExistsError(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # for its owner alone
        file.write(secrets.token_bytes(_BYTES))
        file.flush()
        os.link(file.name, path)


def _mark(description: bytes) -> bytes:
    """Raises OSError: no key, one that others can read or may have written, or one of another length."""
    path = _key_file()
    with open(path, "rb") as file:
        about = os.fstat(file.fileno())
        key = file.read(_BYTES + 1)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise PermissionError(f"{path} must be readable for you alone: chown it, then chmod 600")
    if len(key) != _BYTES:
        raise OSError(f"{path} has not {_BYTES} bytes; delete it, and a new key is made")
    return hmac.new(key, description, hashlib.sha256).hexdigest().encode()
