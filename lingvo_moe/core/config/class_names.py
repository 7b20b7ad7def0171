"""Classes by name: text such as `type/my.module/MyRouter` in Params and overrides, and short names such as `top2`.

Importing a module runs its code. So text that the user typed may name any class, and text that somebody else may have
written, a run's, only the classes of this package.
"""

import importlib
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

TRUST_RUN_HELP = (
    "import classes outside lingvo_moe that a run by somebody else names; they are their code"
)

_OWN = __name__.partition(".")[0]
NOT_OWN = (
    f"{{!r}} is not of {_OWN}, so it is not imported: it would be code by whoever made the run; "
    "--trust_run imports it"
)
# Packages inside lingvo_moe in a wheel and in a checkout; there, others are directories of the repository.
_OWN_MODULE = re.compile(rf"{_OWN}\.(core|tasks)(\.[A-Za-z_][A-Za-z0-9_]*)+")


def current_name(module: str) -> str:
    """The name that a module of an older version has now: see lingvo_moe/__init__.py."""
    return importlib.import_module(_OWN).current_name(module)


def with_modules_as_now(text: str) -> str:
    """A text with `type/module/Class` by an older version as this one writes it."""
    return re.sub(rf"\btype/({_OWN}[\w.]+)/", lambda m: f"type/{current_name(m[1])}/", text)


class ClassesByName(Mapping[str, type]):
    """Classes by short names; a class is imported when it is asked for."""

    def __init__(self, paths: Mapping[str, str]):
        """`paths` gives for each name the module and the class, 'package.module.Class'."""
        self._paths = dict(paths)

    def __getitem__(self, name: str) -> type:
        module, _, cls = self._paths[name].rpartition(".")
        return getattr(importlib.import_module(module), cls)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def any_class(text: str) -> type:
    """The class that `type/<module>/<name>` names, in any module that can be imported; runs that module's code.

    Raises ValueError: no such class, or text of another form.
    """
    module, name = _parts(text)
    wrong = f"{text!r} names no class; expected 'type/module/Class'"
    try:
        value = getattr(importlib.import_module(module), name, None)
    except Exception as e:
        raise ValueError(f"{wrong} ({failed_import(module, e)})") from e
    if value is None:
        raise ValueError(f"{wrong} ({module} has no {name})")
    if not isinstance(value, type):
        raise ValueError(f"{text!r} is no class")
    return value


def failed_import(module: str, error: Exception) -> str:
    """Says why a module cannot be imported, with the last line outside this package, if there is one."""
    ours = (str(Path(__file__).parents[2]), "<frozen importlib", importlib.__file__)
    lines = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)
    ]
    at = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
    return f"importing {module} failed: {type(error).__name__}: {error}{at}"


def own_class(text: str) -> type:
    """Finds a class of lingvo_moe that has Params, as any_class does; imports no module of another package.

    Raises ValueError: as any_class, or another class.
    """
    module, _ = _parts(text)
    # A package looks for its modules in its own directory, so none of these can come from elsewhere.
    if not _OWN_MODULE.fullmatch(module):
        raise ValueError(NOT_OWN.format(text))
    cls = any_class(text)
    if not cls.__module__.startswith(f"{_OWN}.") or not hasattr(cls, "Params"):
        raise ValueError(f"{text!r} is no class of {_OWN} that has Params")
    return cls


def _parts(text: str) -> tuple[str, str]:
    """Module and class of `type/<module>/<name>`."""
    parts = with_modules_as_now(text).split("/")
    if len(parts) != 3 or parts[0] != "type":
        raise ValueError(f"{text!r} names no class; expected 'type/module/Class'")
    return parts[1], parts[2]
