"""The BUILD files list the imports of the sources, and every test is in a Bazel target."""

import ast
from pathlib import Path

import pytest

from tools import build_files
from tools.import_graph import ROOT, repository

_SOURCES = {
    "lingvo_moe/__init__.py": "",
    "lingvo_moe/trainer.py": "from lingvo_moe.core.config import registry\nfrom lingvo_moe.core import base\n",
    "lingvo_moe/core/__init__.py": "",
    "lingvo_moe/core/config/__init__.py": "",
    "lingvo_moe/core/config/registry.py": "",
    "lingvo_moe/core/trees.py": "",
    "lingvo_moe/core/base.py": "from .sharding import mesh\n",
    "lingvo_moe/core/sharding/__init__.py": "from lingvo_moe.core.sharding.mesh import Mesh\n",
    "lingvo_moe/core/sharding/mesh.py": "import numpy\n\ndef f():\n    import lingvo_moe.core.trees\n",
    "lingvo_moe/core/sharding/table.csv": "1,2\n",
    "params/__init__.py": "",
    "params/mt/__init__.py": "from lingvo_moe.core.config import registry\n",
    "tests/conftest.py": "",
    "tests/run_pytest.py": "",
    "tests/core/helper_shapes.py": "import lingvo_moe.core.base\n",
    "tests/core/test_a.py": "from lingvo_moe.core import sharding\nimport helper_shapes\n",
    "tests/test_job.py": "CMD = ['python', '-m', 'lingvo_moe.trainer', '--model=mt.X']\n",
    "tests/house/test_h.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in _SOURCES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def _targets(text: str) -> dict[str, ast.Call]:
    """The rules of a BUILD file, which reads as Python, by name."""
    calls = [n.value for n in ast.parse(text).body if isinstance(n, ast.Expr)]
    targets = {}
    for call in calls:
        assert isinstance(call, ast.Call)
        names = [k.value.value for k in call.keywords if k.arg == "name"]  # type: ignore[attr-defined]
        targets.update(dict.fromkeys(names, call))
    return targets


def _deps(text: str, target: str) -> list[str]:
    values = [k.value for k in _targets(text)[target].keywords if k.arg == "deps"]
    return ast.literal_eval(values[0]) if values else []


def test_build_files_are_up_to_date():
    stale = sorted(build_files.stale_files())
    assert not stale, f"run `make build-files` and commit: {stale}"


def test_every_package_has_a_library_and_every_test_directory_a_test():
    for path in repository().files:
        package, _, name = path.rpartition("/")
        if package == "tests/house":
            continue
        text = (ROOT / package / "BUILD").read_text()
        if path.startswith("tests/") and name.startswith("test_"):
            assert 'glob(["test_*.py"])' in text, path
        else:
            assert name in text or 'glob(["*.py"])' in text or '["*.py"],' in text, path


def test_libraries_follow_the_imports(tree):
    files = build_files.build_files(tree)
    core = files["lingvo_moe/core/BUILD"]
    # What the subpackage may use is a library of its own; otherwise the two would need each other.
    assert set(_targets(core)) == {"base", "core"}
    assert _deps(core, "core") == [":base", "//lingvo_moe/core/sharding", "//lingvo_moe:base"]
    sharding = files["lingvo_moe/core/sharding/BUILD"]
    assert _deps(sharding, "sharding") == ["//lingvo_moe/core:base", "//lingvo_moe:base"]
    assert 'data = glob(["*.csv"])' in sharding
    # The trainer finds experiments by name.
    assert "//params/mt" in _deps(files["lingvo_moe/BUILD"], "lingvo_moe")


def test_tests_follow_imports_and_the_commands_they_run(tree):
    files = build_files.build_files(tree)
    assert "tests/house/BUILD" not in files
    core = files["tests/core/BUILD"]
    assert {":helpers", "//lingvo_moe/core/sharding"} <= set(_deps(core, "core_test"))
    assert "//lingvo_moe/core" in _deps(core, "helpers")
    job = _deps(files["tests/BUILD"], "tests_test")
    assert {"//lingvo_moe", "//params/mt"} <= set(job)


def test_a_test_of_all_experiments_needs_those_of_every_task():
    needs = repository().Needs("tests/core/config/test_stored_params.py")
    assert {f"params/{task}/__init__.py" for task in ("image", "lm", "mt")} <= needs


def test_stale_files_are_found_and_written_ones_are_not(tree):
    wanted = build_files.build_files(tree)
    assert build_files.stale_files(tree) == wanted
    for path, text in wanted.items():
        (tree / path).write_text(text)
    assert build_files.stale_files(tree) == {}
    (tree / "tests/house/BUILD").write_text("")
    (tree / "params/mt/BUILD").write_text("")
    assert build_files.stale_files(tree) == {
        "tests/house/BUILD": None,
        "params/mt/BUILD": wanted["params/mt/BUILD"],
    }


def test_a_circle_within_a_package_is_one_library_and_between_packages_an_error(tree):
    sharding = tree / "lingvo_moe/core/sharding"
    (sharding / "letters.py").write_text("from lingvo_moe.core.sharding import mesh\n")
    (sharding / "mesh.py").write_text(
        "def f():\n    from lingvo_moe.core.sharding import letters\n"
    )
    files = build_files.build_files(tree)
    assert set(_targets(files["lingvo_moe/core/sharding/BUILD"])) == {"sharding"}
    (sharding / "letters.py").write_text("from lingvo_moe.core import base\n")
    with pytest.raises(ValueError, match=r"core/base\.py needs itself"):
        build_files.build_files(tree)
