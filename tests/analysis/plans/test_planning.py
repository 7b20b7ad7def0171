"""Plans of a small model, from the real TPU and GPU compilers: equal to recorded ones, exact where they claim to be.

Compiling for eight devices takes about half a minute, so all tests share two plans. This writes `tests/plans/` again
(likewise for h100:1x8):

    python -m tools.plan --model=mt.M4Tiny --topology=v3:2x2 --output=tests/plans/M4Tiny-v3_2x2.json \\
        --model_params_override='task.num_encoder_layers=4;task.num_decoder_layers=4;task.optimizer=adam'
"""

import gzip
import json
import re
from importlib import metadata
from pathlib import Path

import pytest
import toy_task
from gpu_compiler import needs_gpu_compiler
from refusals import refuses

from lingvo_moe.analysis.plans import step_plan
from lingvo_moe.analysis.plans.golden import differences
from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.analysis.plans.pipeline import PipelineSchedule
from lingvo_moe.analysis.programs.aot import aot, aot_tpu
from lingvo_moe.analysis.search import best_plan
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine import cuda_plugin
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.files.sealed import read_sealed
from lingvo_moe.core.sharding import Mesh, ShardingError
from lingvo_moe.reproduction import measures
from tools import plan

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[2] / "plans" / "M4Tiny-v3_2x2.json"
GOLDEN_GPU = GOLDEN.with_name("M4Tiny-h100_1x8.json")
# Two blocks a stack: a loop of one is written out. Adam has a third of Adafactor's operations.
LAYERS = "task.num_encoder_layers=4;task.num_decoder_layers=4;task.optimizer=adam"
MOE_LAYERS = ("encoder.moe", "decoder.moe")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def lowering():
    return step_plan.Lowering()


@pytest.fixture(scope="module")
def tiny(cache, lowering):
    request = step_plan.Request("mt.M4Tiny", "v3:2x2", LAYERS)
    return step_plan.make_plan(request, cache, lowering=lowering)


@pytest.fixture(scope="module")
def on_gpus(tiny, lowering):
    """The plan of the step, which is not lowered again, for as many GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "lower_step", None)
        request = step_plan.Request("mt.M4Tiny", "h100:1x8", LAYERS)
        return step_plan.make_plan(request, None, lowering=lowering)


def _params(override=LAYERS, model="mt.M4Tiny"):
    return registry.GetParams(model, override)


def _flops(plan, phase, *parts):
    return sum(
        row["flops"]
        for row in plan["work"]
        if row["phase"] == phase and (not parts or row["part"] in parts)
    )


# --- the plan equals the recorded one, and its figures are right


def test_the_step_keeps_its_promises(tiny):
    assert differences(json.loads(GOLDEN.read_text()), tiny) == []


@needs_gpu_compiler
def test_the_step_keeps_its_promises_on_gpus(on_gpus):
    assert differences(json.loads(GOLDEN_GPU.read_text()), on_gpus) == []


@needs_gpu_compiler
def test_gpus_run_the_same_program_and_exchange_the_same_tokens(tiny, on_gpus):
    assert on_gpus["program_hash"] == tiny["program_hash"]
    assert _all_to_alls(on_gpus) == _all_to_alls(tiny)
    assert {row["kind"] for row in on_gpus["collectives"]} == {"all-to-all", "all-reduce"}


def _all_to_alls(plan):
    counts = {}
    for row in plan["collectives"]:
        if row["kind"] == "all-to-all":
            key = (row["layer"], row["part"], row["phase"])
            counts[key] = counts.get(key, 0) + row["count"]
    return counts


@needs_gpu_compiler
def test_a_gpu_plan_counts_the_model_s_operations_and_attributes_what_it_counts(tiny, on_gpus):
    for phase in ("forward", "recompute", "backward"):
        assert _flops(on_gpus, phase) == _flops(tiny, phase)  # whose count is that of the einsums
    work = on_gpus["work"]
    assert on_gpus["number_formats"] == {"tf32": sum(row["flops"] for row in work)}
    assert min(measures.attributed(on_gpus, what) for what in ("flops", "bytes")) >= 0.95
    # The sum of the losses, and that of the parts of the gradients' norm.
    outside = {
        part: [(row["count"], row["bytes"]) for row in rows]
        for part, rows in measures.without_layer(on_gpus).items()
    }
    assert outside == {"loss": [(1, 4)], "optimizer": [(1, 16)]}
    (embeddings,) = (row for row in on_gpus["collectives"] if row["part"] == "embedding")
    # The gradients of both embeddings, which are named after the larger.
    found = [embeddings[name] for name in ("layer", "count", "bytes")]
    assert found == ["source_embedding", 1, 45080]


@needs_gpu_compiler
def test_memory_of_a_gpu_is_what_xla_allocates(on_gpus):
    memory = on_gpus["memory"]
    sizes = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]
    assert memory["fits"] and memory["needed"] == sizes >= memory["peak"]
    assert sum(memory["kinds"].values()) == memory["needed"]
    assert memory["kinds"]["weights"] == on_gpus["parameters"]["bytes"]
    assert memory["traced_peak"] == pytest.approx(memory["peak"], rel=0.1)


def test_each_moe_layer_exchanges_tokens_twice_each_way_and_gathers_nothing(tiny):
    counts = {}
    for row in tiny["collectives"]:
        key = (row["layer"], row["phase"], row["kind"])
        counts[key] = counts.get(key, 0) + row["count"]
    for layer in MOE_LAYERS:
        for phase in ("forward", "recompute", "backward"):
            assert counts.pop((layer, phase, "all-to-all")) == 2 * 2  # two blocks
    assert {kind for _, _, kind in counts} == {"all-reduce"}


def test_memory_is_the_compiler_s_and_arguments_are_the_state_and_the_batch(tiny, cache):
    (entry,) = cache.iterdir()
    assert entry.name.startswith(tiny["program_hash"][:32])
    compiled = json.loads(gzip.decompress(read_sealed(entry, pytest.fail)))
    memory = tiny["memory"]
    for key, size in compiled["memory"].items():
        assert memory[key] == size
    assert memory["fits"]
    assert sum(memory["kinds"].values()) == memory["needed"]
    held = memory["kinds"]
    assert held["weights"] == tiny["parameters"]["bytes"]
    assert held["slots"] == tiny["parameters"]["slot_bytes"]
    # Our own trace of what is live when, against the compiler's peak.
    assert memory["traced_peak"] == pytest.approx(memory["peak"], rel=0.1)


def test_operations_are_a_hand_count_of_the_einsums(tiny):
    """The backward pass has twice those of the forward pass, but for the dispatch mask, which no weight changes."""
    params = _params()
    batch = params.input.Instantiate().BatchSpec()
    hand = sum(params.task.Instantiate().Costs().FlopsByPart(batch).values()) / 8
    assert _flops(tiny, "forward") == pytest.approx(hand, rel=0.02)
    parts = {
        part: [_flops(tiny, phase, part) for phase in ("forward", "recompute", "backward")]
        for part in ("attention", "dense_ffn", "experts", "dispatch_combine")
    }
    for part, (forward, recompute, backward) in parts.items():
        dispatch = part == "dispatch_combine"
        assert recompute == pytest.approx(forward * (0.5 if dispatch else 1), rel=0.02), part
        assert backward == pytest.approx(forward * (1.5 if dispatch else 2), rel=0.02), part


# --- what cannot be planned


@refuses(
    PlanError,
    (("mt.M4Tiny", "v9:2x2"), "no TPU generation 'v9'"),
    (("mt.M4Tinny", "v3:2x2"), registry.RegistryError, r"did you mean.*mt\.M4Tiny"),
    (("mt.M4Tiny", "v3:4x4"), ShardingError, r"does not divide over the 32 devices"),
    (("mt.T96L", "v5e:2x2"), ShardingError, "cannot be laid over 4 devices"),
    (("mt.M4Tiny", "v3:2x2", "", "train", "expert:4"), "--mesh=expert:4 has 4"),
    (("mt.M4Tiny", "v3:2x2", "", "serve"), "--what=serve: must be one of train"),
)
def test_a_mistake_is_told_before_anything_is_lowered(request_, cache):
    step_plan.make_plan(step_plan.Request(*request_), cache)


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch, cache):
    monkeypatch.setattr(aot_tpu.importlib.util, "find_spec", lambda name: None)
    aot_tpu._describe.cache_clear()
    with pytest.raises(EngineError, match=r"pip install 'jax\[tpu\]'"):
        step_plan.make_plan(step_plan.Request("mt.M4Tiny", "v3:2x2"), cache)


def test_without_the_gpu_compiler_it_says_how_to_get_it(monkeypatch, cache):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cuda_plugin.importlib.metadata, "version", missing)
    with pytest.raises(EngineError, match=r"pip install --no-deps -r requirements-gpu\.txt"):
        step_plan.make_plan(step_plan.Request("mt.M4Tiny", "h100:4x8"), cache)


def test_a_model_that_does_not_fit_gives_a_plan_that_says_by_how_much(monkeypatch):
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory: total memory required "
        "for HLO temporaries (18.45G) exceeds available HBM (15.48G)"
    )

    def refuse(program, topology):
        raise aot_tpu.out_of_memory(program.name, topology, message)

    monkeypatch.setattr(aot, "compile_for_topology", refuse)
    plan = step_plan.make_plan(
        step_plan.Request(f"toy_task.{toy_task.Line.__name__}", "v3:2x2", mesh="data:8"), None
    )
    memory = plan["memory"]
    assert not memory["fits"]
    assert memory["misses_by"] == pytest.approx((18.45 - 15.48) * 2**30, rel=1e-3)
    assert plan["time"] is None and plan["work"] == plan["collectives"] == []
    assert re.match(
        "None of task.dtype, .* makes it fit, nor do they together", memory["advice"][0]
    )


def test_the_smallest_slice_skips_what_cannot_hold_the_state(monkeypatch):
    tried = []
    needed = 17 * 2**30

    def make(request, *_):
        tried.append(request.topology)
        fits = len(tried) == 2
        memory = {"fits": fits, "misses_by": 2**30, "needed": needed}
        return {"memory": memory, "topology": request.topology}

    monkeypatch.setattr(step_plan, "make_plan", make)
    request = step_plan.Request("mt.M4MoE128E36L", "v5e")
    # Of 15.75 GiB, weights, slots and gradients are 24.4 GiB on 16 chips, 15.4 on 32; 128 experts do
    # not divide over 256 chips.
    assert list(best_plan.slices_to_try(request)) == ["v5e:4x8", "v5e:8x8", "v5e:8x16"]
    assert best_plan.smallest_slice(request, None)["topology"] == "v5e:8x8"
    assert tried == ["v5e:4x8", "v5e:8x8"]
    tried.clear()
    needed = 35 * 2**30  # on 32 devices: more than 64 devices have together, by more than a tenth
    assert best_plan.smallest_slice(request, None)["topology"] == "v5e:8x16"
    assert tried == ["v5e:4x8", "v5e:8x16"]
    dense = best_plan.slices_to_try(step_plan.Request("mt.T96L", "v5p"))
    assert next(dense) == "v5p:2x2x2"  # heads are sharded over 8 devices
    gpus = best_plan.slices_to_try(step_plan.Request("mt.M4MoE128E36L", "a100-40"))
    assert next(gpus) == "a100-40:2x8"  # 48.8 GiB on each of 8 GPUs, 24.4 on 16, of 35.5
    with pytest.raises(best_plan.FitsNone, match=r"v5e.* none can hold its state"):
        best_plan.smallest_slice(step_plan.Request("mt.M4MoE2048E60L", "v5e"), None)


# --- the command


def test_the_command_compares_recorded_plans(tmp_path, capsys):
    page = tmp_path / "plans.html"
    assert plan.main([f"--compare={GOLDEN},{GOLDEN}", f"--html={page}"]) == 0
    assert capsys.readouterr().out.count("v3:2x2") >= 2
    assert "<html" in page.read_text()


def test_variants_are_planned_and_compared_in_one_table(tmp_path, monkeypatch, capsys):
    asked = []

    def make(request, cache, *_):
        asked.append((request.override, str(cache)))
        made = json.loads(GOLDEN.read_text()) | {"override": request.override}
        made["memory"]["fits"] = "bfloat16" not in request.override
        return made

    monkeypatch.setattr(step_plan, "make_plan", make)
    flags = ["--model=mt.M4Tiny", "--topology=v3:2x2", f"--cache_dir={tmp_path}"]
    flags += ["--model_params_override=task.dropout=0.1", f"--output={tmp_path / 'plan.json'}"]
    assert plan.main([*flags, '--variants=|task.remat=["hidden","query"]']) == 0
    overrides = ["task.dropout=0.1", 'task.dropout=0.1;task.remat=["hidden","query"]']
    assert asked == [(override, str(tmp_path)) for override in overrides]
    written = [json.loads((tmp_path / f"plan-{i}.json").read_text()) for i in (1, 2)]
    assert [made["override"] for made in written] == overrides
    printed = capsys.readouterr().out
    assert "memory of HBM" in printed and "task.remat" in printed
    assert "What is live at the peak" not in printed  # the table alone
    assert plan.main([*flags, "--variants=|task.fprop_dtype='bfloat16'"]) == 3


def test_several_machines_are_planned_and_compared_in_one_table(tmp_path, monkeypatch, capsys):
    def make(request, *_):
        if request.topology == "v5p:2x2x1":
            raise step_plan.PlanError("does not divide")
        made = json.loads(GOLDEN.read_text())
        made["topology"] |= {"name": request.topology}
        return made

    monkeypatch.setattr(step_plan, "make_plan", make)
    flags = ["--model=mt.M4Tiny", f"--cache_dir={tmp_path}", f"--output={tmp_path / 'plan.json'}"]
    assert plan.main([*flags, "--topology=v3:2x2,v3:4x4", "--price=v3:2"]) == 0
    printed = capsys.readouterr().out
    assert "v3:2x2" in printed and "v3:4x4" in printed and "cost in all" in printed
    assert json.loads((tmp_path / "plan-2.json").read_text())["time"]["price"] == 2
    assert plan.main([*flags, "--topology=v3:2x2,v5p:2x2x1"]) == 1
    said = capsys.readouterr()
    assert "plan: v5p:2x2x1: does not divide" in said.err and "v3:2x2" in said.out


def test_the_schedule_of_pipelines_is_that_of_the_parameters():
    mesh = Mesh.parse("stage:4,data:2,expert:2")
    assert step_plan.pipeline_schedule(_params(), mesh) is None
    asked = ["stages=4", "schedule=interleaved", "micro_batches=16", "repeats=2"]
    whole = _params(";".join(f"task.pipeline.{part}" for part in asked))
    assert step_plan.pipeline_schedule(whole, mesh) == PipelineSchedule("interleaved", 4, 16, 2)
    stacks = [("encoder", 9), ("decoder", 8)]
    assert step_plan.pipeline_schedule(whole, mesh, stacks).stacks == tuple(stacks)
    whole.task.activation_split = {"B": ("data", "expert")}  # two micro-batches at the same time
    assert step_plan.pipeline_schedule(whole, mesh) == PipelineSchedule("interleaved", 4, 8, 2)
    images = step_plan.pipeline_schedule(_params("", "image.ResNet50Pipe4"), mesh)
    assert images == PipelineSchedule("gpipe", 4, 16)


@needs_gpu_compiler
def test_a_decode_step_copies_no_cache_on_gpus():
    """A search's caches, which are most of its state, are not made again in another order of dimensions."""
    override = "input.batch_size=64;task.fprop_dtype=bfloat16;task.num_kv_heads=2"
    request = step_plan.Request("lm.Tiny", "a100:1x1", override, "decode", prompt=512, reply=64)
    memory = step_plan.make_plan(request, None)["memory"]
    assert memory["temporaries"] < memory["aliased"] / 8
