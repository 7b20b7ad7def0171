"""docs/architecture.md is true: which directory may import which, and how long a file may be."""

import ast
import functools
import re
from collections.abc import Callable, Iterator

from processes import run_python

from tools.import_graph import PACKAGES, ROOT, ImportGraph, circle, module_names, repository

GRAPH = repository()
MAX_LINES = 500
MAX_MODULES = 20
# Commands, one file each, which users call by these names.
_MORE_MODULES = {"tools": 33, "benchmarks": 23}
MAX_PARAMETERS = 6  # beside self
# Functions with more: options that users give by name.
_MORE_PARAMETERS = {"lingvo_moe/analysis/search/auto_shard/function.py: auto_shard"}

# Outermost first; a file imports from its own or from one of a later line. Those of one line do not know each
# other: trainer and planner import no task.
_HOUSES = (
    ("tools",),
    ("reproduction",),
    ("params",),
    ("lingvo_moe/api.py",),
    ("lingvo_moe/tasks", "lingvo_moe"),
    ("lingvo_moe/analysis",),
    ("lingvo_moe/core",),
)
# The same inside lingvo_moe/core, where '' is its own modules but for those that have a line of their
# own. Rooms of one line do not know each other.
_ROOMS = (
    ("engine",),
    ("runs", "job"),
    ("task",),
    ("pipeline", "decode"),
    ("moe",),
    ("layers", "optimizers"),
    ("state",),
    ("base_layer", "input"),
    ("kernels",),
    ("sharding", "pages", "weights"),
    ("",),
    ("console",),
    ("config", "files", "private"),
)
# A file that lies between rooms that import it and rooms that it imports.
_ALONE = ("lingvo_moe/core/base_layer.py",)
_ENGINE = "lingvo_moe/core/engine/"
_AOT = "lingvo_moe/analysis/programs/aot/"
_JOB = "lingvo_moe/core/job/"
_PALLAS = "lingvo_moe/core/kernels/pallas/"
_PRIVATE = "lingvo_moe/core/private/"


def _house(path: str) -> tuple[int, str] | None:
    found = [(i, house) for i, houses in enumerate(_HOUSES) for house in houses]
    matches = [(i, house) for i, house in found if f"{path}/".startswith(f"{house}/")]
    return max(matches, key=lambda match: len(match[1]), default=None)


def _room(path: str) -> tuple[int, str] | None:
    if not path.startswith("lingvo_moe/core/"):
        return None
    name, _, rest = path.removeprefix("lingvo_moe/core/").removesuffix(".py").partition("/")
    known = {room: level for level, rooms in enumerate(_ROOMS) for room in rooms}
    if not rest and name not in known:
        name = ""
    assert name in known, f"{path}: add the room {name!r} to _ROOMS and to docs/architecture.md"
    return known[name], name


def _wrong_way(path: str, imported: str) -> bool:
    house, other_house = _house(path), _house(imported)
    if house is None or other_house is None:
        return False
    if house != other_house:
        return other_house[0] <= house[0]
    room, other_room = _room(path), _room(imported)
    if room is None or other_room is None or room[1] == other_room[1]:
        return False
    return other_room[0] <= room[0]


def _no_file_imports(wrong: Callable[[str, str], bool], imports: Callable = GRAPH.Imports) -> None:
    """Asserts that no file imports what would be wrong: by the paths of both, or by path and name."""
    found = ((path, other) for path in GRAPH.files for other in sorted(imports(path)))
    found = [f"{path} imports {other}" for path, other in found if wrong(path, other)]
    assert not found, "\n".join(found)


def test_imports_run_one_way():
    _no_file_imports(_wrong_way)


def test_imports_name_what_is_there():
    """Also in functions, where an import runs late; mypy takes a module that is missing for another package's."""
    modules = {name: path for path in GRAPH.files for name in module_names(path)}

    def wrong(path: str, name: str) -> bool:
        owner, _, part = name.rpartition(".")
        if name.partition(".")[0] not in PACKAGES or name in modules or part == "*":
            return False
        return owner not in modules or not re.search(
            rf"\b{part}\b", (ROOT / modules[owner]).read_text("utf-8")
        )

    _no_file_imports(wrong, GRAPH.ImportedNames)


def test_no_files_import_each_other_in_a_circle(tmp_path):
    assert not GRAPH.Circle()
    (tmp_path / "tools").mkdir()
    for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        text = f"def f():\n    from tools import {other}\n"
        (tmp_path / "tools" / f"{name}.py").write_text(text)
    assert ImportGraph(tmp_path).Circle() == [f"tools/{name}.py" for name in "abca"]


def _imports_in(folder: str) -> dict[str, set[str]]:
    """The imports of a folder's rooms among each other: its subfolders with all inside, and '' for its own files."""

    def room(path: str) -> str | None:
        if not path.startswith(f"{folder}/"):
            return None
        if path in _ALONE and path.rpartition("/")[0] == folder:
            return path
        return path.removeprefix(f"{folder}/").rpartition("/")[0].split("/")[0]

    rooms: dict[str, set[str]] = {}
    for path in GRAPH.files:
        if (inside := room(path)) is not None:
            others = {room(other) for other in GRAPH.Imports(path)} - {None, inside}
            rooms.setdefault(inside, set()).update(others)
    return rooms


def test_no_folders_import_each_other_in_a_circle():
    """Wherever they lie side by side; a folder's own files are one more beside its subfolders."""
    folders = {path.rpartition("/")[0] for path in GRAPH.files if path.startswith("lingvo_moe/")}
    assert "data" in _imports_in("lingvo_moe/tasks/text")["vocabulary"]
    circles = {folder: circle(_imports_in(folder)) for folder in folders | {"lingvo_moe/tasks"}}
    assert not {folder: rooms for folder, rooms in circles.items() if rooms}


def test_tasks_do_not_know_each_other():
    """A room beside theirs has all that two tasks need, and knows no task either."""
    tasks = {path.split("/")[1] for path in GRAPH.files if path.startswith("params/")}

    def task(path: str) -> str | None:
        found = re.match(r"(?:lingvo_moe/tasks|params)/(\w+)/", path)
        return found[1] if found and found[1] in tasks else None

    def wrong(path: str, other: str) -> bool:
        return path.startswith(("lingvo_moe/tasks/", "params/")) and task(other) not in (
            None,
            task(path),
        )

    assert {"image", "lm", "mt"} <= tasks
    _no_file_imports(wrong)


def test_the_trainer_is_imported_without_search_and_planner():
    """They come in when they are asked for; so do engines, TensorFlow and JAX."""
    names = "[m for m in sys.modules if m.partition('.')[0] == 'lingvo_moe']"
    code = f"import sys; import lingvo_moe.trainer; print(*{names})"
    done = run_python("-c", code)
    found = done.stdout.split()
    assert 40 < len(found) <= 90, done.stderr
    late = ("analysis.plans.step_plan", "analysis.search.parallelizing", "analysis.explain")
    assert not [m for m in found if m.removeprefix("lingvo_moe.").startswith(late)]


def test_gradients_end_with_their_graphs():
    """TensorFlow's own decorator keeps each gradient until the process ends; core/private/tensorflow.py has another."""
    files = (ROOT / "lingvo_moe").rglob("*.py")
    assert not [str(path) for path in files if "@tf.custom_gradient" in path.read_text()]


def test_jax_is_behind_the_engines_door():
    behind = (_ENGINE, _JOB, _AOT, _PALLAS, _PRIVATE, "tests/", "benchmarks/")

    def wrong(path: str, name: str) -> bool:
        return name.split(".")[0] in {"jax", "jaxlib"} and not path.startswith(behind)

    _no_file_imports(wrong, GRAPH.ImportedNames)
    door = f"{_PRIVATE}jax.py"
    _no_file_imports(
        lambda path, other: other == door and not path.startswith((_ENGINE, _JOB, _AOT, "tests/"))
    )


def test_private_modules_of_libraries_are_imported_in_one_place():
    private = ("tensorflow.python.", "tensorflow.compiler.", "jax._src.", "jaxlib.")
    place = (_PRIVATE, "tests/", "benchmarks/")

    def wrong(path: str, name: str) -> bool:
        return f"{name}.".startswith(private) and not path.startswith(place)

    _no_file_imports(wrong, GRAPH.ImportedNames)


def _private_names(syntax: ast.Module) -> Iterator[tuple[str, int]]:
    """Private attributes that a file reads or imports, but of itself or its class, and their lines."""
    for node in ast.walk(syntax):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value), node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.name, node.lineno) for alias in node.names)


@functools.cache
def _defined_names(path: str) -> frozenset[str]:
    return frozenset(_definitions(GRAPH.Syntax(path)))


def _definitions(syntax: ast.Module) -> Iterator[str]:
    for node in ast.walk(syntax):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node.slice).strip("'")  # self.__dict__["_name"] = ...


def test_private_attributes_of_libraries_are_read_in_one_place():
    """A private name that is neither of the file nor of a file that it imports is a library's."""
    public = {"_exit", "_asdict", "_replace", "_fields"}  # documented, in spite of their names
    wrong = []
    for path in GRAPH.files:
        if path.startswith((_PRIVATE, "tests/", "benchmarks/")):
            continue
        files = (path, *GRAPH.Imports(path))
        modules = {other.rpartition("/")[2].removesuffix(".py") for other in files}
        own = frozenset().union(*map(_defined_names, files))
        wrong += [
            f"{path}:{line}: {name}"
            for name, line in _private_names(GRAPH.Syntax(path))
            if re.match("_(?!_)", name) and name not in own | modules | public
        ]
    assert not wrong, "\n".join(wrong)
    text = "from a import _b\ngraph._get(1)\nself._own\ngetattr(x, '_y').z\n"
    found = [name for name, _ in _private_names(ast.parse(text))]
    assert sorted(found) == ["_b", "_get", "_y", "z"]


def test_every_command_reads_its_flags_in_one_way():
    """Only lingvo_moe/core/console/flags.py defines absl flags."""
    own = {
        "lingvo_moe/core/console/flags.py",
        "lingvo_moe/core/console/command.py",
        "tests/core/console/test_flags.py",
    }

    def wrong(path: str, name: str) -> bool:
        top = name.split(".")[0]
        return top in {"argparse", "getopt", "optparse"} or (top == "absl" and path not in own)

    _no_file_imports(wrong, GRAPH.ImportedNames)


def test_nothing_but_tests_imports_tests():
    _no_file_imports(
        lambda path, other: other.startswith("tests/") and not path.startswith("tests/")
    )


def test_a_layer_can_be_read_in_one_sitting():
    """The files of this project that the MoE layer imports, directly or not, but for the door to TensorFlow's private
    parts; and with the parts that it takes by name, its default router and dispatchers. Two of them are attention's,
    scores and blocks, which a set of kernels has too."""
    door = {f"{_PRIVATE}tensorflow.py"}
    files = set(GRAPH.Closure("lingvo_moe/core/moe/layer.py"))
    assert len(files - door) <= 24, "\n".join(sorted(files))
    for part in ("routers/top2", "dispatch", "dispatch_dropless"):
        files |= {
            f"lingvo_moe/core/moe/{part}.py",
            *GRAPH.Closure(f"lingvo_moe/core/moe/{part}.py"),
        }
    assert len(files - door) <= 28, "\n".join(sorted(files))


def test_files_can_be_read_in_one_sitting():
    lines = {path: (ROOT / path).read_text(encoding="utf-8").count("\n") for path in GRAPH.files}
    long = {path: number for path, number in lines.items() if number >= MAX_LINES}
    assert not long, "a file is one idea, split these"


def test_functions_take_few_parameters():
    found = set()
    for path in GRAPH.files:
        if path.startswith(("tests/", "benchmarks/")):
            continue
        for node in ast.walk(GRAPH.Syntax(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                args = node.args
                names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
                if len([name for name in names if name not in ("self", "cls")]) > MAX_PARAMETERS:
                    found.add(f"{path}: {node.name}")
    assert found == _MORE_PARAMETERS


def test_a_directory_holds_few_modules():
    """Tests mirror the directories of the package, and some have more files."""
    rooms: dict[str, int] = {}
    for path in GRAPH.files:
        if not path.startswith("tests/") and not path.endswith("__init__.py"):
            rooms[path.rpartition("/")[0]] = rooms.get(path.rpartition("/")[0], 0) + 1
    assert not {r: n for r, n in rooms.items() if n > _MORE_MODULES.get(r, MAX_MODULES)}


def test_every_package_has_an_init_and_no_test_directory_has():
    missing = {
        path.rpartition("/")[0]
        for path in GRAPH.files
        if not path.startswith("tests/")
        and path.rpartition("/")[0] + "/__init__.py" not in GRAPH.files
    }
    assert not missing, f"without __init__.py: {sorted(missing)}"
    assert not [p for p in GRAPH.files if p.startswith("tests/") and p.endswith("__init__.py")]


def test_test_modules_have_names_of_their_own():
    names: dict[str, str] = {}
    for path in GRAPH.files:
        name = path.rpartition("/")[2]
        if path.startswith("tests/") and name != "conftest.py":
            assert name not in names, f"{path} and {names[name]}: pytest would mix them up"
            names[name] = path
