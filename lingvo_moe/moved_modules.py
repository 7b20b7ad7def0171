"""Modules that had another name in an older version: imports by it work for a release, with a warning."""

import importlib
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CORE, _ANALYSIS = "lingvo_moe.core", "lingvo_moe.analysis"
# Modules and packages; what lies in a package moved with it.
_MOVED = {
    **{f"{_CORE}.{n}": f"{_CORE}.config.{n}" for n in ("registry", "hyperparams", "checks", "class_names")},
    f"{_CORE}.base_input": f"{_CORE}.input.base_input",
    f"{_CORE}.base_task": f"{_CORE}.task.base_task",
    f"{_CORE}.engine.loop.interrupt": f"{_CORE}.console.interrupt",
    f"{_CORE}.engine.aot": f"{_ANALYSIS}.programs.aot",
    **{f"{_CORE}.{n}": f"{_ANALYSIS}.programs.{n}" for n in ("hlo", "partitioner")},
    f"{_CORE}.planner": f"{_ANALYSIS}.plans",
    **{f"{_CORE}.{n}": f"{_ANALYSIS}.search.{n}" for n in ("strategies", "auto_shard", "operators")},
    **{f"lingvo_moe.planning.{n}": f"{_ANALYSIS}.search.{n}" for n in ("parallelizing", "found_strategy", "layouts")},
    "lingvo_moe.planning": f"{_ANALYSIS}.plans",
    "lingvo_moe.inspecting": f"{_ANALYSIS}.explain",
}  # fmt: skip


def current_name(module: str) -> str:
    """The name that a module of an older version has now; its own where it did not move."""
    package, rest = module, ""
    while package.startswith("lingvo_moe."):
        if package in _MOVED:
            return _MOVED[package] + rest
        package, _, last = package.rpartition(".")
        rest = f".{last}{rest}"
    return module


class _MovedModules(MetaPathFinder, Loader):
    """Imports moved modules under both names as one module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if current_name(fullname) == fullname:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        text = f"{name} is {current_name(name)} now; the old name goes with the next release"
        warnings.warn(text, FutureWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module(current_name(name))


def follow_moves() -> None:
    """Makes imports of modules by their old names find them, once."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        # Before the others, which would load a module of a moved package a second time, by its old name.
        sys.meta_path.insert(0, _MovedModules())
