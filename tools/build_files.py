"""Writes the BUILD files from the import graph, so that nobody keeps dependencies by hand.

    python -m tools.build_files            # write
    python -m tools.build_files --check    # only list those out of date; exit with 1 if any is

A package directory is one library, or a few: modules that use subpackages are in another one than the
modules (`base`, `base1`, ...) that those subpackages use in turn, or the two would need each other.
A directory of tests is one test. tests/house has none: it looks at the source tree itself, which Bazel
does not show to a test.
"""

import posixpath
from collections.abc import Iterable, Sequence
from pathlib import Path

from lingvo_moe.core.console.command import run
from lingvo_moe.core.console.flags import Flags

from .import_graph import ROOT, TESTS, ImportGraph, repository

_HEADER = "# Written by `make build-files` from the imports of the sources.\n"
_NOT_TESTED_BY_BAZEL = "tests/house"
_MAIN = "tests/run_pytest.py"
_BASE = "base"
_HELPERS = "helpers"
_TESTDATA = "testdata"
_TEMPLATES = "templates"


def build_files(root: Path = ROOT) -> dict[str, str]:
    """The text of every BUILD file that belongs beside Python sources, by path."""
    graph = repository() if root == ROOT else ImportGraph(root)
    labels = _label_files(graph)
    packages: dict[str, list[str]] = {}
    for path in graph.files:
        packages.setdefault(posixpath.dirname(path), []).append(path)
    return {
        f"{package}/BUILD": _render(graph, labels, package, files)
        for package, files in packages.items()
        if package != _NOT_TESTED_BY_BAZEL
    }


def _is_test(path: str) -> bool:
    return path.startswith(f"{TESTS}/") and posixpath.basename(path).startswith("test_")


def _label_files(graph: ImportGraph) -> dict[str, str]:
    """The library of each file that is in one."""
    labels = {}
    modules: dict[str, list[str]] = {}
    for path in graph.files:
        if not path.startswith(f"{TESTS}/"):
            modules.setdefault(posixpath.dirname(path), []).append(path)
        elif not _is_test(path) and path != _MAIN:
            labels[path] = f"//{posixpath.dirname(path)}:{_HELPERS}"
    levels = {package: _levels(graph, files) for package, files in modules.items()}
    for package, files in levels.items():
        used = sorted(set(files.values()))
        names = [_BASE + (str(i) if i else "") for i in range(len(used) - 1)]
        names.append(posixpath.basename(package))
        labels.update({p: f"//{package}:{names[used.index(n)]}" for p, n in files.items()})
    return labels


def _levels(graph: ImportGraph, files: list[str]) -> dict[str, int]:
    """Counts how often the imports of each file of one package come back to it or go to a subpackage.

    Raises ValueError: a file needs itself by way of another package.
    """
    inside = posixpath.dirname(files[0]) + "/"
    levels = dict.fromkeys(files, 0)
    for _ in range(len(files) + 1):
        new = {path: _level(graph, path, inside, levels) for path in files}
        if new == levels:
            return levels
        levels = new
    raise ValueError(
        f"{max(files, key=lambda p: levels[p])} needs itself by way of another package"
    )


def _level(graph: ImportGraph, path: str, inside: str, levels: dict[str, int]) -> int:
    level = levels[path]
    for imported in graph.Needs(path):
        if imported in levels:
            level = max(level, levels[imported])
            continue
        reached = {imported, *graph.Closure(imported)}
        if any(p.startswith(inside) for p in reached):
            level = max([level, 1, *(1 + levels[p] for p in reached & levels.keys())])
    return level


def _deps(graph: ImportGraph, labels: dict[str, str], files: Iterable[str]) -> list[str]:
    """Libraries that `files` need and are not in, with those of the packages on the way there."""
    files = list(files)
    needed = set()
    for path in files:
        for imported in {path, *graph.Needs(path)}:
            if imported in labels:
                needed.add(labels[imported])
            needed |= _package_labels(labels, path, imported)
    return sorted(needed - {labels.get(path) for path in files})


def _package_labels(labels: dict[str, str], path: str, imported: str) -> set[str]:
    """The libraries of the __init__.py files that run when `path` imports `imported`."""
    libraries = set()
    package = posixpath.dirname(imported)
    while package:
        label = labels.get(f"{package}/__init__.py")
        inside = path.startswith(package + "/")
        if label and (not inside or label.endswith(f":{_BASE}")):
            libraries.add(label)
        package = posixpath.dirname(package)
    return libraries


def _render(graph: ImportGraph, labels: dict[str, str], package: str, files: list[str]) -> str:
    tests = [p for p in files if _is_test(p)]
    libraries: dict[str, list[str]] = {}
    for path in files:
        if path in labels:
            libraries.setdefault(labels[path].split(":")[1], []).append(path)
    used = (["pytest_test"] if tests else []) + (["python_library"] if libraries else [])
    loads = ", ".join(f'"{name}"' for name in sorted(used))
    parts = [
        _HEADER + f'load("//bazel_deps:python.bzl", {loads})\n',
        'package(default_visibility = ["//visibility:public"])\n',
    ]
    if _MAIN in files:
        parts.append(f'exports_files(["{posixpath.basename(_MAIN)}"])\n')
    for name, members in sorted(libraries.items()):
        srcs = _library_srcs(name, members, libraries)
        data = _data_globs(graph, package, name)
        deps = _deps(graph, labels, members)
        parts.append(_call("python_library", name, srcs, data, _local(deps, package)))
    if tests:
        needed = {*_deps(graph, labels, tests), *_conftests(graph, labels, package)}
        parts.append(
            _call(
                "pytest_test",
                posixpath.basename(package) + "_test",
                'glob(["test_*.py"])',
                _data_globs(graph, package, None),
                _local(needed - {f"//{TESTS}:{_HELPERS}"}, package),
            )
        )
    return "\n".join(parts)


def _library_srcs(name: str, members: list[str], libraries: dict[str, list[str]]) -> str:
    names = sorted(posixpath.basename(p) for p in members)
    if name.startswith(_BASE) or name == _HELPERS:
        return _list(names)
    others = [p for other in libraries if other != name for p in libraries[other]]
    if others:
        exclude = _list(sorted(posixpath.basename(p) for p in others), 8)
        return f'glob(\n        ["*.py"],\n        exclude = {exclude},\n    )'
    return 'glob(["*.py"])'


def _data_globs(graph: ImportGraph, package: str, name: str | None) -> str:
    """Files that are not Python: a package's own and its templates, or a test directory's testdata."""
    directory = graph.root / package
    if package.split("/")[0] == TESTS:
        has_data = (directory / _TESTDATA).is_dir() and name is None
        return f'glob(["{_TESTDATA}/**"])' if has_data else ""
    patterns = [f"{_TEMPLATES}/**"] if (directory / _TEMPLATES).is_dir() else []
    if name and name.startswith(_BASE):
        return f"glob({_list(patterns)})" if patterns else ""
    suffixes = {p.suffix for p in directory.iterdir() if p.is_file() and p.suffix}
    patterns += [f"*{suffix}" for suffix in sorted(suffixes - {".py", ".pyc", ".md"})]
    return f"glob({_list(patterns)})" if patterns else ""


def _conftests(graph: ImportGraph, labels: dict[str, str], package: str) -> set[str]:
    """The helper libraries of this directory, and those above it that hold a conftest.py."""
    helpers = {v for p, v in labels.items() if posixpath.dirname(p) == package}
    while package:
        conftest = f"{package}/conftest.py"
        if conftest in labels:
            helpers.add(labels[conftest])
        package = posixpath.dirname(package)
    return helpers


def _local(labels: Iterable[str], package: str) -> list[str]:
    """Labels as Bazel's own formatter writes them: short, those of this package first."""
    here, elsewhere = [], []
    for label in sorted(labels):
        directory, name = label.removeprefix("//").split(":")
        if directory == package:
            here.append(f":{name}")
        else:
            implied = posixpath.basename(directory) == name
            elsewhere.append(f"//{directory}" if implied else label)
    return here + elsewhere


def _list(items: list[str], indent: int = 4) -> str:
    if len(items) < 2:
        return "[" + ", ".join(f'"{item}"' for item in items) + "]"
    space = " " * indent
    return "[\n" + "".join(f'{space}    "{item}",\n' for item in items) + f"{space}]"


def _call(rule: str, name: str, srcs: str, data: str, deps: list[str]) -> str:
    lines = [f'    name = "{name}",', f"    srcs = {srcs},"]
    if data:
        lines.append(f"    data = {data},")
    if deps:
        lines.append(f"    deps = {_list(deps)},")
    return "\n".join([f"{rule}(", *lines, ")\n"])


def stale_files(root: Path = ROOT) -> dict[str, str | None]:
    """Returns the right contents of each BUILD file that is out of date; None for one that should not exist."""
    wanted: dict[str, str | None] = dict(build_files(root))
    tops = {path.split("/")[0] for path in wanted}
    for top in tops:
        for path in (root / top).rglob("BUILD"):
            wanted.setdefault(path.relative_to(root).as_posix(), None)
    return {path: text for path, text in wanted.items() if _read(root / path) != text}


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def define_flags() -> Flags:
    flags = Flags("python -m tools.build_files", __doc__)
    flags.DEFINE_boolean("check", False, "write nothing; exit with 1 where a file is out of date")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = define_flags().Parse(argv)
    stale = stale_files()
    for path, text in sorted(stale.items()):
        print(f"{'out of date' if args.check else 'writing'}: {path}")
        if args.check:
            continue
        if text is None:
            (ROOT / path).unlink()
        else:
            (ROOT / path).write_text(text, encoding="utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    run(main)
