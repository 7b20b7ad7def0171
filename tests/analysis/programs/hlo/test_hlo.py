"""Parsing of compiled programs' text, and how often each instruction runs."""

import pytest
from hypothesis import given, settings, strategies as st

from lingvo_moe.analysis.programs.hlo import attributes, module as hlo
from lingvo_moe.analysis.programs.hlo.groups import device_groups
from lingvo_moe.analysis.programs.hlo.instructions import HloError

LOOPS = """HloModule step, is_scheduled=true, num_partitions=4

FileNames
1 "a (file) -> that looks like a computation {"

%inner_body (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[]{:T(256)}, f32[8]{0:T(256)}) parameter(0)
  %i.1 = s32[]{:T(256)} get-tuple-element(%p.1), index=0
  %two = s32[] constant(2)
  %next.1 = s32[] add(%i.1, %two)
  %x.1 = f32[8]{0} get-tuple-element(%p.1), index=1
  %twice = f32[8]{0} add(%x.1, %x.1), metadata={op_name="jit(f)/call_tensorflow/gradient_tape/m/a/mul"}
  ROOT %t.1 = (s32[], f32[8]{0}) tuple(%next.1, /*index=1*/%twice)
}

%inner_condition (p.2: (s32[], f32[8])) -> pred[] {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i.2, %five), direction=LT
}

%step_down (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %minus = s32[] constant(-1)
  ROOT %down = s32[] add(%a, %minus)
}

%outer_body (p.3: (f32[8], s32[])) -> (f32[8], s32[]) {
  %p.3 = (f32[8]{0}, s32[]) parameter(0)
  %x.3 = f32[8]{0} get-tuple-element(%p.3), index=0
  %i.3 = s32[] get-tuple-element(%p.3), index=1
  %start = s32[] constant(0)
  %init.3 = (s32[], f32[8]{0}) tuple(%start, %x.3)
  %while.3 = (s32[], f32[8]{0}) while(%init.3), condition=%inner_condition, body=%inner_body
  %x.4 = f32[8]{0} get-tuple-element(%while.3), index=1
  %next.3 = s32[] fusion(%i.3), kind=kLoop, calls=%step_down
  ROOT %t.3 = (f32[8]{0}, s32[]) tuple(%x.4, %next.3)
}

%outer_condition (p.4: (f32[8], s32[])) -> pred[] {
  %p.4 = (f32[8]{0}, s32[]) parameter(0)
  %i.4 = s32[] get-tuple-element(%p.4), index=1
  %zero = s32[] constant(0)
  ROOT %ge = pred[] compare(%i.4, %zero), direction=GE
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), sharding={replicated}
  %eight = s32[] constant(START)
  %copied = s32[] copy(%eight)
  %init = (f32[8]{0}, s32[]) tuple(%x, %copied)
  %while = (f32[8]{0}, s32[]) while(%init), condition=%outer_condition, body=%outer_body
  ROOT %y = f32[8]{0} get-tuple-element(%while), index=0
}
"""


def _times(text: str, once: bool = False) -> dict[str, int]:
    executions = hlo.parse_module(text).executions(once)
    return {e.instruction.name: e.times for e in executions}


def test_trip_counts_of_nested_loops_multiply():
    times = _times(LOOPS.replace("START", "8"))
    assert times["while"] == 1
    assert times["while.3"] == 9  # From 8 down to 0.
    assert times["ge"] == 10
    assert times["twice"] == 9 * 3  # 0, 2, 4.
    assert "down" not in times  # Inside a fusion.


def test_loops_count_once_on_request():
    assert set(_times(LOOPS.replace("START", "8"), once=True).values()) == {1}


@settings(max_examples=20, deadline=None)
@given(st.integers(-3, 40))
def test_trip_counts_follow_the_start(start):
    times = _times(LOOPS.replace("START", str(start)))
    assert times.get("while.3", 0) == max(0, start + 1)


def test_loops_with_gradients_are_backward():
    executions = list(hlo.parse_module(LOOPS.replace("START", "8")).executions())
    assert {e.instruction.name for e in executions if e.in_backward_loop} >= {"twice", "next.1"}
    assert not any(e.in_backward_loop for e in executions if e.instruction.name == "next.3")


def test_a_loop_without_a_known_count_is_named():
    text = LOOPS.replace("%eight = s32[] constant(START)", "%eight = s32[] custom-call(%x)")
    message = r"loop while .*: its trip count is unknown.*outer_condition"
    with pytest.raises(HloError, match=message):
        list(hlo.parse_module(text).executions())


def test_a_loop_without_a_known_count_runs_as_often_as_it_is_taken_to():
    text = LOOPS.replace("%eight = s32[] constant(START)", "%eight = s32[] custom-call(%x)")
    times = {e.instruction.name: e.times for e in hlo.parse_module(text).executions(unknown=0)}
    assert (times["while.3"], times["twice"], times["copied"]) == (0, 0, 1)


def test_the_compilers_own_trip_count_counts():
    told = 'body=%outer_body, backend_config={"known_trip_count":{"n":"7"}}'
    text = LOOPS.replace("constant(START)", "custom-call(%x)").replace("body=%outer_body", told)
    assert _times(text)["while.3"] == 7


def test_instructions_keep_what_they_say():
    module = hlo.parse_module(LOOPS.replace("START", "8"))
    assert (module.name, module.entry.name) == ("step", "main")
    body = module.computation("%outer_body")
    loop = body.by_name["while.3"]
    assert loop.called == ("inner_condition", "inner_body")
    assert loop.operands == ("init.3",)
    assert [a.dtype for a in loop.arrays] == ["s32", "f32"]
    twice = module.computation("inner_body").by_name["twice"]
    assert twice.operands == ("x.1", "x.1")
    assert twice.op_name == "jit(f)/call_tensorflow/gradient_tape/m/a/mul"
    root = module.computation("inner_body").root
    assert root.operands == ("next.1", "twice") and root.is_root
    assert [u.name for u in body.users["while.3"]] == ["x.4"]


def test_attributes_over_several_lines():
    """XLA prints a kernel's like this, before and after it compiles; a computation may have attributes of its own."""
    module = hlo.parse_module("""HloModule m

%other (a: s32[]) -> s32[] {
  ROOT %a = s32[] parameter(0)
}, execution_thread="sparsecore"

ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2] parameter(0)
  %x = f32[2] custom-call(%p), frontend_attributes={kernel_metadata={
"key":"{}"
}}, metadata={op_name="a"}
  ROOT %y = f32[2] custom-call(%x), metadata={op_name="b"}, backend_config={"body": "A", "cost": {
"flops":2,
"bytes":1
}, "format": 1}
}
""")
    assert list(module.computations) == ["other", "main"]
    assert [i.op_name for i in module.entry.instructions] == ["", "a", "b"]


def test_operands_with_their_types():
    text = """HloModule m
ENTRY main {
}
"""
    with pytest.raises(HloError, match="no ENTRY"):
        hlo.parse_module(text)
    line = (
        "  %d = f32[2,3]{1,0} dot(f32[2,4]{1,0} %a, (f32[4,3]{1,0}) %b), lhs_contracting_dims={1}\n"
    )
    module = hlo.parse_module(f"HloModule m\n\nENTRY %main (a: f32[2]) -> f32[2] {{\n{line}}}\n")
    assert module.entry.root.operands == ("a", "b")
    assert attributes.dims_list(module.entry.root, "lhs_contracting_dims") == (1,)


@pytest.mark.parametrize(
    "text", ["", "module {\n}\n", "HloModule m\nENTRY %e () -> f32[] {\n  %x\n}\n"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(HloError):
        hlo.parse_module(text)


@pytest.mark.parametrize(("shape", "num_bytes", "padded", "space"), [
    ("f32[9]{0:T(256)}", 36, 1024, 0),
    ("s32[]{:T(256)S(6)}", 4, 1024, 6),
    ("bf16[5,4,100]{2,0,1:T(4,128)(2,1)S(1)}", 4000, 4 * 8 * 128 * 2, 1),
    ("f32[16,128,16,128]{3,1,2,0:T(8,128)}", 1 << 24, 1 << 24, 0),
    ("f32[3,5]{0,1:T(8,128)}", 60, 8 * 128 * 4, 0),  # The major dimension is the last one.
    ("pred[8,8]{1,0:T(8,128)(4,1)}", 64, 1024, 0),
    ("s4[3,3]{1,0:T(8,128)E(4)}", 5, 512, 0),
    ("f32[2,3,100]{2,1,0:T(*,128)}", 2400, 2 * 3 * 128 * 4, 0),
    ("f32[<=7]{0}", 28, 28, 0),
    ("token[]", 0, 0, 0),
])  # fmt: skip
def test_bytes_of_layouts(shape, num_bytes, padded, space):
    (array,) = hlo.parse_shape(shape)
    assert (array.num_bytes, array.padded_bytes, array.memory_space) == (num_bytes, padded, space)


def test_tuples_are_flattened():
    arrays = hlo.parse_shape("((f32[2]{0}, u8[3]{0}), /*index=1*/bf16[4,1]{1,0:T(8,128)(2,1)})")
    assert [(a.dtype, a.dims) for a in arrays] == [("f32", (2,)), ("u8", (3,)), ("bf16", (4, 1))]


@pytest.mark.parametrize(("groups", "expected"), [
    ("{{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("{{0}}", ((0,),)),
    ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("[4,2]<=[2,2,2]T(1,0,2)", ((0, 1), (4, 5), (2, 3), (6, 7))),
    ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("mesh['axis_0'=2048] {'axis_0'}", (tuple(range(2048)),)),
    ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ("mesh['b'=2,'a'=4] {'a':(2)2,'b'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ("mesh['a'=2,'c'=4], device_ids=([4,2]T(1,0)) {'a'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ("mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'b'}", ((3, 1), (0, 2))),
    ("{}", ((0, 1, 2, 3),)),
])  # fmt: skip
def test_replica_groups_in_every_notation(groups, expected):
    text = f"""HloModule m, num_partitions=4

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add
}}
"""
    module = hlo.parse_module(text)
    assert device_groups(module.entry.root, module.attributes) == expected


def test_unequal_groups_are_refused():
    text = LOOPS.replace(
        "get-tuple-element(%while), index=0", "all-reduce(%x), replica_groups={{0,1},{2}}"
    )
    with pytest.raises(HloError, match="all-reduce y: cannot read replica_groups"):
        device_groups(hlo.parse_module(text).entry.root, "")


def test_a_loop_whose_length_data_decide_may_tell_what_it_expects():
    text = LOOPS.replace("%eight = s32[] constant(START)", "%eight = s32[] custom-call(%x)")
    name = 'metadata={op_name="jit(f)/call_tensorflow/m4/experts/about_7_trips/while"}'
    times = _times(text.replace("body=%outer_body", f"body=%outer_body, {name}"))
    assert (times["while.3"], times["twice"], times["ge"]) == (7, 7 * 3, 8)
    # The trip count is derived where the text determines it.
    known = LOOPS.replace("START", "8").replace("body=%outer_body", f"body=%outer_body, {name}")
    assert _times(known)["while.3"] == 9
