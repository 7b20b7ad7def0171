"""The cost of a GPU program's instructions, whose text differs from a TPU program's."""

import pytest

from lingvo_moe.analysis.plans import tables
from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.work.costs import costs
from lingvo_moe.analysis.plans.work.seconds import compute_seconds
from lingvo_moe.analysis.programs.hlo import module as hlo
from lingvo_moe.analysis.programs.hlo.instructions import HloError
from tests.tiny_layers import tiny_layers

_HEAD = "HloModule m, is_scheduled=true, num_partitions=8\n"
_EXPERTS = "jit(call)/call_tensorflow/m4/encoder/blocks/body/layers_1/ffn/experts"
_NORM = "jit(call)/call_tensorflow/gradient_tape/m4/encoder/blocks/body/layers_0/ffn_norm"
_FFN = "jit(call)/call_tensorflow/gradient_tape/m4/encoder/blocks/body/layers_0/ffn"


def _costs(lines, before=""):
    text = f"{_HEAD}{before}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n"
    return {cost.name: cost for cost in costs(hlo.parse_module(text), tiny_layers("m4"))}


def _place(cost):
    return cost.place.part, cost.place.layer, cost.place.phase


# --- products

# A Triton fusion holds its product, and may hold fusions that prepare the operands.
_TRITON = f"""
%lhs (p: f32[16,4]) -> f32[4,16] {{
  %p = f32[16,4]{{1,0}} parameter(0)
  ROOT %t = f32[4,16]{{1,0}} transpose(%p), dimensions={{1,0}}
}}

%gemm (a: f32[16,4], b: f32[16,8]) -> f32[4,8] {{
  %a = f32[16,4]{{1,0}} parameter(0)
  %b = f32[16,8]{{1,0}} parameter(1)
  %block = f32[4,16]{{1,0}} fusion(%a), kind=kCustom, calls=%lhs
  ROOT %dot = f32[4,8]{{1,0}} dot(%block, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, \
metadata={{op_name="{_EXPERTS}/Einsum"}}
}}
"""
_TRITON_CALL = (
    "  %a.1 = f32[16,4]{1,0} parameter(0)\n  %b.1 = f32[16,8]{1,0} parameter(1)\n"
    "  ROOT %gemm.1 = f32[4,8]{1,0} fusion(%a.1, %b.1), kind=kCustom, calls=%gemm, backend_config="
    '{"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}'
)


def test_a_product_in_a_triton_fusion():
    cost = _costs(_TRITON_CALL, _TRITON)["gemm.1"]
    assert cost.flops == 2 * 4 * 16 * 8
    assert cost.formats == {"tf32": cost.flops}
    assert cost.bytes == 4 * (16 * 4 + 16 * 8 + 4 * 8)
    assert _place(cost) == ("experts", "encoder.moe", "forward")


def _cublas(config, dtype="f32"):
    return f"""  %a = {dtype}[3,16,4]{{2,1,0}} parameter(0)
  %b = {dtype}[3,16,8]{{2,1,0}} parameter(1)
  %call = ({dtype}[3,4,8]{{2,1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
metadata={{op_name="{_EXPERTS}/Einsum"}}, backend_config={{"gemm_backend_config":{{{config}}}}}
  ROOT %y = {dtype}[3,4,8]{{2,1,0}} get-tuple-element(%call), index=0"""


_DIMS = '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}'

_PRECISION = '"precision_config":{"operand_precision":'


@pytest.mark.parametrize("config, dtype, kind", [
    (_DIMS, "f32", "tf32"),
    (_DIMS, "bf16", "bfloat16"),
    (f'{_DIMS},{_PRECISION}["HIGHEST","HIGHEST"]}}', "f32", "float32"),
    (f'{_DIMS},{_PRECISION}["DEFAULT","DEFAULT"]}}', "f32", "tf32"),
])  # fmt: skip
def test_a_call_of_cublas(config, dtype, kind):
    cost = _costs(_cublas(config, dtype))["call"]
    assert cost.flops == 2 * 3 * 4 * 16 * 8
    assert cost.formats == {kind: cost.flops}
    size = 2 if dtype == "bf16" else 4
    assert cost.bytes == size * 3 * (16 * 4 + 16 * 8 + 4 * 8)  # without the workspace
    assert cost.place.part == "experts"


@pytest.mark.parametrize("kind, operands, result", [
    ("Forward", ("input", "filter"), "output"),
    ("ForwardGraph", ("input", "filter"), "output"),
    ("BackwardInput", ("output", "filter"), "input"),
    ("BackwardFilter", ("input", "output"), "filter"),
])  # fmt: skip
def test_a_convolution_and_its_gradients_count_the_same(kind, operands, result):
    shapes = {"input": "f32[4,8,8,6]", "filter": "f32[10,3,3,6]", "output": "f32[4,4,4,10]"}
    first, second = (shapes[name] for name in operands)
    cost = _costs(
        f"""  %a = {first}{{3,2,1,0}} parameter(0)
  %b = {second}{{3,2,1,0}} parameter(1)
  %conv = ({shapes[result]}{{3,2,1,0}}, u8[999]{{0}}) custom-call(%a, %b), window={{size=3x3 stride=2x2 pad=0_1x0_1}}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{kind}"
  ROOT %y = {shapes[result]}{{3,2,1,0}} get-tuple-element(%conv), index=0"""
    )["conv"]
    # In each dimension the last of four windows has one of its three rows in the padding.
    assert cost.flops == 2 * 4 * 10 * 6 * (3 * 4 - 1) ** 2
    assert cost.formats == {"tf32": cost.flops}
    assert cost.bytes == 4 * (4 * 8 * 8 * 6 + 10 * 3 * 3 * 6 + 4 * 4 * 4 * 10)


def test_a_call_of_cublas_without_dimensions_is_an_error():
    with pytest.raises(HloError, match="call calls cuBLAS without saying which dimensions"):
        _costs(_cublas('"alpha_real":1'))


@pytest.mark.parametrize("attributes, kind", [
    ("", "tf32"),
    (", operand_precision={highest,highest}", "float32"),
    (", algorithm=dot_f32_f32_f32", "float32"),
    (", algorithm=dot_tf32_tf32_f32", "tf32"),
])  # fmt: skip
def test_float32_is_multiplied_in_tf32_unless_the_program_demands_more(attributes, kind):
    dot = "  ROOT %d = f32[4,8] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    found = _costs(
        f"  %a = f32[4,16] parameter(0)\n  %b = f32[16,8] parameter(1)\n{dot}{attributes}"
    )
    assert found["d"].formats == {kind: 2 * 4 * 16 * 8}


def test_each_number_format_has_its_peak():
    h100 = parse_machine("h100:1x8")
    dtypes = {"f8e4m3fn": "fp8", "f8e5m2": "fp8", "bf16": "bfloat16", "f32": "tf32"}
    for dtype, kind in dtypes.items():
        found = _costs(_cublas(_DIMS, dtype)).values()
        assert tables.number_formats(found) == {kind: 2 * 3 * 4 * 16 * 8}
        seconds = sum(compute_seconds(cost, h100) for cost in found)
        assert seconds == pytest.approx(2 * 3 * 4 * 16 * 8 / CARDS["h100"].peak_flops[kind])


# --- collectives

_COLLECTIVES = f"""
%product (f.0: f32[8,8]) -> f32[8,8] {{
  %f.0 = f32[8,8]{{1,0}} parameter(0)
  ROOT %f.1 = f32[8,8]{{1,0}} dot(%f.0, %f.0), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, \
metadata={{op_name="{_FFN}/einsum/Einsum_1"}}
}}

%join (j.0: f32[8], j.1: f32[64]) -> f32[72] {{
  %j.0 = f32[8]{{0}} parameter(0)
  %j.1 = f32[64]{{0}} parameter(1)
  ROOT %j.2 = f32[72]{{0}} concatenate(%j.0, %j.1), dimensions={{0}}
}}
"""
_ENTRY = f"""  %x = f32[8,8]{{1,0}} parameter(0)
  %n = f32[8]{{0}} parameter(1)
  %norm = f32[8]{{0}} negate(%n), metadata={{op_name="{_NORM}/add_1/Sum"}}
  %ffn = f32[8,8]{{1,0}} fusion(%x), kind=kCustom, calls=%product
  %flat = f32[64]{{0}} bitcast(%ffn)
  %joined = f32[72]{{0}} fusion(%norm, %flat), kind=kLoop, calls=%join
  %sum = f32[72]{{0}} all-reduce-start(%joined), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%join
  %done = f32[72]{{0}} all-reduce-done(%sum)
  %tokens = ((f32[8,8]{{1,0}}), f32[8,8]{{1,0}}) all-to-all-start(%x), replica_groups=[1,8]<=[8], dimensions={{0}}, \
metadata={{op_name="{_EXPERTS}/../dispatcher/transpose"}}
  %there = f32[8,8]{{1,0}} all-to-all-done(%tokens)
  ROOT %y = f32[72]{{0}} negate(%done)"""


def test_a_collective_of_several_tensors_belongs_to_the_layer_of_the_largest():
    cost = _costs(_ENTRY, _COLLECTIVES)["sum"]
    assert cost.collective.bytes == 72 * 4
    assert _place(cost) == ("dense_ffn", "encoder.dense", "backward")


def test_an_asynchronous_all_to_all_counts_once_with_the_bytes_of_one_operand():
    found = _costs(_ENTRY, _COLLECTIVES)
    uses = {name: cost.collective for name, cost in found.items() if cost.collective}
    assert list(uses) == ["sum", "tokens"]
    assert (uses["tokens"].kind, uses["tokens"].bytes) == ("all-to-all", 8 * 8 * 4)


# --- what runs how often

_CALLS = """
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[8]{0} get-tuple-element(%s), index=1
  %w = f32[8]{0} call(%v), to_apply=%command_buffer
  ROOT %r = (s32[], f32[8]{0}) tuple(%i, %w)
}

%command_buffer (c.0: f32[8]) -> f32[8] {
  %c.0 = f32[8]{0} parameter(0)
  ROOT %c.1 = f32[8]{0} negate(%c.0)
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}
"""


def test_loops_state_their_trips_and_command_buffers_run_in_them():
    found = _costs(
        """  %zero = s32[] constant(0)
  %x = f32[8]{0} parameter(0)
  %init = (s32[], f32[8]{0}) tuple(%zero, %x)
  ROOT %loop = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}""",
        _CALLS,
    )
    assert found["c.1"].times == 7
    assert found["c.1"].bytes == 2 * 8 * 4
    assert found["w"].bytes == 0
