"""The detector knows which scatters of unevenly sharded updates, and of one index, XLA computes wrongly.

Running these programs on random numbers showed which are wrong; tests/spmd/test_known_faults_compiled.py compiles some.
"""

import pytest

from lingvo_moe.analysis.programs.hlo.module import Module, parse_module
from lingvo_moe.analysis.programs.partitioner import known_faults as kf

WHOLE = "{replicated}"
A = "{devices=[3,2]<=[6] last_tile_dim_replicate}"
B = "{devices=[2,3]0,2,4,1,3,5 last_tile_dim_replicate}"
ALL = "{devices=[6]<=[6]}"
_ROWS = (
    "update_window_dims={}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, "
    "index_vector_dim=1"
)


def _scatter(updates, made, shardings, ids="copy(%i)", source=WHOLE, combine="add(%x, %y)"):
    """A scatter of vectors into one of 12 elements; the shardings are of target, indices and updates."""
    target, of_ids, of_updates = shardings
    what = f"f32[{updates}]"
    return parse_module(f"""HloModule jit_call, num_partitions=6

%combine (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %c = f32[] {combine}
}}

ENTRY %main (a: f32[12], i: s32[{updates}], u: {what}) -> f32[12] {{
  %a = f32[12] parameter(0), sharding={source}
  %target = f32[12] copy(%a), sharding={target}
  %i = s32[{updates}] parameter(1), sharding={WHOLE}
  %ids = s32[{updates}] {ids}, sharding={of_ids}
  %u = {what} parameter(2), sharding={WHOLE}
  %number = f32[] constant(1)
  %one = {what} broadcast(%number), dimensions={{}}, sharding={of_updates}
  %cut = {what} copy(%u), sharding={of_updates}
  %made = {what} {made}, sharding={of_updates}
  ROOT %r = f32[12] scatter(%target, %ids, %made), {_ROWS}, to_apply=%combine, sharding={target}
}}
""")


def _kinds(module: Module) -> list[str]:
    return [fault.kind for fault in kf.known_faults(module)]


@pytest.mark.parametrize("shardings, is_wrong", [
    ((WHOLE, B, B), True),
    ((A, B, B), True),  # Two parts for two copies.
    ((B, B, B), False),  # Two parts for three copies.
    ((ALL, B, B), False),
    ((B, A, A), True),  # Three parts for three copies.
    ((A, A, A), False),
])  # fmt: skip
def test_updates_are_gathered_where_the_sharded_target_has_no_copies_for_their_parts(
    shardings, is_wrong
):
    module = _scatter(5, "add(%cut, %one)", shardings)
    assert _kinds(module) == [kf.SCATTER] * is_wrong


@pytest.mark.parametrize("made, is_wrong", [
    ("add(%cut, %one)", True),
    ("cosine(%cut)", True),
    ("reshape(%cut)", False),
    ("constant({1, 2, 3, 4, 5})", False),
    ("reverse(%one), dimensions={0}", False),
    ("sort(%one), dimensions={0}", False),
])  # fmt: skip
def test_padding_of_updates(made, is_wrong):
    assert _kinds(_scatter(5, made, (WHOLE, B, B))) == [kf.SCATTER] * is_wrong


@pytest.mark.parametrize("ids, is_wrong", [("copy(%i)", True), ("iota(), iota_dimension=0", False)])
def test_padding_of_indices(ids, is_wrong):
    """Indices that are counted go on in the padding, past the target."""
    module = _scatter(5, "add(%cut, %one)", (WHOLE, B, B), ids)
    assert _kinds(module) == [kf.SCATTER] * is_wrong


@pytest.mark.parametrize(
    "updates, target, source, is_wrong",
    [(1, B, WHOLE, True), (2, B, WHOLE, False), (1, WHOLE, WHOLE, False), (1, B, B, False)],
)
def test_one_index(updates, target, source, is_wrong):
    module = _scatter(updates, "copy(%cut)", (target, WHOLE, WHOLE), source=source)
    assert _kinds(module) == [kf.ONE_INDEX] * is_wrong


@pytest.mark.parametrize("combine, is_wrong", [("maximum(%x, %y)", True), ("copy(%y)", False)])
def test_updates_that_no_all_reduce_combines_are_gathered(combine, is_wrong):
    module = _scatter(5, "copy(%cut)", (WHOLE, B, B), combine=combine)
    assert _kinds(module) == [kf.SCATTER] * is_wrong


@pytest.mark.parametrize("shardings, combine, is_wrong", [
    ((WHOLE, B, WHOLE), "maximum(%x, %y)", True),
    ((A, B, WHOLE), "maximum(%x, %y)", True),
    ((B, B, WHOLE), "maximum(%x, %y)", False),
    ((WHOLE, WHOLE, WHOLE), "maximum(%x, %y)", False),
    ((WHOLE, B, WHOLE), "add(%x, %y)", False),
])  # fmt: skip
def test_unsharded_updates_are_padded_with_zeros_like_uneven_indices(shardings, combine, is_wrong):
    module = _scatter(5, "copy(%cut)", shardings, combine=combine)
    assert _kinds(module) == [kf.SCATTER] * is_wrong
