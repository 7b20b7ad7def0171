"""The detector knows which gathers in batches XLA computes wrongly.

Running these programs on random numbers showed which are wrong; tests/spmd/test_known_faults_compiled.py compiles one.
"""

import pytest

from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.partitioner import known_faults as kf

A_OF_6 = "{devices=[2,1,3]<=[6] last_tile_dim_replicate}"
B_OF_6 = "{devices=[3,1,2]0,3,1,4,2,5 last_tile_dim_replicate}"
BOTH_OF_6 = "{devices=[3,2]0,3,1,4,2,5}"
A_OF_8 = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
B_OF_8 = "{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
COUNTED = "iota(), iota_dimension=0"
_ELEMENTS = (
    "offset_dims={}, collapsed_slice_dims={0,1}, start_index_map={0,1}, index_vector_dim=2, "
    "slice_sizes={1,1}"
)


@pytest.mark.parametrize("operand, indices, count, devices, is_wrong", [
    (B_OF_6, A_OF_6, COUNTED, 6, True),
    (A_OF_6, B_OF_6, COUNTED, 6, True),
    (A_OF_6, A_OF_6, COUNTED, 6, False),
    (BOTH_OF_6, A_OF_6, COUNTED, 6, False),
    ("{replicated}", A_OF_6, COUNTED, 6, False),
    (B_OF_6, A_OF_6, "copy(%numbers)", 6, False),  # Not known to be the batch.
    (B_OF_8, A_OF_8, COUNTED, 8, False),  # The parts of one lie in the other's.
])  # fmt: skip
def test_gather_in_batches(operand, indices, count, devices, is_wrong):
    of_indices = indices.replace(",1,", ",1,1,", 1)
    module = parse_module(f"""HloModule jit_call, num_partitions={devices}

ENTRY %main (x: f32[12,15], ids: s32[12,7,1], numbers: s32[12]) -> f32[12,7] {{
  %x = f32[12,15] parameter(0), sharding={operand}
  %ids = s32[12,7,1] parameter(1), sharding={of_indices}
  %numbers = s32[12] parameter(2), sharding={{replicated}}
  %count = s32[12] {count}, sharding={{replicated}}
  %batch = s32[12,7,1] broadcast(%count), dimensions={{0}}, sharding={of_indices}
  %both = s32[12,7,2] concatenate(%batch, %ids), dimensions={{2}}, sharding={of_indices}
  ROOT %r = f32[12,7] gather(%x, %both), {_ELEMENTS}, sharding={indices}
}}
""")
    assert [fault.kind for fault in kf.known_faults(module)] == [kf.BATCHES] * is_wrong
