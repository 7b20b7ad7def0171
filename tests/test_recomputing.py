"""Whether a step recomputes, where task.repeat=auto leaves it open: from sizes and memory, alike everywhere."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lingvo_moe.analysis.explain import verifying
from lingvo_moe.analysis.plans import recomputing, step_plan
from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.recomputing import chosen_form
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine import device_memory
from lingvo_moe.core.engine.device_memory import Memory
from lingvo_moe.core.sharding import Mesh, single_device
from lingvo_moe.core.task.inspect import bytes_per_device
from lingvo_moe.training.same_run import run_difference

MESH = Mesh.parse("expert:8")
LARGE = Memory(2**40, "this machine's")
SMALL = Memory(2**20, "this machine's")


def _params(override=""):
    """A model of seconds that leaves open whether it recomputes."""
    sizes = "task.num_experts=2;task.num_groups=2;input.batch_size=2"
    return registry.GetParams("mt.M4Tiny", f"task.repeat=auto;{sizes};{override}")


def test_the_small_experiments_leave_it_open_and_the_paper_s_recompute():
    assert registry.GetParams("mt.M4Demo").task.repeat == "auto"
    for name in registry.AllNames("mt"):
        if name.split(".")[1].startswith(("M4MoE", "T96L", "Bilingual")):
            task = registry.GetParams(name).task
            assert task.repeat is True
            assert task.cls.Strategy(task).OpenForms() is None


def test_a_stated_form_is_taken_and_nothing_is_said():
    for value in (True, False):
        params = _params(f"task.repeat={value}")
        assert chosen_form(params, single_device(), SMALL) == (params.task, "")


def test_memory_decides_and_the_line_says_how_to_change_it(monkeypatch):
    params = _params()
    forms = params.task.cls.Strategy(params.task).OpenForms()
    need = recomputing.step_bytes(forms, params, single_device())
    assert 2**19 < need < 2**24
    monkeypatch.setattr(recomputing, "step_bytes", lambda *_: need)
    form, line = chosen_form(params, single_device(), LARGE)
    assert form.repeat is False
    assert line.startswith("task.repeat: off, since the step needs about ")
    assert "of this machine's 1,024.0 GiB without recomputation; task.repeat=True" in line
    form, line = chosen_form(params, single_device(), Memory(2**17, "this machine's"))
    assert form.repeat is True
    assert line.startswith("task.repeat: on, since without recomputation the step needs about ")
    assert "more than 50% of this machine's 128.0 KiB; task.repeat=False turns it off" in line
    assert params.task.repeat == "auto"  # what the run is described by


def test_deep_models_and_unknown_memory_recompute_without_an_estimate(monkeypatch):
    monkeypatch.delattr(recomputing, "step_bytes")
    deep = f"task.num_encoder_layers={recomputing.MOST_BLOCKS * 2}"
    form, line = chosen_form(_params(deep), single_device(), LARGE)
    assert form.repeat is True and "9 blocks of layers would take long to compile" in line
    form, line = chosen_form(_params(), single_device(), Memory(None, "each device's"))
    assert form.repeat is True and "it is not known" in line


@pytest.mark.usefixtures("kept_programs_directory")
def test_what_a_block_keeps_counts_for_each_of_its_repetitions(monkeypatch):
    """Traced once, it is the same as traced as often as it is there. The next start does not trace it again."""
    params = _params("task.num_encoder_layers=4")
    forms = params.task.cls.Strategy(params.task).OpenForms()
    every = replace(forms, one_block=forms.keeping, num_blocks={})
    counted, traced = (
        recomputing.activation_bytes(f, params, single_device()) for f in (forms, every)
    )
    assert counted == pytest.approx(traced, rel=0.01)
    once = recomputing.activation_bytes(replace(forms, num_blocks={}), params, single_device())
    assert counted > 1.2 * once
    monkeypatch.setattr(recomputing, "trace", None)
    assert counted == recomputing.activation_bytes(forms, params, single_device())


def test_devices_share_the_activations_of_rows_that_are_sharded(monkeypatch):
    kept = 2**30
    monkeypatch.setattr(recomputing, "activation_bytes", lambda *_: kept)
    params = registry.GetParams("mt.M4Tiny", "task.repeat=auto")
    forms = params.task.cls.Strategy(params.task).OpenForms()
    one, eight = (recomputing.step_bytes(forms, params, mesh) for mesh in (single_device(), MESH))
    assert kept < one < 1.01 * kept
    assert kept / 8 < eight < 1.01 * kept / 8
    # Virtual devices share their machine's memory: together they need what one device does, and what is replicated.
    form, line = chosen_form(params, MESH, Memory(2 * 8 * eight - 16, "this machine's", 8))
    assert form.repeat is True and "about 1.0 GiB" in line
    form, _ = chosen_form(params, MESH, Memory(2 * 8 * eight, "this machine's", 8))
    assert form.repeat is False


def test_a_micro_batch_keeps_its_part_and_gradients_have_a_sum(monkeypatch):
    monkeypatch.setattr(recomputing, "activation_bytes", lambda *_: 2**30)
    whole = registry.GetParams("mt.M4Tiny", "task.repeat=auto")
    parts = registry.GetParams("mt.M4Tiny", "task.repeat=auto;train.num_micro_batches=4")
    forms = whole.task.cls.Strategy(whole.task).OpenForms()
    one, four = (recomputing.step_bytes(forms, p, single_device()) for p in (whole, parts))
    weights = forms.keeping.Instantiate().VariableSpecs().Flatten()
    assert one - four == 3 * 2**28 - sum(
        bytes_per_device(spec, single_device()) for spec in weights
    )


def test_a_machine_s_memory_is_its_total_without_swap(monkeypatch):
    monkeypatch.setattr(device_memory, "machine_bytes", lambda: 10 * 2**30)
    swap = SimpleNamespace(total=2 * 2**30)
    monkeypatch.setattr(device_memory.psutil, "swap_memory", lambda: swap)
    memory = device_memory.memory_of("pjrt", MESH)
    assert memory == Memory(8 * 2**30, "this machine's", 8)


def test_a_run_goes_on_in_another_form():
    """The parameter is no difference between runs, whatever it is now; nor is the number of micro-batches."""
    was = registry.GetParams("mt.M4Tiny", "task.repeat=auto").ToText()
    for value in ("auto", "True", "False", "True;train.num_micro_batches=4"):
        now = registry.GetParams("mt.M4Tiny", f"task.repeat={value}")
        assert run_difference(was, now) == ""
    assert "task.seed" in run_difference(was, registry.GetParams("mt.M4Tiny", "task.seed=7"))


def test_a_run_may_have_set_what_has_no_effect():
    now = registry.GetParams("mt.M4Tiny", "task.num_experts=0")
    was = now.ToText().replace("task.num_groups : 8\n", "task.num_groups : 4\n")
    assert was != now.ToText()
    assert run_difference(was, now) == ""


def test_trainer_planner_and_verifier_choose_by_the_same_rule(monkeypatch):
    """A step that fits both the machine and the slice is the same program on both; a verified one is as trained."""
    params = _params()
    monkeypatch.setattr(recomputing, "activation_bytes", lambda *_: 2**30)
    slice_ = step_plan.topology_memory(Topology.parse("v3:2x2"))
    forms = [chosen_form(params, single_device(), m)[0] for m in (slice_, LARGE)]
    assert forms[0] == forms[1] and forms[0].repeat is False
    for size, repeat in ((2**40, False), (2**30, True)):
        monkeypatch.setattr(device_memory, "machine_bytes", lambda size=size: size)
        swap = SimpleNamespace(total=0)
        monkeypatch.setattr(device_memory.psutil, "swap_memory", lambda swap=swap: swap)
        assert verifying.shrunk("mt.M4Tiny", MESH, "task.repeat=auto").task.repeat is repeat
