"""train.offload: the same training with a part of the state, or of the activations, in the hosts' memory."""

import functools

import numpy as np
import pytest
from gpu_compiler import needs_gpu_compiler
from refusals import refuses
from toy_stack import MESH, ROWS, H, L, M, Rows, batch_of, begun, compiled_step, stack_task, trained

from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.memory import host_link
from lingvo_moe.analysis.plans.work.costs import costs as costs_of
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.checks import OFFLOAD
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.engines import make_engine
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.input.division import MicroBatchError
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.state.offload import OffloadError, of_weight

_BOTH = ("*.w?", "activations")
_MIXED = {"dtype": "bfloat16", "clip_gradient_norm": 0.01}
_FORMS = [
    ({"offload": "slots", "level": "weights", **_MIXED}, "slots"),
    ({"offload": "master", "level": "none", **_MIXED}, "master"),
    ({"offload": "slots", "level": "none", "num": 2, "optimizer": Adafactor}, "slots"),
    ({"offload": _BOTH, "level": "weights", **_MIXED}, "body"),
]


@pytest.mark.slow
@pytest.mark.parametrize("form, there", _FORMS, ids=str)
def test_training_is_that_without_offload(form, there):
    """CPU devices have such a memory by name: the program moves what is in it there and back."""
    level = form["level"]
    plain = {k: v for k, v in form.items() if k not in ("offload", "level")}
    want, whole = trained("none", **plain)
    found, state = trained(**form)
    # Of gradients that are sharded the norm is summed in another order.
    np.testing.assert_allclose(found, want, rtol=1e-6 if level == "none" else 1e-5)
    for (path, x), y in zip(state.FlattenItems(), whole.Flatten(), strict=True):
        same = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(*same, rtol=1e-4, atol=1e-6, err_msg=path)
    task, engine, _ = compiled_step(**form)
    kinds = {p: x.sharding.memory_kind for p, x in begun(task, engine).FlattenItems()}
    of_stacks = {path for path in kinds if path.startswith(("slots.blocks", "theta.blocks"))}
    expected = {path for path in of_stacks if there and there in path}
    assert {path for path, kind in kinds.items() if kind == "pinned_host"} == expected


def test_a_step_that_is_not_finite_changes_nothing_on_the_host():
    task, engine, step = compiled_step(**_FORMS[3][0])
    state, _ = step(begun(task, engine), batch_of(0))
    before = state.Transform(np.asarray)
    state, metrics = step(state, NestedMap(x=np.full((ROWS, 1, M), np.inf, np.float32)))
    assert float(metrics.skipped) == 1
    for part in ("theta", "slots"):
        items = zip(before[part].FlattenItems(), state[part].Flatten(), strict=True)
        for (path, x), y in items:
            np.testing.assert_array_equal(x, np.asarray(y), err_msg=path)


@functools.cache
def _on_tpu(offload):
    step = train_step(stack_task("none", dtype="bfloat16", offload=offload), Rows())
    return aot.compile_for_topology(lower_step(step, MESH), "v5p:2x2x2")


@pytest.mark.parametrize("offload, a_weight", [("master", 4), (("*.w?",), 14)], ids=str)
def test_the_tpu_compiler_keeps_what_is_offloaded_out_of_the_device(offload, a_weight):
    """The compiler's own figures say so; a weight has 2 bytes and its slots 12."""
    plain, offloaded = _on_tpu("none").memory, _on_tpu(offload).memory
    there = L * 2 * M * H * a_weight
    assert there <= offloaded["host_arguments"] <= 4 * there  # with the padding of its layout
    assert plain["arguments"] - offloaded["arguments"] == offloaded["host_arguments"]
    # The gradients of weights that are there are too.
    assert (offloaded.get("host_temporaries", 0) > 0) == (a_weight == 14)


def test_a_plan_counts_each_move_of_a_layer_and_the_seconds_that_a_device_waits():
    compiled, machine = _on_tpu(("*.w?",)), parse_machine("v5p:2x2x2")
    module = parse_module(compiled.hlo_text)
    host = host_link.host_plan(module, costs_of(module), machine, compiled.memory)
    assert host["needed"] == sum(compiled.memory[f"host_{k}"] for k in ("arguments", "temporaries"))
    assert host["needed_by_host"] == 4 * host["needed"]
    moved = {host_link.IN: 0, host_link.OUT: 0}
    for row in host["moves"]:
        moved[row["direction"]] += row["count"] * row["bytes"]
        assert row["seconds"] == pytest.approx(row["count"] * row["bytes"] / 15e9)
    layers = host["arguments"] // 14  # elements, with padding
    # Out: gradients, then weight and slots. In: weights forward and backward, gradients twice, slots. The compiler may
    # fetch a layer again, and pads the types differently.
    assert 0.5 * 16 * layers <= moved[host_link.OUT] <= 2 * 16 * layers
    assert 0.5 * 20 * layers <= moved[host_link.IN] <= 2 * 24 * layers
    assert 0 < host["waiting_seconds"] <= host["seconds"]
    assert host["hidden_seconds"] == pytest.approx(host["seconds"] - host["waiting_seconds"])


@needs_gpu_compiler
def test_the_gpu_compiler_keeps_it_out_of_the_device_too():
    """Its text, where the memory of the host is S(5), and its own figures say so."""
    step = train_step(stack_task("none", dtype="bfloat16", offload=("*.wi", "slots")), Rows())
    compiled = aot.compile_for_topology(lower_step(step, MESH), "h100:1x8")
    assert compiled.memory["host_arguments"] == L * M * H * (12 + 14)
    assert compiled.memory["host_temporaries"] == L * M * H * 2  # gradients of wi
    module = parse_module(compiled.hlo_text)
    there = [p for p in module.entry.parameters if p.arrays[0].memory_space == host_link.HOST_SPACE]
    assert sum(p.num_bytes for p in there) == compiled.memory["host_arguments"]
    host = host_link.host_plan(module, costs_of(module), parse_machine("h100:1x8"), compiled.memory)
    out = [row for row in host["moves"] if row["direction"] == host_link.OUT]
    layers = sum(row["count"] * row["bytes"] for row in out)
    assert layers == L * M * H * (12 + 2 + 12 + 2)  # slots; the weight and gradient of wi


_SCHEDULE = """HloModule m, is_scheduled=true

ENTRY %main (p: f32[2,1024], i: s32[]) -> f32[1,1024] {
  %p = f32[2,1024]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  %start = ((f32[2,1024]{1,0:S(5)}, s32[], s32[]), f32[1,1024]{1,0}, u32[]) dynamic-slice-start(%p, %i, %i)
  %work = f32[WORK]{0} broadcast(%i), dimensions={}
  %done = f32[1,1024]{1,0} dynamic-slice-done(%start)
  %back = f32[1,1024]{1,0:S(5)} copy(%done)
  ROOT %out = f32[1,1024]{1,0} add(%done, %done)
}
"""


@pytest.mark.parametrize("work, hidden", [(1024, 0.0), (2**24, 1.0)])
def test_a_move_is_hidden_by_the_work_between_its_start_and_its_end(work, hidden):
    module, machine = parse_module(_SCHEDULE.replace("WORK", str(work))), parse_machine("v5p:2x2x1")
    host = host_link.host_plan(module, costs_of(module), machine, {"host_arguments": 8192})
    taken, back = host["moves"]
    if taken["direction"] == host_link.OUT:
        taken, back = back, taken
    one = 4096 / 15e9
    assert (taken["direction"], back["direction"]) == (host_link.IN, host_link.OUT)
    assert taken["seconds"] == back["seconds"] == pytest.approx(one)
    assert taken["waiting_seconds"] == pytest.approx((1 - hidden) * one, abs=0.02 * one)
    assert back["waiting_seconds"] == pytest.approx(one)  # a plain copy has no start


def test_a_program_without_anything_on_a_host_has_no_such_part():
    module = parse_module(_SCHEDULE.replace("WORK", "8").replace("S(5)", ""))
    machine = parse_machine("v5p:2x2x1")
    assert host_link.host_plan(module, costs_of(module), machine, {}) == {}


@refuses(
    OffloadError,
    ("master", {}, "train.offload=master: no stack of layers has such slots"),
    ("experts", {}, "train.offload=experts: no variable matches"),
    (("*.scale",), {}, r"it would have moved stack.scale, which no loop over layers reads"),
    (("slots", "*.wx"), {}, r"offload=\*.wx: no variable matches \(did you mean '\*.w"),
    (("*.wi",), {"ema_decay": 0.9}, "the moving average reads these weights on the devices"),
)
def test_an_offload_that_frees_nothing_is_refused(offload, others):
    stack_task(offload=offload, **others).StateSpecs()


def test_slots_that_an_optimizer_lacks_are_not_sharded():
    override = "train.shard_state=slots;task.optimizer=sgd;task.optimizer.momentum=0"
    with pytest.raises(OffloadError, match=r"^train.shard_state=slots: the optimizer has no slots"):
        registry.GetParams("mt.M4Tiny", override).task.Instantiate().StateSpecs()
    for more in (";task.optimizer.momentum=0.9", ";task.ema_decay=0.9", ";task.dtype=bfloat16"):
        registry.GetParams("mt.M4Tiny", override + more).task.Instantiate().StateSpecs()


def test_where_the_hosts_memory_cannot_be_used_it_is_refused():
    step = train_step(stack_task(offload="slots"), Rows())
    with pytest.raises(EngineError, match=r"^--engine=tf: .*; train.offload takes --engine=pjrt"):
        make_engine("tf", Mesh.parse("data:1")).BuildStep(step)
    with pytest.raises(MicroBatchError, match=r"train.num_micro_batches=2: the gradients of stack"):
        train_step(stack_task(offload=("*.wi",)), Rows(), 2)


def test_names_and_patterns():
    parts = {"m4.encoder.blocks.body.ffn.own": ("experts", "encoder"), "m4.experts": ("", "")}
    assert of_weight("experts", "m4.encoder.blocks.body.ffn.own.wi", parts)
    assert not of_weight(["experts", "slots"], "m4.experts.wi", parts)
    assert OFFLOAD.Read("['slots', '*.wi']") == ["slots", "*.wi"]
    assert not OFFLOAD(["slots", "*.wi"]) and not OFFLOAD("activations")
    assert "did you mean 'slots'" in OFFLOAD("slot")
    assert "there is no 'slot'" in OFFLOAD(["slot"])
    assert "e.g. ['*.wi']" in OFFLOAD("*.wi")
