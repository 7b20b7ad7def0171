"""Lines of Python files, and who wrote them: the user, this package's model code, its plumbing, or a library."""

import functools
import linecache
import os
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = os.fspath(Path(__file__).absolute().parents[2])
_CHECKOUT = os.path.dirname(_PACKAGE)
# In a checkout; in an installed package they lie inside it.
_BESIDE = ("tools", "params", "reproduction")
_OURS = (
    os.path.join(_PACKAGE, ""),
    *(os.path.join(_CHECKOUT, n, "") for n in _BESIDE if not os.path.isdir(f"{_PACKAGE}/{n}")),
)
# What annotates, traces, wraps and configures on behalf of the user's code.
_PLUMBING = tuple(
    os.path.join(_PACKAGE, *names)
    for names in (
        ("analysis", "search", "auto_shard", ""),
        ("core", "config", ""),
        ("core", "sharding", ""),
        ("core", "engine", ""),
        ("core", "private", ""),
        ("core", "base_layer.py"),
        ("core", "nested_map.py"),
        ("analysis", "explain", "explaining.py"),
        ("xla_sharding.py",),
    )
)
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# AutoGraph's copies of functions lie in the directory for temporary files.
_GENERATED = ("<frozen", "<__array_function__", "__autograph_generated_file")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


@dataclass(frozen=True)
class SourceLine:
    """A line of a Python file."""

    file: str  # the path, as Python names it
    line: int  # its number, from 1
    function: str = ""  # the function that holds the line

    @property
    def text(self) -> str:
        """The text of the line, without indentation; '' if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{_shortest(self.file)}:{self.line}"


@functools.lru_cache(maxsize=4096)
def is_ours(filename: str) -> bool:
    """Whether a file belongs to this package or its tools."""
    return os.path.abspath(filename).startswith(_OURS)


@functools.lru_cache(maxsize=4096)
def is_model_code(filename: str) -> bool:
    """Whether a file is the user's, or defines layers and tasks in this package: no library, and no plumbing."""
    if is_ours(filename):
        return not os.path.abspath(filename).startswith(_PLUMBING)
    if any(part in filename for part in (*_GENERATED, *_LIBRARIES)):
        return False
    return not os.path.abspath(filename).startswith(_STANDARD_LIBRARY)


@functools.lru_cache(maxsize=4096)
def _shortest(filename: str) -> str:
    """The path relative to the working directory or to this package's root, whichever is shorter."""
    roots = (os.getcwd(), _CHECKOUT)
    inside = [os.path.relpath(filename, r) for r in roots if filename.startswith(r + os.sep)]
    return min([filename, *inside], key=len)
