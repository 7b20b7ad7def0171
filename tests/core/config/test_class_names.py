"""Classes by name: any class for a user who types the name, only classes of this package for a run."""

import sys
from pathlib import Path

import pytest
from processes import run_python

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.class_names import any_class, own_class

TOP2 = "type/lingvo_moe.core.moe.routers.top2/Top2Router"


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A module on Python's path that writes a file when it is imported."""
    marker = tmp_path / "was_imported"
    code = f"open({str(marker)!r}, 'w').close()\nclass Thing:\n    pass\n"
    (tmp_path / "leaves_a_file.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield marker
    sys.modules.pop("leaves_a_file", None)


def test_another_module_is_imported_only_where_any_may_be(marker):
    message = r"'type/leaves_a_file/Thing' is not of lingvo_moe.*--trust_run"
    with pytest.raises(ValueError, match=message):
        own_class("type/leaves_a_file/Thing")
    assert not marker.exists()
    assert any_class("type/leaves_a_file/Thing").__name__ == "Thing"
    assert marker.exists()


@pytest.mark.parametrize(
    "path", ["task.num_experts", "task.moe.router.cls", "input.cls", "task.cls"]
)
def test_no_parameter_of_an_experiment_imports_another_module(marker, path):
    with pytest.raises(registry.RegistryError, match="is not of lingvo_moe"):
        registry.GetParams("mt.M4Tiny", f"{path}=type/leaves_a_file/Thing", trusted=False)
    assert not marker.exists()


@pytest.mark.parametrize("text", [
    "type/os/system",
    "type/lingvo_moe/Path",
    "type/lingvo_moe_of_another/Thing",
    "type/lingvo_moe..os/Thing",
    "type/lingvo_moe.core.files.files\n/Path",
    "type/params.mt.demo/M4Tiny",
    "type/lingvo_moe.runs.one.leaves_a_file/Thing",  # a run in a checkout, which may hold code
    "type/lingvo_moe.core.files.files/Path",  # imported there, but another package's
    "type/lingvo_moe.core.moe.routers.top2/Top3Router",
    "type/lingvo_moe.core.config.registry/RegistryError",  # no Params
    "type/lingvo_moe.core.moe.routers.top2",
])  # fmt: skip
def test_what_names_no_class_of_the_package(text):
    with pytest.raises(ValueError, match=r"is not of lingvo_moe|names no class|is no class"):
        own_class(text)


def test_directories_of_the_users_own_are_not_in_the_way(tmp_path):
    """`python -m` and `python -c` look there first."""
    for place in ("params", "params/mt", "reproduction", "tools"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "__init__.py").write_text("open('was_imported', 'w').close()\n")
    root = Path(registry.__file__).parents[3]
    code = "import lingvo_moe.params.mt, lingvo_moe.tools.reproduce"
    run_python("-c", code, cwd=tmp_path, env={"PYTHONPATH": str(root)}, check=True)
    assert not (tmp_path / "was_imported").exists()
