"""Pipelines of compiled programs: the bubble from trip counts equals the law of each schedule."""

import pytest
import tensorflow as tf

from lingvo_moe.analysis.plans.machines.base_machine import PlanError
from lingvo_moe.analysis.plans.machines.machine import parse_machine
from lingvo_moe.analysis.plans.network.slices_network import SECONDS_PER_STEP
from lingvo_moe.analysis.plans.pipeline import PipelineSchedule, TimedLoop, bubble, pipelines
from lingvo_moe.analysis.plans.work.costs import costs
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.hlo.module import Module, parse_module
from lingvo_moe.analysis.programs.hlo.pipelines import (
    PipelineLoop,
    loop_of_operation,
    pipeline_loop,
)
from lingvo_moe.core import sharding
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh


def _read(module: Module, schedule, machine="v5p:2x2x1"):
    (found,) = pipelines(module, costs(module), parse_machine(machine), schedule)
    return found


@pytest.mark.parametrize(("ticks", "machine"), [(5, "v5e:1x1*4"), (1, "v5p:2x2x1")])
def test_a_loop_of_tensorflow(ticks, machine):
    """Slices have one chip. A loop of one tick, which the compiler removes, shows in the names of its sends."""
    mesh, rows = Mesh(("stage",), (4,)), ("stage", None, None)

    def step(w, x):
        def tick(t, x):
            with tf.name_scope("m4/encoder/blocks/ffn/"):
                y = tf.tanh(tf.einsum("kbd,kde->kbe", x, w))
            return t + 1, tf.roll(sharding.mesh_split(y, mesh, rows), 1, 0)

        with tf.name_scope("m4/encoder/pipeline.forward/"):
            return tf.while_loop(lambda t, _: t < ticks, tick, (tf.constant(0), x))[1]

    specs = [TensorSpec(shape, "float32", rows) for shape in ((4, 64, 64), (4, 8, 64))]
    module = parse_module(aot.compile_for_topology(lower(step, specs, mesh), machine).hlo_text)
    found = _read(module, None, machine)
    (loop,) = found["loops"]
    assert (found["name"], loop["phase"], loop["ticks"]) == ("m4/encoder", "forward", ticks)
    assert "bubble" not in found and (loop["tick_seconds"] is None) == (ticks == 1)
    if ticks > 1:
        for row in loop["permutes"]:
            one = row["bytes"] / 3.125e9 + SECONDS_PER_STEP
            assert row["count"] > 0 and row["seconds"] == pytest.approx(row["count"] * one)


# --- overlap, on text


def _overlap(between):
    pairs = "{{0,1},{1,0}}"
    module = parse_module(f"""HloModule m, num_partitions=2

%body (p: (s32[], f32[64,128])) -> (s32[], f32[64,128]) {{
  %p = (s32[], f32[64,128]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[64,128]{{1,0}} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %start = (f32[64,128]{{1,0}}, f32[64,128]{{1,0}}) collective-permute-start(%x), source_target_pairs={pairs}
  {between}
  %done = f32[64,128]{{1,0}} collective-permute-done(%start)
  ROOT %t = (s32[], f32[64,128]{{1,0}}) tuple(%next, %done)
}}

%condition (p.1: (s32[], f32[64,128])) -> pred[] {{
  %p.1 = (s32[], f32[64,128]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}}

ENTRY %main (a: f32[64,128]) -> (s32[], f32[64,128]) {{
  %a = f32[64,128]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[64,128]{{1,0}}) tuple(%zero, %a)
  ROOT %while = (s32[], f32[64,128]{{1,0}}) while(%init), condition=%condition, body=%body, \
metadata={{op_name="jit(f)/call_tensorflow/m4/decoder/pipeline.forward/while"}}
}}
""")
    found = _read(module, None, "v5e:2x2")
    assert found["name"] == "m4/decoder" and found["loops"][0]["ticks"] == 5
    (row,) = found["loops"][0]["permutes"]
    return row


def test_a_permute_is_hidden_behind_work_between_its_start_and_its_end():
    assert _overlap("")["overlapped_seconds"] == 0
    little = _overlap("%y = f32[64,128]{1,0} negate(%x)")
    moved = 2 * 64 * 128 * 4 / parse_machine("v5e:2x2").hbm_bandwidth
    assert little["overlapped_seconds"] == pytest.approx(moved)
    assert little["overlapped_seconds"] < little["seconds"]
    cycles = 'backend_config={"estimated_cycles":"1000000"}'
    much = _overlap(f"%y = f32[64,128]{{1,0}} negate(%x), {cycles}")
    assert much["overlapped_seconds"] == much["seconds"] == little["seconds"]


# --- names and schedules that do not fit


def _name(phase):
    return PipelineLoop("m4", phase)


@pytest.mark.parametrize(("op_name", "expected"), [
    ("jit(f)/call_tensorflow/m4/encoder/pipeline.forward/while", ("m4/encoder", "forward")),
    ("a/jit(call)/call_tensorflow/m4/pipeline.backward/while_1", ("m4", "backward")),
    ("call_tensorflow/gradient_tape/m4/x/pipeline.backward/while", ("m4/x", "backward")),
    ("jit(f)/micro_batches/while/body/m/pipeline.forward_backward/while", ("m", "forward_backward")),
    ("jit(f)/pipeline.forward/while", ("", "forward")),
    ("jit(f)/m4/encoder/pipeline.forward/while/body/blocks/while", None),
    ("call_tensorflow/m4/pipeline/encoder_forward__decoder_loss/while", ("m4", "encoder_forward__decoder_loss")),
    ("call_tensorflow/m4/pipeline/encoder_sideways/while", None),
    ("jit(f)/m4/encoder/pipeline.sideways/while", None),
    ("jit(f)/m4/encoder/while", None),
    ("", None),
])  # fmt: skip
def test_names_of_loops(op_name, expected):
    assert pipeline_loop(op_name) == expected


def test_names_of_operations_in_ticks():
    name = "jit(f)/call_tensorflow/m4/encoder/pipeline.forward/while"
    assert loop_of_operation(name) is None
    for operation in ("/body/closed_call/jit(_roll_static)/concatenate", "/CollectivePermute"):
        assert loop_of_operation(name + operation) == ("m4/encoder", "forward")
        assert pipeline_loop(name + operation) is None


def test_what_ticks_do():
    name = PipelineLoop("m4", "encoder_forward__decoder_weight_gradients__decoder_loss")
    assert name.works == (
        ("encoder", "forward"),
        ("decoder", "weight_gradients"),
        ("decoder", "loss"),
    )
    assert PipelineLoop("m4", "forward_backward").works == (("", "forward"), ("", "backward"))


def test_loops_of_another_schedule_are_refused():
    loops = [TimedLoop(_name("forward"), 7, 1, 1.0), TimedLoop(_name("backward"), 7, 1, 2.0)]
    with pytest.raises(PlanError, match="'m4' has 7 forward ticks, too few for micro_batches=8"):
        bubble("m4", loops, PipelineSchedule("gpipe", 4, 8))


def test_interleaved_chunks_and_weight_gradients_apart():
    chunks = [TimedLoop(_name(phase), 2 * 8 + 3, 1, 1.0) for phase in ("forward", "backward")]
    assert bubble("m4", chunks, PipelineSchedule("interleaved", 4, 8, 2)) == pytest.approx(3 / 19)
    # By hand: 3 (F + B) of 11 (F + B) and 8 W, with F = 1, B = 1.5, W = 0.5.
    loops = [
        TimedLoop(_name("forward"), 3, 1, 1.0),
        TimedLoop(_name("forward_backward"), 8, 1, 2.5),
        TimedLoop(_name("backward"), 3, 1, 1.5),
        TimedLoop(_name("weight_gradients"), 8, 1, 0.5),
    ]
    found = bubble("m4", loops, PipelineSchedule("zb_h1", 4, 8))
    assert found == pytest.approx(3 * 2.5 / (11 * 2.5 + 8 * 0.5))


def test_one_stage_has_no_bubble():
    assert (
        bubble(
            "m4", [TimedLoop(_name("forward_backward"), 8, 1, 3.0)], PipelineSchedule("1f1b", 1, 8)
        )
        == 0.0
    )


def test_stacks_that_follow_each_other():
    # 1F1B of an encoder and a decoder: 2 stages, 4 micro-batches, 5 ticks of each kind of work.
    loops = [
        TimedLoop(_name("encoder_forward"), 2, 1, 1.0),
        TimedLoop(_name("encoder_forward__decoder_forward"), 1, 1, 3.0),
        TimedLoop(
            _name("encoder_forward__decoder_forward__decoder_loss__decoder_backward"), 2, 1, 8.0
        ),
        TimedLoop(
            _name("decoder_forward__decoder_loss__decoder_backward__encoder_backward"), 2, 1, 9.0
        ),
        TimedLoop(_name("decoder_backward__encoder_backward"), 1, 1, 5.0),
        TimedLoop(_name("encoder_backward"), 2, 1, 2.0),
    ]
    assert bubble("m4", loops, PipelineSchedule("1f1b", 2, 4)) == pytest.approx(1 / 5)


def test_a_bubble_that_hangs_on_seconds_of_removed_loops_is_not_known():
    loops = [
        TimedLoop(_name("forward"), 1, 1, None),
        TimedLoop(_name("forward_backward"), 8, 1, 2.5),
        TimedLoop(_name("backward"), 1, 1, None),
        TimedLoop(_name("weight_gradients"), 8, 1, 0.5),
    ]
    # F and B have equally many ticks, so their sum is enough.
    assert bubble("m4", loops, PipelineSchedule("zb_h1", 2, 8)) == pytest.approx(
        2.5 / (9 * 2.5 + 8 * 0.5)
    )
    loops[3] = TimedLoop(_name("weight_gradients"), 8, 1, None)
    assert bubble("m4", loops, PipelineSchedule("zb_h1", 2, 8)) is None
