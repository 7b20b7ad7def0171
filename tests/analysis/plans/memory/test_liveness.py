import textwrap

import pytest

from lingvo_moe.analysis.plans.memory.liveness import liveness
from lingvo_moe.analysis.programs.hlo.module import parse_module

_KIB = 1024


def _trace(text: str, header: str = ""):
    return liveness(parse_module(f"HloModule m, is_scheduled=true{header}\n\n{text}\n"))


def _main(lines: str) -> str:
    """A program of an argument p of 4 KiB and these lines."""
    body = textwrap.indent(textwrap.dedent(lines), "  ")
    return f"ENTRY %main (p: f32[1024]) -> f32[1024] {{\n  %p = f32[1024]{{0}} parameter(0)\n{body}\n}}"


_CALLED = """
%inner (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %y = f32[1024]{0} reverse(%x), dimensions={0}
  %z = f32[2048]{0} concatenate(%x, %y), dimensions={0}
  ROOT %w = f32[1024]{0} slice(%z), slice={[0:1024]}
}

"""
# Lines of a program, and the KiB of its peak, of which 4 are the argument's.
_PEAKS = {
    "a value lives from its maker to its last reader": (
        """
        %a = f32[1024]{0} reverse(%p), dimensions={0}
        %b = f32[2048]{0} concatenate(%a, %a), dimensions={0}
        ROOT %c = f32[2048]{0} reverse(%b), dimensions={0}
        """,
        4 + 8 + 8,
    ),
    "what is only handed on takes no memory": (
        """
        %a = f32[1024]{0} reverse(%p), dimensions={0}
        %b = f32[32,32]{1,0} bitcast(%a)
        %t = (f32[32,32]{1,0}, f32[1024]{0}) tuple(%b, %p)
        %o = (f32[32,32]{1,0}, f32[1024]{0}) opt-barrier(%t)
        ROOT %g = f32[32,32]{1,0} get-tuple-element(%o), index=0
        """,
        4 + 4,
    ),
    "padding counts and memory on the chip does not": (
        """
        %a = f32[9]{0:T(256)S(1)} reverse(%p), dimensions={0}
        ROOT %b = f32[9]{0:T(256)} reverse(%a), dimensions={0}
        """,
        4 + 1,
    ),
    "an operand stays until its copy is done": (
        """
        %a = f32[1024]{0} reverse(%p), dimensions={0}
        %s = (f32[1024]{0}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%a)
        %b = f32[1024]{0} reverse(%p), dimensions={0}
        %d = f32[1024]{0} copy-done(%s)
        ROOT %e = f32[1024]{0} add(%b, %d)
        """,
        4 + 12,
    ),
    "a call adds what it holds inside": ("ROOT %c = f32[1024]{0} call(%p), to_apply=%inner", 4 + 4 + 8),
}  # fmt: skip


@pytest.mark.parametrize("lines, kib", _PEAKS.values(), ids=_PEAKS)
def test_the_peak(lines, kib):
    assert _trace(_CALLED + _main(lines)).Peak()[1] == kib * _KIB


def test_results_lie_in_donated_arguments():
    text = _main("""
        %a = f32[1024]{0} reverse(%p), dimensions={0}
        %b = f32[1024]{0} reverse(%a), dimensions={0}
        ROOT %t = (f32[1024]{0}, f32[1024]{0}) tuple(%a, %b)
        """)
    alias = ", input_output_alias={ {1}: (0, {}, may-alias) }, entry_computation_layout={}"
    assert _trace(text).Peak()[1] == 12 * _KIB
    assert _trace(text, alias).Peak()[1] == 8 * _KIB


_LOOP = """
%update (x: f32[8,1024], i: s32[], row: f32[1,1024]) -> f32[8,1024] {
  %x = f32[8,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,1024]{1,0} parameter(2)
  %zero = s32[] constant(0)
  ROOT %u = f32[8,1024]{1,0} dynamic-update-slice(%x, %row, %i, %zero)
}

%body (c: (s32[], f32[8,1024])) -> (s32[], f32[8,1024]) {
  %c = (s32[], f32[8,1024]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%c), index=0
  %x.1 = f32[8,1024]{1,0} get-tuple-element(%c), index=1
  %one = s32[] constant(1)
  %r.1 = f32[1,1024]{1,0} slice(%x.1), slice={[0:1], [0:1024]}
  %r.2 = f32[1,1024]{1,0} reverse(%r.1), dimensions={1}, metadata={op_name="NAME"}
  %x.2 = f32[8,1024]{1,0} fusion(%x.1, %i.1, %r.2), kind=kLoop, calls=%update
  %i.2 = s32[] add(%i.1, %one)
  ROOT %t = (s32[], f32[8,1024]{1,0}) tuple(%i.2, %x.2)
}

%condition (c.1: (s32[], f32[8,1024])) -> pred[] {
  %c.1 = (s32[], f32[8,1024]{1,0}) parameter(0)
  %i.3 = s32[] get-tuple-element(%c.1), index=0
  %n = s32[] constant(8)
  ROOT %less = pred[] compare(%i.3, %n), direction=LT
}

ENTRY %main (p: f32[8,1024]) -> f32[8,1024] {
  %p = f32[8,1024]{1,0} parameter(0)
  %start = s32[] constant(0)
  %x.0 = f32[8,1024]{1,0} reverse(%p), dimensions={0}
  %init = (s32[], f32[8,1024]{1,0}) tuple(%start, %x.0)
  %while = (s32[], f32[8,1024]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[8,1024]{1,0} get-tuple-element(%while), index=1
}
"""


def test_a_loop_carries_one_set_of_buffers_and_its_body_comes_on_top():
    traced = _trace(_LOOP)
    place, peak = traced.Peak()
    # The argument, what is carried, and in the body two rows at a time; scalars are bytes.
    assert peak == pytest.approx((32 + 32 + 4 + 4) * _KIB, abs=64)
    (carried,) = {traced.buffer_of[name][0] for name in ("x.0", "x.2", "out")}
    buffer = traced.buffers[carried]
    assert buffer.num_bytes == 32 * _KIB
    assert [v.instruction.name for v in buffer.values] == ["x.0", "x.2"]
    assert buffer.start <= place <= buffer.end
    assert traced.backward == traced.length


def test_the_backward_pass_begins_with_the_first_loop_that_holds_gradients():
    traced = _trace(_LOOP.replace("NAME", "call_tensorflow/gradient_tape/m/x"))
    assert 0 < traced.backward < traced.length
    row = traced.buffers[traced.buffer_of["r.2"][0]]
    assert row.start > traced.backward and row.values[0].producer.in_backward_loop


def test_what_is_sent_to_another_slice_lives_until_it_is_sent():
    # x is sent from where it lies; what arrives has a buffer of its own.
    text = _main("""
          %token = token[] after-all()
          %x = f32[1024]{0} reverse(%p), dimensions={0}
          %send = (f32[1024]{0}, u32[], token[]) send(%x, %token), channel_id=1
          %recv = (f32[1024]{0}, u32[], token[]) recv(%token), channel_id=2
          %sent = token[] send-done(%send), channel_id=1
          %received = (f32[1024]{0}, token[]) recv-done(%recv), channel_id=2
          %y = f32[1024]{0} get-tuple-element(%received), index=0
          %z = f32[1024]{0} reverse(%y), dimensions={0}
          ROOT %q = f32[1024]{0} reverse(%z), dimensions={0}
        """)
    found = _trace(text)
    assert found.buffer_of["send"][0] == found.buffer_of["x"][0]
    assert found.buffer_of["y"] == found.buffer_of["received"][:1] == found.buffer_of["recv"][:1]
    assert found.buffers[found.buffer_of["x"][0]].end < found.buffers[found.buffer_of["z"][0]].start
    # p, and at most two more, besides two counters of four bytes.
    assert 12 * _KIB <= found.Peak()[1] <= 12 * _KIB + 8
