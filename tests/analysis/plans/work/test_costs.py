"""The cost of executed instructions: products, traffic, collectives, and the layer that each belongs to."""

import math

import jax
import pytest
from hypothesis import given, settings, strategies as st

from lingvo_moe.analysis.plans import tables
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.work import costs as costs_lib
from lingvo_moe.analysis.plans.work.costs import costs
from lingvo_moe.analysis.programs.hlo import module as hlo
from lingvo_moe.analysis.programs.hlo.collectives import CollectiveUse
from tests.tiny_layers import tiny_layers


def _program(lines: str, before: str = "") -> hlo.Module:
    return hlo.parse_module(
        f"HloModule m, is_scheduled=true, num_partitions=8\n{before}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n"
    )


def _costs(lines: str, before: str = "") -> dict[str, costs_lib.Cost]:
    return {cost.name: cost for cost in costs(_program(lines, before), tiny_layers("m"))}


def _shape(dims) -> str:
    return f"f32[{','.join(map(str, dims))}]"


# --- products

_SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=2)


@settings(max_examples=15, deadline=None)
@given(batch=_SIZES, rows=_SIZES, contracted=_SIZES, columns=_SIZES)
def test_flops_of_dots(batch, rows, contracted, columns):
    b, r, k = len(batch), len(rows), len(contracted)
    dims = ",".join(str(d) for d in range(b + r, b + r + k))
    found = _costs(
        f"""  %a = {_shape(batch + rows + contracted)} parameter(0)
  %b = {_shape(batch + contracted + columns)} parameter(1)
  ROOT %d = {_shape(batch + rows + columns)} dot(%a, %b), lhs_batch_dims={{0}}, \
lhs_contracting_dims={{{dims}}}, rhs_contracting_dims={{{b}}}"""
    )
    assert found["d"].flops == 2 * math.prod(batch + rows + contracted + columns)


@pytest.mark.parametrize(("lhs", "rhs", "output", "attributes", "flops"), [
    ((2048, 1024), (1024, 2048), (2048, 2048), "dim_labels=bf_io->bf", 2 * 2048 * 1024 * 2048),
    (
        (16, 128, 1024, 1),  # Rows, time and model by heads: the heads are a spatial dimension.
        (1024, 16, 128, 1),
        (16, 128, 16, 128),
        "window={size=1x16 pad=0_0x15_15 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f",
        2 * 16 * 128 * 1024 * 16 * 128,
    ),
    (
        (16, 128, 16, 128),  # Attention's scores: rows and heads are batched by strides.
        (16, 128, 16, 128),
        (16, 16, 128, 128),
        "window={size=16x16 stride=15x15 lhs_dilate=16x16}, dim_labels=0b1f_0o1i->01bf",
        2 * 16 * 16 * 128 * 128 * 128,
    ),
    (
        (2048, 1024, 1),  # Gradient of a combination, its capacity a reversed window.
        (2048, 4, 1024),
        (2048, 2048, 4),
        "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_o0i->bf0",
        2 * 2048 * 2048 * 4 * 1024,
    ),
])  # fmt: skip
def test_flops_of_a_tpus_convolutions(lhs, rhs, output, attributes, flops):
    found = _costs(
        f"""  %a = {_shape(lhs)} parameter(0)
  %b = {_shape(rhs)} parameter(1)
  ROOT %c = {_shape(output)} convolution(%a, %b), {attributes}, metadata={{op_name="m/softmax/x"}}"""
    )
    assert found["c"].flops == flops


@pytest.mark.parametrize(("lhs", "rhs", "output", "whole"), [
    ((256, 512), (512, 128), (256, 128), 1),
    ((256, 64), (64, 128), (256, 128), 2),  # half of each tile's sum
    ((256, 512), (512, 96), (256, 96), 128 / 96),
    ((1, 512), (512, 128), (1, 128), 128),  # a single row streams through
])  # fmt: skip
def test_products_fill_whole_tiles(lhs, rhs, output, whole):
    lines = f"""  %a = {_shape(lhs)} parameter(0)
  %b = {_shape(rhs)} parameter(1)
  ROOT %c = {_shape(output)} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"""
    (cost,) = (c for c in costs(_program(lines), tile=128) if c.name == "c")
    assert cost.tiled == {"tf32": pytest.approx(whole * cost.flops)}
    assert cost.formats == {"tf32": cost.flops}


@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(3, 9),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    pads=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.sampled_from([1, 2]),
)
def test_flops_of_convolutions_are_the_compilers(size, kernel, stride, pads, dilation, groups):
    def convolve(a, b):
        return jax.lax.conv_general_dilated(
            a,
            b,
            window_strides=(stride,),
            padding=[pads],
            lhs_dilation=dilation[:1],
            rhs_dilation=dilation[1:],
            feature_group_count=groups,
        )

    specs = [
        jax.ShapeDtypeStruct(s, "float32") for s in ((2, 4, size + 4), (6, 4 // groups, kernel))
    ]
    compiled = jax.jit(convolve).lower(*specs).compile()
    found = costs(hlo.parse_module(compiled.as_text()))
    assert sum(cost.flops for cost in found) == compiled.cost_analysis()["flops"]


def test_a_compiled_loop_agrees_with_the_compilers_own_analysis():
    def two_products(x, wi, wo):
        def body(_, x):
            return jax.numpy.tanh(jax.numpy.maximum(x @ wi, 0.0) @ wo)

        return jax.lax.fori_loop(0, 5, body, x)

    specs = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 128), (128, 256), (256, 128))]
    compiled = jax.jit(two_products).lower(*specs).compile()
    module = hlo.parse_module(compiled.as_text())
    analysis = compiled.cost_analysis()
    once = costs(module, once=True)
    assert sum(cost.flops for cost in once) == pytest.approx(analysis["flops"], rel=0.02)
    assert sum(cost.bytes for cost in once) == pytest.approx(analysis["bytes accessed"], rel=0.02)
    exact = 5 * 2 * (2 * 64 * 128 * 256)
    assert sum(cost.flops * cost.times for cost in costs(module)) == exact


# --- traffic

_UPDATE = """
%update (p.0: f32[9,256], p.1: f32[1,256], p.2: s32[]) -> f32[9,256] {
  %p.0 = f32[9,256]{1,0} parameter(0)
  %p.1 = f32[1,256]{1,0} parameter(1)
  %p.2 = s32[] parameter(2)
  %zero.0 = s32[] constant(0)
  ROOT %dus = f32[9,256]{1,0} dynamic-update-slice(%p.0, %p.1, %p.2, %zero.0)
}

%pick (q.0: bf16[9,256], q.1: s32[]) -> f32[256] {
  %q.0 = bf16[9,256]{1,0} parameter(0)
  %q.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %wide = f32[9,256]{1,0} convert(%q.0)
  %slice = f32[1,256]{1,0} dynamic-slice(%wide, %q.1, %zero.1), dynamic_slice_sizes={1,256}
  ROOT %flat = f32[256]{0} bitcast(%slice)
}
"""


def test_traffic_counts_what_is_touched():
    found = _costs(
        """  %stack = f32[9,256]{1,0} parameter(0)
  %row = f32[1,256]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %half = bf16[9,256]{1,0} parameter(3)
  %updated = f32[9,256]{1,0} fusion(%stack, %row, %i), kind=kLoop, calls=%update
  %picked = f32[256]{0} fusion(%half, %i), kind=kLoop, calls=%pick
  %near = f32[9,256]{1,0:T(8,128)S(1)} copy(%stack)
  %fetch = (f32[9,256]{1,0:T(8,128)S(1)}, f32[9,256]{1,0}, u32[]{:S(2)}) copy-start(%stack)
  %fetched = f32[9,256]{1,0:T(8,128)S(1)} copy-done(%fetch)
  %far = f32[9,256]{1,0} add(%near, %stack)
  %rows = f32[2,256]{1,0} gather(%stack, %i), offset_dims={1}
  %same = f32[2304]{0} bitcast(%stack)
  ROOT %both = (f32[9,256]{1,0}, f32[256]{0}) tuple(%far, %picked)""",
        _UPDATE,
    )
    row, stack = 1024, 9 * 1024
    assert found["updated"].bytes == row + row + 4  # Reads the row and the index, writes the row.
    assert found["picked"].bytes == row // 2 + row + 4
    assert found["near"].bytes == found["fetch"].bytes == stack  # On-chip memory is free.
    assert found["fetched"].bytes == 0
    assert found["far"].bytes == 2 * stack
    assert found["rows"].bytes == 2 * row + 2 * row + 4
    assert found["same"].bytes == found["both"].bytes == found["stack"].bytes == 0


# --- collectives

_ASYNC = """
%wrapped (w: bf16[8,4]) -> bf16[8,4] {
  %w = bf16[8,4]{1,0} parameter(0)
  ROOT %exchange = bf16[8,4]{1,0} all-to-all(%w), replica_groups=[1,8]<=[8], dimensions={0}
}
"""


def test_collectives():
    found = _costs(
        """  %x = f32[8,4]{1,0} parameter(0)
  %h = bf16[8,4]{1,0} parameter(1)
  %s = f32[]{:T(256)} parameter(2)
  %sums = (f32[8,4]{1,0}, f32[]{:T(256)}) all-reduce(%x, %s), replica_groups={{0,1},{2,3}}, to_apply=%add
  %start = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %done = f32[32,4]{1,0} all-gather-done(%start)
  %astart = ((bf16[8,4]{1,0}), bf16[8,4]{1,0}, u32[]) async-start(%h), calls=%wrapped
  %adone = bf16[8,4]{1,0} async-done(%astart)
  %moved = f32[8,4]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,0}}
  ROOT %y = f32[32,4]{1,0} negate(%done)""",
        _ASYNC,
    )
    uses = {name: cost.collective for name, cost in found.items() if cost.collective}
    assert uses == {
        "sums": CollectiveUse("all-reduce", 8 * 4 * 4 + 4, 2, 2, 2, ((0, 1), (2, 3))),
        "start": CollectiveUse("all-gather", 32 * 4 * 4, 4, 2, 1, ((0, 1, 2, 3), (4, 5, 6, 7))),
        "exchange": CollectiveUse("all-to-all", 8 * 4 * 2, 8, 1, 1, (tuple(range(8)),)),
        "moved": CollectiveUse("collective-permute", 8 * 4 * 4, 2, 3, 1, ((0, 1), (1, 2), (2, 0))),
    }
    assert found["start"].bytes == (8 + 32) * 4 * 4
    assert found["done"].bytes == found["astart"].bytes == found["adone"].bytes == 0


def test_a_collective_beside_work_counts_once_and_the_work_is_work():
    gather = (
        "%g = f32[8,4]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1}}, dimensions={0}"
    )
    fused = """
%{name} (p: f32[4,4]) -> f32[8,4] {{
  %p = f32[4,4]{{1,0}} parameter(0)
  {gather}
  ROOT %r = f32[8,4]{{1,0}} {root}
}}
""".format
    call = 'custom-call(%g), custom_call_target="AsyncCollective{}"'.format
    before = "".join(
        fused(name=name, gather=gather, root=root)
        for name, root in (
            ("fused_computation.1", call("Start")),
            (
                "async_collective_fusion.1",
                "dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            ),
            ("fused_computation.2", call("Done")),
        )
    )
    found = _costs(
        """  %x = f32[4,4]{1,0} parameter(0)
  %start = f32[8,4]{1,0} fusion(%x), kind=kCustom, calls=%fused_computation.1
  %work = f32[8,4]{1,0} fusion(%x), kind=kOutput, calls=%async_collective_fusion.1
  ROOT %done = f32[8,4]{1,0} fusion(%x), kind=kCustom, calls=%fused_computation.2""",
        before,
    )
    assert [name for name, cost in found.items() if cost.collective is not None] == ["start"]
    assert found["work"].flops == 2 * 8 * 4 * 4


def test_a_fusion_of_an_all_reduce_and_its_slice_is_a_reduce_scatter():
    found = _costs(
        """  %x = f32[8,4]{1,0} parameter(0)
  ROOT %part = f32[2,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter""",
        """
%all-reduce-scatter (p: f32[8,4]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %sum = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %at = s32[] constant(0)
  ROOT %mine = f32[2,4]{1,0} dynamic-slice(%sum, %at, %at), dynamic_slice_sizes={2,4}
}
""",
    )
    groups = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found["part"].collective == CollectiveUse("reduce-scatter", 8 * 4 * 4, 4, 2, 1, groups)


# --- places

_LOOP = """
%product (f.0: f32[4,8], f.1: f32[8,8]) -> f32[4,8] {
  %f.0 = f32[4,8]{1,0} parameter(0)
  %f.1 = f32[8,8]{1,0} parameter(1)
  %d.1 = f32[4,8]{1,0} dot(%f.0, %f.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="call_tensorflow/m/encoder/blocks/body/layers_1/ffn/experts/einsum/Einsum"}
  ROOT %n.1 = f32[4,8]{1,0} negate(%d.1), metadata={op_name="call_tensorflow/m/encoder/blocks/body/add"}
}

%body (p.3: (s32[], f32[4,8], f32[9,4,8])) -> (s32[], f32[4,8], f32[9,4,8]) {
  %p.3 = (s32[], f32[4,8]{1,0}, f32[9,4,8]{2,1,0}) parameter(0)
  %i.3 = s32[] get-tuple-element(%p.3), index=0
  %x.3 = f32[4,8]{1,0} get-tuple-element(%p.3), index=1
  %kept.3 = f32[9,4,8]{2,1,0} get-tuple-element(%p.3), index=2
  %one.3 = s32[] constant(1)
  %next.3 = s32[] add(%i.3, %one.3)
  %scores.3 = f32[4,8]{1,0} exponential(%x.3), \
metadata={op_name="call_tensorflow/m/encoder/blocks/body/layers_1/ffn/router/Softmax"}
  %copied.3 = f32[4,8]{0,1} copy(%scores.3)
  %w.3 = f32[8,8]{1,0} broadcast(%one.3)
  %y.3 = f32[4,8]{1,0} fusion(%copied.3, %w.3), kind=kOutput, calls=%product
  %set.3 = f32[9,4,8]{2,1,0} dynamic-update-slice(%kept.3, %y.3, %i.3, %i.3, %i.3), \
metadata={op_name="call_tensorflow/m/encoder/blocks/while/TensorArrayV2Write/TensorListSetItem"}
  ROOT %t.3 = (s32[], f32[4,8]{1,0}, f32[9,4,8]{2,1,0}) tuple(%next.3, %y.3, %set.3)
}

%condition (p.4: (s32[], f32[4,8], f32[9,4,8])) -> pred[] {
  %p.4 = (s32[], f32[4,8]{1,0}, f32[9,4,8]{2,1,0}) parameter(0)
  %i.4 = s32[] get-tuple-element(%p.4), index=0
  %nine = s32[] constant(9)
  ROOT %less = pred[] compare(%i.4, %nine), direction=LT
}
"""
_MAIN = """  %x = f32[4,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %first = s32[] copy(%zero)
  %laid = f32[4,8]{1,0} copy(%x)
  %empty = f32[9,4,8]{2,1,0} broadcast(%zero)
  %init = (s32[], f32[4,8]{1,0}, f32[9,4,8]{2,1,0}) tuple(%first, %laid, %empty)
  %while = (s32[], f32[4,8]{1,0}, f32[9,4,8]{2,1,0}) while(%init), condition=%condition, body=%body
  %out = f32[9,4,8]{2,1,0} get-tuple-element(%while), index=2
  %gradient = f32[9,4,8]{2,1,0} negate(%out), \
metadata={op_name="call_tensorflow/gradient_tape/m/source_embedding/UnsortedSegmentSum"}
  ROOT %new = f32[9,4,8]{2,1,0} negate(%gradient), \
metadata={op_name="call_tensorflow/optimizer/m/source_embedding/table/mul"}"""


def test_places_of_named_and_nameless_instructions():
    found = _costs(_MAIN, _LOOP)
    places = {name: (cost.place.part, cost.place.layer) for name, cost in found.items()}
    # The place of its product, not of its last operation.
    assert places["y.3"] == ("experts", "encoder.moe")
    assert places["scores.3"] == places["copied.3"] == ("gating", "encoder.moe")
    assert places["laid"] == ("gating", "encoder.moe")  # Its consumer inside the loop.
    assert places["set.3"] == places["empty"] == ("loop", "encoder")
    assert places["gradient"] == ("embedding", "source_embedding")
    assert places["new"] == ("optimizer", "source_embedding")
    assert found["y.3"].times == 9
    assert found["y.3"].flops == 2 * 4 * 8 * 8


def test_a_loop_of_attention_counts_as_one_kernel():
    scope = 'body=%body, metadata={op_name="call_tensorflow/m/encoder/blocks/body/layers_0/self_atten/while"}'
    found = _costs(_MAIN.replace("body=%body", scope), _LOOP)
    assert found["while"].bytes == 4 + 4 * 4 * 8 + 4 * 9 * 4 * 8  # what it carries
    inside = [cost for cost in found.values() if "while" in cost.loops]
    assert inside and all(cost.bytes == cost.estimated_cycles == 0 for cost in inside)
    assert found["y.3"].flops == 2 * 4 * 8 * 8 and found["y.3"].times == 9


def test_a_loop_over_rows_of_experts_counts_as_one_kernel_where_that_moves_less():
    scope = 'metadata={op_name="call_tensorflow/m/encoder/blocks/body/layers_1/ffn/experts/about_9_trips/while"}'
    main = _MAIN.replace("body=%body", f"body=%body, {scope}")
    found = _costs(main, _LOOP)
    carried = 4 + 4 * 4 * 8 + 4 * 9 * 4 * 8
    assert found["while"].bytes == carried < sum(9 * c.bytes for c in _costs(_MAIN, _LOOP).values())
    assert (
        found["while"].flops == 9 * 2 * 4 * 8 * 8 and found["while"].tiled == found["while"].formats
    )
    assert found["y.3"].flops == found["y.3"].bytes == 0
    # On a GPU each of its turns costs something, on a TPU none.
    for machine, turns in (("h200:1x1", 9), ("v5p:2x2x1", 0)):
        on = parse_machine(machine)
        work = tables.work(found.values(), on)
        time = tables.time(
            tables.PlannedJob("m", "", "train", {"tokens": 4}, "tokens", 0.0), on, work, []
        )
        assert time.get("turning_seconds", 0) == pytest.approx(turns * on.turn_seconds)
        waits = time["step_seconds"] - time["roofline_seconds"] / on.pace.efficiency
        assert waits == pytest.approx(turns * on.turn_seconds, abs=1e-9)
    # A loop over the rounds of an exchange contains products and more.
    rounds = main.replace("experts/about", "inference_dispatcher/about")
    assert _costs(rounds, _LOOP)["y.3"].flops == 2 * 4 * 8 * 8
    # A single trip moves less than all that the loop carries, as in a step of a search.
    wider = [text.replace("f32[9,", "f32[99,") for text in (main, _LOOP)]
    once = _costs(wider[0], wider[1].replace("constant(9)", "constant(1)"))
    assert once["while"].bytes == 0 and once["y.3"].flops == 2 * 4 * 8 * 8


def test_what_is_sent_to_another_slice_belongs_to_the_layer_that_computed_it():
    # The compiler combined two sums before it sends one of them, and names neither.
    transfer = 'frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}'
    product = "dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    layer = "call_tensorflow/gradient_tape/m/decoder/blocks/body/layers_0"
    scope = f"{layer}/cross_atten/einsum_1/Einsum"
    found = _costs(
        f"""  %x = f32[8,8]{{1,0}} parameter(0)
  %w = f32[8,8]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %token = token[] after-all()
  %other = f32[8,8]{{1,0}} {product}, metadata={{op_name="{scope.replace("decoder", "encoder")}"}}
  %dw = f32[8,8]{{1,0}} {product}, metadata={{op_name="{scope}"}}
  %laid = f32[8,8]{{0,1}} copy(%dw)
  %sums = (f32[8,8]{{1,0}}, f32[8,8]{{0,1}}) all-reduce(%other, %laid), replica_groups={{{{0,1,2,3}}}}, to_apply=%add
  %sum = f32[8,8]{{0,1}} get-tuple-element(%sums), index=1
  %share = f32[2,8]{{0,1}} dynamic-slice(%sum, %i, %i), dynamic_slice_sizes={{2,8}}
  %flat = f32[16]{{0}} bitcast(%share)
  %send = (f32[16]{{0}}, u32[], token[]) send(%flat, %token), channel_id=5, {transfer}
  %sent = token[] send-done(%send), channel_id=5
  ROOT %y = f32[8,8]{{0,1}} negate(%sum)"""
    )
    sent = found["send"]
    place = sent.place.layer, sent.place.part, sent.place.phase
    assert place == ("decoder.dense", "attention", "backward")
    assert sent.collective.kind == "all-reduce" and sent.collective.bytes == 16 * 4
    assert sent.bytes == found["sent"].bytes == 0
