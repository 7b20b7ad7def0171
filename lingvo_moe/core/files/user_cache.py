"""The directory of this user's caches, which may be deleted at any time."""

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """`lingvo_moe` in XDG_CACHE_HOME, or in `~/.cache`; it may not be there yet.

    Raises RuntimeError: there is no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lingvo_moe"
