"""A model's work, its layouts on devices, and their estimated cost: nothing is compiled."""

import functools
import itertools

import pytest
import tensorflow as tf

from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.memory import state
from lingvo_moe.analysis.plans.memory.step_bytes import StateSize
from lingvo_moe.analysis.search.strategies.candidate import (
    DOTS,
    FULL,
    OFFLOADS,
    Candidate,
    candidates,
)
from lingvo_moe.analysis.search.strategies.estimates import Correction
from lingvo_moe.analysis.search.strategies.mesh_layout import layouts, letter_sizes
from lingvo_moe.analysis.search.strategies.space import Space
from lingvo_moe.analysis.search.strategies.state_bytes import StateBytes
from lingvo_moe.analysis.search.strategies.workload import WorkloadError, read_workload
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.checks import STATE_LEVELS
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.tracing import trace
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.core.sharding import single_device

_MODEL = "mt.M4MoE128E12L"


@functools.cache
def _work(model=_MODEL, override=""):
    return read_workload(registry.GetParams(model, override))


@functools.cache
def _estimator(topology="v3:8x8"):
    params = registry.GetParams(_MODEL)
    return Space(params, _work(), parse_machine(topology), ("", "bfloat16")).estimator


def _layout(mesh, experts=True):
    (found,) = [each for each in layouts(_work(), 128) if str(each.mesh) == mesh]
    return found


def test_products_have_the_letters_of_the_weights():
    found = {(p.part, *(x.letters for x in (*p.operands, p.result))) for p in _work().products}
    assert ("dense_ffn", "BTM", "MH", "BTH") in found
    assert ("dense_ffn", "BTH", "HM", "BTM") in found
    assert ("experts", "EGCH", "EHM", "EGCM") in found
    assert ("embedding", "VM", "BT", "BTM") in found
    # As the layer marks them, behind a gradient of its own.
    kept = {p.name for p in _work().products if p.part == "experts"}
    assert kept == {"experts_hidden", "returned"}


def test_the_work_is_the_model_s():
    params = registry.GetParams(_MODEL)
    task, inputs = params.task.Instantiate(), params.input.Instantiate()
    forward = sum(p.flops * times for p, times in _work().products.items())
    parts = task.Costs().FlopsByPart(inputs.BatchSpec())
    assert forward == pytest.approx(sum(parts.values()), rel=0.01)


def test_a_dense_language_model_has_work_too():
    work = _work("lm.Tiny")
    assert {p.part for p in work.products} == {"embedding", "attention", "dense_ffn", "softmax"}
    assert "E" not in letter_sizes(work)


def test_each_stack_has_inputs_of_its_own_length():
    override = "input.batch_size=2;input.source_length=48;input.target_length=24;task.num_groups=2"
    found = read_workload(registry.GetParams("mt.M4Tiny", override)).boundaries
    assert found == {"m4.encoder.blocks": 2 * 48 * 16, "m4.decoder.blocks": 2 * 24 * 16}


def test_an_update_moves_what_its_optimizer_reads_and_writes():
    held = StateSize(weights=400, gradients=20, slots=3)
    adam = 2 * 20 + (400 + 400) + (3 + 3)  # gradients for their norm, and for the update
    assert held.Updating(Adam.PASSES) == held.Updating(Sgd.PASSES) == adam
    # The root mean squares of its step and of the weight come before the step.
    assert held.Updating(Adafactor.PASSES) == adam + 20 + 400
    assert held.Updating(micro_batches=3) == adam + 2 * 3 * 20
    assert read_workload(registry.GetParams("lm.Tiny", "task.optimizer=adafactor")).passes == 2


def test_a_model_without_stacks_is_refused():
    with pytest.raises(WorkloadError, match="auto_shard"):
        _work("image.ResNet50")


def test_layouts_are_those_that_divide():
    found = list(layouts(_work(), 128))
    assert len(found) == len(set(found))
    sizes = letter_sizes(_work())
    for each in found:
        assert each.mesh.size == 128
        for letter, _ in each.activations:
            parts = each.mesh.axis_size(each.Axes(letter))
            assert all(size % parts == 0 for size in sizes[letter])
    assert {each.stages for each in found} == {1, 2}  # of 3 blocks
    assert list(layouts(_work(), 7)) == []  # 7 divides none of the sizes


@pytest.mark.parametrize("level", STATE_LEVELS)
@pytest.mark.parametrize("mesh", ["data:4,expert:32", "expert:16,model:8"])
def test_the_state_is_that_of_the_specs(mesh, level):
    layout = next(
        each
        for each in layouts(_work(), 128)
        if str(each.mesh) == mesh and dict(each.weights).keys() in ({"E"}, {"E", "N", "H", "V"})
    )
    held = StateBytes(registry.GetParams(_MODEL)).On(layout, level)
    pairs = Candidate(layout, level).Overrides().items()
    override = ";".join(f"{path}={value}" for path, value in pairs)
    task = registry.GetParams(_MODEL, override).task.Instantiate()
    rows = state.state_plan(task, layout.mesh, {})["parts"]
    want = {row["part"]: 0 for row in rows}
    for row in rows:
        want[row["part"]] += row["bytes"]
    assert (held.weights, held.gradients) == (want["weights"], want["gradients"])
    assert held.slots == want["slots"]


def test_more_is_kept_for_less_time():
    layout = _layout("expert:128")
    by = Correction()
    outputs, moved = ("attention", "feed_forward"), ("dispatched", "returned")
    products = ("query", "key", "value", *outputs, "hidden", "router", "experts_hidden", "returned")
    order = (FULL, outputs, (*outputs, *moved), DOTS, (*products, "dispatched"))
    assert _estimator().Of(Candidate(layout, remat=products)) == _estimator().Of(
        Candidate(layout, remat=DOTS)
    )
    found = [_estimator().Of(Candidate(layout, remat=each)) for each in order]
    for less, more in itertools.pairwise(found):
        assert more.Seconds(by) < less.Seconds(by)
        assert more.Bytes(by) > less.Bytes(by)


@pytest.mark.parametrize("model, override, lacks", [
    ("mt.M4Tiny", "task.moe.router=hash", {"router"}),
    ("lm.Tiny", "", {"router", "experts_hidden", "dispatched", "returned", "combined"}),
])  # fmt: skip
def test_what_is_kept_has_the_names_of_the_layers(model, override, lacks, monkeypatch):
    """The names are those that the trainer finds when it traces a step, which refuses others in a list.

    The forward pass marks them, so the backward pass is not traced."""
    monkeypatch.setattr(tf.GradientTape, "gradient", lambda _, y, xs: [*map(tf.zeros_like, xs)])
    params, work = registry.GetParams(model, override), _work(model, override)
    names = set(registry.GetParams("mt.M4Tiny").task.Instantiate().DeclaredKeeps()) - lacks
    assert set(work.names) == names
    task = params.task.Copy().Set(remat=sorted(names)).Instantiate()
    step = train_step(task, params.input.Instantiate())
    trace(step, single_device())
    for each in candidates(layouts(work, 1), work):
        assert each.remat in (FULL, DOTS) or set(each.remat) <= names


def test_a_pipeline_waits_as_the_law_says():
    layout = next(each for each in layouts(_work(), 128) if each.stages == 2)
    # 3 blocks of each stack are two and one, of which the second stage waits for the first.
    assert _estimator().Of(Candidate(layout, micro_batches=4)).idle == pytest.approx(4 / 3 * 5 / 4)
    interleaved = _estimator().Of(Candidate(layout, micro_batches=4, repeats=2))
    assert interleaved.idle == pytest.approx(4 / 3 * 9 / 8)


def test_a_stage_gathers_all_its_weights_at_a_time():
    """A loop over blocks gathers the weights of one block (docs/state.md)."""
    for layout in layouts(_work(), 128):
        if str(layout.mesh) in ("stage:2,data:64", "data:128"):
            copies = _estimator().Of(Candidate(layout, "none"))
            parts = _estimator().Of(Candidate(layout, "weights"))
            share = parts.least / copies.least
            assert share > 0.9 if layout.stages > 1 else share < 0.4


def test_ten_thousand_candidates_have_different_parameters():
    found = list(candidates(layouts(_work(), 128), _work(), ("", "bfloat16")))
    texts = {str(sorted(each.Overrides().items())) for each in found}
    assert len(texts) == len(found)
    assert len({str(each) for each in found}) == len(found)


def test_what_does_not_fit_is_offloaded():
    """The time of a machine on which only an offload fits is that of the offload."""
    override = "input.batch_size=256;task.num_groups=16"
    seconds = []
    for topology, offloads in (("v5e:2x2", {(), *OFFLOADS}), ("v5e:2x4", {()})):
        machine = parse_machine(topology)
        space = Space(registry.GetParams(_MODEL, override), _work(override=override), machine)
        found = space.Estimated(machine.hbm_bytes)
        assert {each.offload for each in found.kept} <= offloads
        fit = [e for e in found.kept.values() if e.Bytes(Correction()) <= machine.hbm_bytes]
        assert fit and all(bool(each.hosted) == (len(offloads) > 1) for each in fit)
        seconds.append(found.Fastest(machine.hbm_bytes))
    offloaded, whole = seconds
    assert offloaded > 10 * whole


def test_moves_are_those_of_a_compiled_plan():
    """mt.M4MoE200E60LOneHost, planned for v6e:2x4 (docs/state.md): 93.9 GiB on the host, a link busy for 8.51 s."""
    params = registry.GetParams("mt.M4MoE200E60LOneHost")
    machine, work = parse_machine("v6e:2x4"), read_workload(params)
    space = Space(params, work, machine)
    (layout,) = [each for each in layouts(work, 8) if str(each.mesh) == "expert:8"]
    estimate = space.estimator.Of(Candidate(layout, offload=("experts",)))
    assert estimate.hosted == pytest.approx(93.9 * 2**30, rel=0.01)
    assert estimate.moves == pytest.approx(8.51, rel=0.02)


def test_offloaded_activations_leave_the_sums_of_gradients_on_the_device():
    layout = _layout("expert:128")
    one, four = (
        _estimator().Of(Candidate(layout, micro_batches=n, offload=("activations",)))
        for n in (1, 4)
    )
    assert four.hosted == pytest.approx(one.hosted / 4)
    assert four.moves == pytest.approx(one.moves)
    assert four.activations > four.state / 4
