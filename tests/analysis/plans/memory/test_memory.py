from types import SimpleNamespace

import pytest

from lingvo_moe.analysis.plans.machines.topology import Topology
from lingvo_moe.analysis.plans.memory.advice import Peak, advise
from lingvo_moe.analysis.plans.memory.breakdown import argument_bytes, memory_plan, misfit_plan
from lingvo_moe.analysis.programs.hlo.parts import Layers
from lingvo_moe.core.engine.lowering.signature import Signature
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh

_KIB, _GIB = 1024, 2**30
_HBM = Topology.parse("v3:2x2").chip.hbm_bytes
_MESH = Mesh(("expert",), (8,))


def _signature(*specs: TensorSpec) -> Signature:
    return Signature("step", _MESH, specs, (), {"names": [], "trees": []}, {}, ())


def _refused(needed: float, limit: float, text: str = "", holders=()) -> SimpleNamespace:
    """The compiler's report on a program that needs so many GiB."""
    return SimpleNamespace(
        needed_bytes=round(needed * _GIB),
        limit_bytes=round(limit * _GIB),
        holders=holders,
        hlo_text=text,
    )


_LAYERS = Layers(
    {
        "m": ("", ""),
        "m.blocks": ("loop", "m"),
        "m.body.layers_0": ("residual", "m.moe"),
        "m.body.layers_0.self_atten": ("attention", "m.moe"),
        "m.body.layers_0.ffn.experts": ("experts", "m.moe"),
    }
)
_SIGNATURE = _signature(
    TensorSpec((), "int32", (), "state.step"),
    TensorSpec(
        (8, 16, 64), "float32", ("expert", None, None), "state.theta.body.layers[0].ffn.experts.wi"
    ),
    TensorSpec((16, 64), "float32", (None, None), "state.theta.body.layers[0].self_atten.q"),
    TensorSpec((16,), "float32", (None,), "state.slots.body.layers[0].self_atten.q.row"),
    TensorSpec((16, 128), "int32", ("expert", None), "batch.src.ids"),
)

# One weight of each kind is cast, x is kept in the forward loop, dq is the gradient that the backward
# loop adds up.
_STEP = """HloModule step, input_output_alias={ {0}: (2, {}, may-alias) }, entry_computation_layout={}

%forward (f: (s32[], f32[4,128], bf16[1,16,64])) -> (s32[], f32[4,128], bf16[1,16,64]) {
  %f = (s32[], f32[4,128]{1,0}, bf16[1,16,64]{2,1,0}) parameter(0)
  %f.i = s32[] get-tuple-element(%f), index=0
  %f.x = f32[4,128]{1,0} get-tuple-element(%f), index=1
  %f.w = bf16[1,16,64]{2,1,0} get-tuple-element(%f), index=2
  %f.one = s32[] constant(1)
  %f.r = f32[1,128]{1,0} custom-call(%f.w), metadata={op_name="@/m/body/layers_0/self_atten/x"}
  %f.u = f32[4,128]{1,0} dynamic-update-slice(%f.x, %f.r, %f.i, %f.i), metadata={op_name="@/m/blocks/while/Write"}
  %f.n = s32[] add(%f.i, %f.one)
  ROOT %f.t = (s32[], f32[4,128]{1,0}, bf16[1,16,64]{2,1,0}) tuple(%f.n, %f.u, %f.w)
}

%forward_less (fc: (s32[], f32[4,128], bf16[1,16,64])) -> pred[] {
  %fc = (s32[], f32[4,128]{1,0}, bf16[1,16,64]{2,1,0}) parameter(0)
  %fc.i = s32[] get-tuple-element(%fc), index=0
  %fc.n = s32[] constant(4)
  ROOT %fc.c = pred[] compare(%fc.i, %fc.n), direction=LT
}

%backward (b: (s32[], f32[4,128], f32[16,64])) -> (s32[], f32[4,128], f32[16,64]) {
  %b = (s32[], f32[4,128]{1,0}, f32[16,64]{1,0}) parameter(0)
  %b.i = s32[] get-tuple-element(%b), index=0
  %b.x = f32[4,128]{1,0} get-tuple-element(%b), index=1
  %b.dq = f32[16,64]{1,0} get-tuple-element(%b), index=2
  %b.one = s32[] constant(1)
  %b.big = f32[64,128]{1,0} custom-call(%b.x), metadata={op_name="@/m/body/layers_0/ffn/experts/einsum"}
  %b.g = f32[16,64]{1,0} custom-call(%b.big), metadata={op_name="@/gradient_tape/m/body/layers_0/self_atten/x"}
  %b.s = f32[16,64]{1,0} add(%b.dq, %b.g), metadata={op_name="@/backward/while/Add"}
  %b.n = s32[] subtract(%b.i, %b.one)
  ROOT %b.t = (s32[], f32[4,128]{1,0}, f32[16,64]{1,0}) tuple(%b.n, %b.x, %b.s)
}

%backward_less (bc: (s32[], f32[4,128], f32[16,64])) -> pred[] {
  %bc = (s32[], f32[4,128]{1,0}, f32[16,64]{1,0}) parameter(0)
  %bc.i = s32[] get-tuple-element(%bc), index=0
  %bc.n = s32[] constant(0)
  ROOT %bc.c = pred[] compare(%bc.i, %bc.n), direction=GE
}

ENTRY %main (p0: s32[], p1: f32[1,16,64], p2: f32[16,64], p3: f32[16], p4: s32[2,128]) -> (f32[16,64]) {
  %p0 = s32[] parameter(0)
  %p1 = f32[1,16,64]{2,1,0} parameter(1)
  %p2 = f32[16,64]{1,0} parameter(2)
  %p3 = f32[16]{0} parameter(3)
  %p4 = s32[2,128]{1,0} parameter(4)
  %cast = bf16[1,16,64]{2,1,0} convert(%p1)
  %zero = f32[] constant(0)
  %x.0 = f32[4,128]{1,0} broadcast(%zero), dimensions={}
  %i.0 = s32[] constant(0)
  %f.init = (s32[], f32[4,128]{1,0}, bf16[1,16,64]{2,1,0}) tuple(%i.0, %x.0, %cast)
  %f.while = (s32[], f32[4,128]{1,0}, bf16[1,16,64]{2,1,0}) while(%f.init), condition=%forward_less, body=%forward
  %x = f32[4,128]{1,0} get-tuple-element(%f.while), index=1
  %w = bf16[1,16,64]{2,1,0} get-tuple-element(%f.while), index=2
  %dq.0 = f32[16,64]{1,0} broadcast(%zero), dimensions={}
  %i.1 = s32[] constant(3)
  %b.init = (s32[], f32[4,128]{1,0}, f32[16,64]{1,0}) tuple(%i.1, %x, %dq.0)
  %b.while = (s32[], f32[4,128]{1,0}, f32[16,64]{1,0}) while(%b.init), condition=%backward_less, body=%backward
  %dq = f32[16,64]{1,0} get-tuple-element(%b.while), index=2
  %mean = f32[] custom-call(%w)
  %new = f32[16,64]{1,0} custom-call(%p2, %dq, %mean), metadata={op_name="@/optimizer/m/body/layers_0/self_atten/q/sub"}
  ROOT %out = (f32[16,64]{1,0}) tuple(%new)
}
""".replace("@", "jit(f)/call_tensorflow")
_ARGUMENTS = 4 + 4 * _KIB + 4 * _KIB + 64 + _KIB
_REPORTED = {
    "arguments": _ARGUMENTS + 100,  # padded
    "outputs": 4 * _KIB,
    "aliased": 4 * _KIB,
    "temporaries": 90 * _KIB,  # not all of it live at a time
    "code": 7,
    "peak": _ARGUMENTS + 100 + 44 * _KIB,
}


def test_arguments_are_those_of_the_signature_to_the_byte():
    kinds = argument_bytes(_SIGNATURE)
    assert kinds == {"weights": 8 * _KIB, "slots": 64, "inputs": 4 + _KIB}
    assert sum(kinds.values()) == _ARGUMENTS
    average = _signature(TensorSpec((16, 64), "float32", (None, None), "state.ema.m.w"))
    assert argument_bytes(average) == {"weights": 0, "slots": 4 * _KIB, "inputs": 0}


def test_what_is_held_at_the_peak_is_told_apart():
    plan = memory_plan(_STEP, _REPORTED, _SIGNATURE, _HBM, _LAYERS)
    kinds = plan["kinds"]
    assert kinds["weight_copies"] == 2 * _KIB
    assert kinds["activations"] == 2 * _KIB + 4  # and the loop's counter
    assert kinds["gradients"] == (4 + 4) * _KIB  # the sum and what is added
    assert kinds["temporaries"] == pytest.approx(32 * _KIB, abs=64)  # and scalars
    assert plan["kept_for_backward"] == 2 * _KIB + 4
    assert plan["traced_peak"] == pytest.approx(_ARGUMENTS + 44 * _KIB, abs=64)


def test_the_totals_are_the_compilers_and_kinds_add_up_to_them():
    plan = memory_plan(_STEP, _REPORTED, _SIGNATURE, _HBM, _LAYERS)
    assert {key: plan[key] for key in _REPORTED} == _REPORTED
    assert plan["needed"] == _REPORTED["peak"] + 7
    assert sum(plan["kinds"].values()) == plan["needed"]
    assert plan["hbm"] == _HBM and plan["fits"] and plan["misses_by"] == 0


def test_where_the_trace_sees_more_than_the_compiler_keeps_nothing_is_negative():
    plan = memory_plan(
        _STEP, _REPORTED | {"peak": _ARGUMENTS + 20 * _KIB}, _SIGNATURE, _HBM, _LAYERS
    )
    assert sum(plan["kinds"].values()) == plan["needed"]
    assert min(plan["kinds"].values()) >= 0 and plan["kinds"]["padding"] == 0


def test_holders_name_layer_part_and_phase_largest_first():
    plan = memory_plan(_STEP, _REPORTED, _SIGNATURE, _HBM, _LAYERS)
    rows = plan["holders"]
    assert [r["bytes"] for r in rows] == sorted((r["bytes"] for r in rows), reverse=True)
    assert sum(r["bytes"] for r in rows) == plan["traced_peak"]
    found = {(r["kind"], r["part"], r["phase"]): r["bytes"] for r in rows}
    assert found["temporaries", "experts", "recompute"] == 32 * _KIB
    assert found["gradients", "attention", "backward"] == 8 * _KIB
    assert found["weights", "experts", ""] == 4 * _KIB
    assert found["weight_copies", "experts", ""] == 2 * _KIB
    assert found["activations", "loop", "forward"] == 2 * _KIB
    assert found["slots", "attention", ""] == 64


def test_a_refused_module_is_traced_like_a_compiled_one():
    error = _refused(_HBM / _GIB + 3, _HBM / _GIB, _STEP)
    plan, compiled = (
        misfit_plan(error, _SIGNATURE, _LAYERS),
        memory_plan(_STEP, _REPORTED, _SIGNATURE, _HBM, _LAYERS),
    )
    assert not plan["fits"] and plan["misses_by"] == 3 * _GIB
    assert plan["needed"] == plan["peak"] == _HBM + 3 * _GIB == sum(plan["kinds"].values())
    assert plan["holders"] == compiled["holders"]
    assert plan["kinds"]["gradients"] == compiled["kinds"]["gradients"]
    assert not {"outputs", "aliased", "code"} & plan.keys()


def test_a_refused_program_has_the_compilers_figures_and_holders():
    holder = SimpleNamespace(
        bytes=3 * _GIB,
        op_name="jit(f)/call_tensorflow/gradient_tape/m/body/layers_0/ffn/experts/x",
        shape="f32[1]",
    )
    plan = misfit_plan(_refused(20, 16, holders=[holder] * 2), _SIGNATURE, _LAYERS)
    assert not plan["fits"] and plan["misses_by"] == 4 * _GIB
    assert plan["peak"] == plan["needed"] == 20 * _GIB == sum(plan["kinds"].values())
    (row,) = plan["holders"]
    assert row["bytes"] == 6 * _GIB and (row["part"], row["phase"]) == ("experts", "backward")
    assert any("79% of the tokens a device would fit" in line for line in plan["advice"])


def _held(**changes) -> Peak:
    by_kind = {"weights": 4 * _GIB, "slots": 2 * _GIB, "gradients": 3 * _GIB, "weight_copies": 0}
    return Peak(
        **(
            {"by_kind": by_kind, "replicated": 2 * _GIB, "divisible": 4 * _GIB, "scaling": 6 * _GIB}
            | changes
        )
    )


def test_advice_is_computed_and_says_whether_it_is_enough():
    lines = advise(_held(), 18 * _GIB, 16 * _GIB)
    (twice,) = [line for line in lines if "Twice the devices" in line]
    # 4 of 6 GiB are sharded; their gradients are half as large.
    assert "3.00 GiB less" in twice
    (sharding,) = [line for line in lines if "Sharding the replicated weights" in line]
    assert "1.50 GiB less" in sharding
    assert "not enough: 512.0 MiB would still be missing" in sharding
    (tokens,) = [line for line in lines if "tokens" in line]
    assert tokens.startswith("66% of the tokens")


def test_the_type_of_activations():
    """A training step that does not fit has remedies.py's estimate, which counts gradients too."""
    float32 = {"activations": 3 * _GIB, "temporaries": _GIB}
    decoder = _held(float32=float32, by_kind={"weights": 4 * _GIB, "slots": 0})
    (line,) = [line for line in advise(decoder, 18 * _GIB, 16 * _GIB) if "bfloat16" in line]
    assert "up to 2.00 GiB less" in line and "That is enough: 2.00 GiB are missing." in line
    trains = _held(float32=float32)
    assert not any("bfloat16" in line for line in advise(trains, 18 * _GIB, 16 * _GIB))
    assert any("bfloat16" in line for line in advise(trains, 12 * _GIB, 16 * _GIB))


def test_fewer_tokens_do_not_help_where_weights_alone_are_too_large():
    lines = advise(_held(scaling=_GIB), 18 * _GIB, 16 * _GIB)
    assert any("Fewer tokens a device cannot make it fit" in line for line in lines)


def test_gradients_of_a_refused_program_are_not_taken_to_shrink_with_its_tokens():
    specs = [TensorSpec((2**30,), "float32", (None,), f"state.{n}.w") for n in ("theta", "slots")]
    advice = misfit_plan(_refused(20, 16), _signature(*specs))["advice"]
    # 4 GiB each of weights, slots and gradients leave 8 that grow with tokens; 4 are missing.
    assert any("50% of the tokens a device" in line and "8.00 GiB" in line for line in advice)


@pytest.mark.parametrize("experts, halves", [(8, False), (16, True)])
def test_twice_the_devices_help_only_where_a_device_has_two_experts(experts, halves):
    size = (experts, 512, 2**20)
    signature = _signature(TensorSpec(size, "float32", ("expert", None, None), "state.theta.wi"))
    advice = misfit_plan(_refused(40, 16), signature)["advice"]
    assert any("Twice the devices" in line for line in advice) == halves
