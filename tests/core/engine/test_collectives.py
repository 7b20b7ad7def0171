"""Collectives are read from HLO as CPU and TPU compilers print them."""

from lingvo_moe.core.engine.collectives import count_collectives, parse_collectives

_CPU = """
ENTRY %main {
  %p = f32[8,16]{1,0} parameter(0)
  %all-to-all.1 = (f32[1,16]{1,0}, f32[1,16]{1,0}) all-to-all(%p, %q), metadata={op_name="moe/x"}
  ROOT %all-reduce.2 = bf16[4,2]{1,0} all-reduce(%p), channel_id=2, to_apply=%all-reduce.clone
  %fusion = f32[] fusion(%all-reduce.2), calls=%x, metadata={op_name="all-reduce(x)"}
}
"""

_TPU = """
  %ag = (f32[1,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) all-gather-start(%p), dimensions={0}
  %agd = f32[8,128]{1,0:T(8,128)} all-gather-done(%ag)
  %cp = (s32[4]{0}, s32[4]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%q)
  %cpd = s32[4]{0} collective-permute-done(%cp)
  %rs = f32[16]{0:T(256)} reduce-scatter(%g), dimensions={0}
  %pred = pred[3]{0} all-reduce-start(%b), to_apply=%or
"""


def test_kinds_shapes_bytes_and_origin():
    first, second = parse_collectives(_CPU)
    assert (first.kind, first.name, first.op_name) == ("all-to-all", "all-to-all.1", "moe/x")
    assert first.shapes == (("f32", (1, 16)), ("f32", (1, 16)))
    assert first.num_bytes == 2 * 16 * 4
    assert (second.kind, second.num_bytes) == ("all-reduce", 16)


def test_a_start_counts_and_its_done_does_not():
    assert count_collectives(_TPU) == {
        "all-gather": 1,
        "all-reduce": 1,
        "collective-permute": 1,
        "reduce-scatter": 1,
    }
    assert {c.kind: c.num_bytes for c in parse_collectives(_TPU)} == {
        "all-gather": 8 * 128 * 4,
        "all-reduce": 3,
        "collective-permute": 16,
        "reduce-scatter": 64,
    }
