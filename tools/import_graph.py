"""The graph of imports among this repository's Python files, read from the sources without running them."""

import ast
import functools
import graphlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lingvo_moe", "params", "reproduction", "tools", "benchmarks")
TESTS = "tests"

# In a test's strings: a module that it starts (`python -m tools.export`) or an experiment (`mt.Name`).
_MODULE_IN_TEXT = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_EXPERIMENT_IN_TEXT = re.compile(r"\b(mt(?=\.\w)|lm(?=\.\w)|image(?=\.[A-Z]))")
_REGISTRY = "lingvo_moe.core.config.registry"
_EVERY_EXPERIMENT = "AllNames"  # of the registry
_PARAMS_OF_A_TASK = re.compile(r"lingvo_moe\.params\.\w+")
_LOOKED_UP_BY_NAME = "lingvo_moe.params.mt"
_ENGINES = "lingvo_moe.core.engine."
_ASKED_BY_ENGINES = "lingvo_moe.analysis.programs.for_engines"  # lingvo_moe.PROGRAM_ANALYSIS
# Directories beside lingvo_moe whose packages are in it: see lingvo_moe/__init__.py.
_INSIDE = ("params", "reproduction", "tools")


class ImportGraph:
    """The first-party imports between the files of a source tree; paths are relative, with slashes."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.files = sorted(_python_files(root))
        self._modules = {name: path for path in self.files for name in module_names(path)}

    @functools.cache  # noqa: B019 - a graph lives as long as its process
    def Syntax(self, path: str) -> ast.Module:
        return ast.parse((self.root / path).read_text(encoding="utf-8"), path)

    @functools.cache  # noqa: B019
    def ImportedNames(self, path: str) -> frozenset[str]:
        """Dotted names as imported, in functions too.

        `from a import b` gives a.b, and a as well unless a.b is a module of ours: that a/__init__.py
        runs on the way there is then no wish of the importer's.
        """
        names: set[str] = set()
        for node in _statements(self.Syntax(path)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(path, node)
                targets = {f"{base}.{alias.name}" for alias in node.names}
                names |= targets
                if not targets <= self._modules.keys():
                    names.add(base)
        return frozenset(names)

    @functools.cache  # noqa: B019
    def Imports(self, path: str) -> frozenset[str]:
        """The files that `path` imports; never itself."""
        files = {self._modules[n] for n in self.ImportedNames(path) if n in self._modules}
        return frozenset(files - {path})

    @functools.cache  # noqa: B019
    def Needs(self, path: str) -> frozenset[str]:
        """The files that `path` imports or finds by their names when it runs; never itself."""
        return self.Imports(path) | (self._NeededByName(path) - {path})

    @functools.cache  # noqa: B019
    def Closure(self, path: str) -> frozenset[str]:
        """Everything that `path` needs, directly or not."""
        seen: set[str] = set()
        todo = [path]
        while todo:
            new = self.Needs(todo.pop()) - seen
            seen |= new
            todo.extend(new)
        return frozenset(seen)

    def Circle(self) -> list[str]:
        """Files that import each other in a circle, also in functions, from one back to itself; [] if none do."""
        return circle({path: self.Imports(path) for path in self.files})

    def _NeededByName(self, path: str) -> set[str]:
        names: set[str] = set()
        inner = path.startswith(("lingvo_moe/core/", "lingvo_moe/tasks/", "params/"))
        if _REGISTRY in self.ImportedNames(path) and not inner:
            names.add(_LOOKED_UP_BY_NAME)
        outer = not path.startswith(("lingvo_moe/core/", "lingvo_moe/analysis/"))
        if outer and any(name.startswith(_ENGINES) for name in self.ImportedNames(path)):
            names.add(_ASKED_BY_ENGINES)
        if path.startswith(f"{TESTS}/"):
            for node in ast.walk(self.Syntax(path)):
                if isinstance(node, ast.Attribute) and node.attr == _EVERY_EXPERIMENT:
                    names.update(
                        name for name in self._modules if _PARAMS_OF_A_TASK.fullmatch(name)
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.update(_MODULE_IN_TEXT.findall(node.value))
                    tasks = _EXPERIMENT_IN_TEXT.findall(node.value)
                    names.update(f"lingvo_moe.params.{task}" for task in tasks)
        return {self._modules[n] for n in names if n in self._modules}


@functools.cache
def repository() -> ImportGraph:
    """The graph of this repository, read once a process."""
    return ImportGraph()


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, at any depth: far fewer nodes than with their expressions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting.extend(getattr(node, field, ()))


def circle(imports: Mapping[str, Collection[str]]) -> list[str]:
    """Keys that import each other in a circle, from one back to itself; [] if none do."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]  # from an importer to what it imports
    return []


def _python_files(root: Path) -> Iterator[str]:
    for top in (*PACKAGES, TESTS):
        for directory, subdirectories, names in os.walk(root / top):
            subdirectories[:] = [d for d in subdirectories if d != "__pycache__"]
            for name in names:
                if name.endswith(".py"):
                    yield (Path(directory) / name).relative_to(root).as_posix()


def module_names(path: str) -> list[str]:
    """The names under which a file can be imported."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return [name, f"lingvo_moe.{name}"] if name.partition(".")[0] in _INSIDE else [name]


def _absolute(path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = Path(path).parts[: -node.level]
    return ".".join([*package, node.module] if node.module else package)
