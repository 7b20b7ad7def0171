"""The public names are there, documented and imported late; modules that moved are imported by their old names."""

import importlib
import re

import pytest
from processes import run_python

import lingvo_moe
from lingvo_moe import api
from tools.import_graph import ROOT


@pytest.mark.parametrize("name", api.__all__)
def test_each_public_name_is_there_and_on_the_page(name):
    assert getattr(api, name) is not None and name in dir(api)
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sum(f"`{name}`" in row for row in rows) == 1


def test_the_page_names_nothing_else():
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(api.__all__)
    with pytest.raises(
        AttributeError, match=r"module 'lingvo_moe\.api' has no attribute 'BaseLayr'"
    ):
        api.BaseLayr  # noqa: B018


def test_the_face_is_light():
    code = "import sys; from lingvo_moe import api; assert api.Mesh.parse('data:2').size == 2; "
    done = run_python("-c", code + "print(*{'jax', 'tensorflow'} & {*sys.modules})")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def _imported(name: str) -> object:
    with pytest.warns(FutureWarning, match=f"^{re.escape(name)} is .* now; the old name goes"):
        return importlib.import_module(name)


@pytest.mark.parametrize("old", sorted(lingvo_moe.MOVED))
def test_a_module_that_moved_is_imported_by_its_old_name(old):
    new = lingvo_moe.current_name(old)
    assert _imported(old) is importlib.import_module(new)
    assert lingvo_moe.current_name(new) == new


def test_what_lies_in_a_package_that_moved_is_not_imported_twice():
    old = _imported("lingvo_moe.core.planner.machines.topology")
    from lingvo_moe.analysis.plans.machines import topology

    assert old is topology
    with pytest.raises(
        ModuleNotFoundError, match=r"No module named 'lingvo_moe\.analysis\.plans\.none'"
    ):
        importlib.import_module("lingvo_moe.core.planner.none")
