"""The detector names padding between elements that XLA's partitioner gets wrong, and no other padding.

Comparing 1,000 random pads with one device showed which are wrong.
"""

import pytest
from test_known_faults import WHOLE, _kinds, _module

from lingvo_moe.analysis.programs.partitioner import known_faults as kf

ROWS_4, ROWS_2 = "{devices=[4,1]<=[4]}", "{devices=[2,1,2]<=[4] last_tile_dim_replicate}"
COLUMNS_2 = "{devices=[1,2,2]<=[4] last_tile_dim_replicate}"
BOTH, CROSSED = "{devices=[2,2]0,2,1,3}", "{devices=[2,2]0,1,2,3}"


@pytest.mark.parametrize("padding, operand, result, is_wrong", [
    ("0_0_2x0_0", WHOLE, ROWS_4, True),
    ("0_1_1x0_0", WHOLE, ROWS_2, True),
    ("0_0_2x0_0", WHOLE, BOTH, True),
    ("0_0x0_0_2", WHOLE, BOTH, True),
    ("0_0_2x0_0", COLUMNS_2, BOTH, True),
    ("0_0_2x0_0", COLUMNS_2, CROSSED, False),  # Resharded first.
    ("0_0_2x1_0", COLUMNS_2, BOTH, False),
    ("0_0_2x0_0", COLUMNS_2, ROWS_2, False),
    ("0_0_2x0_0", ROWS_4, ROWS_4, False),
    ("0_0_2x0_0", ROWS_2, ROWS_4, False),
    ("0_0_2x0_0", ROWS_4, WHOLE, False),
    ("0_0_2x0_0", WHOLE, COLUMNS_2, False),
    ("3_5x0_0", WHOLE, ROWS_4, False),
])  # fmt: skip
def test_padding_between_elements(padding, operand, result, is_wrong):
    operands = [("f32[8,8]", operand), ("f32[]", WHOLE)]
    module = _module(4, operands, ("f32[24,24]", "pad", f"padding={padding}", result))
    assert _kinds(module) == [kf.SPREAD] * is_wrong


@pytest.mark.parametrize("padding, is_wrong", [("0_3_2x0_0", False), ("1_2_2x0_0", True)])
def test_padding_of_one_element(padding, is_wrong):
    operands = [("f32[1,8]", WHOLE), ("f32[]", WHOLE)]
    module = _module(4, operands, ("f32[4,8]", "pad", f"padding={padding}", ROWS_4))
    assert _kinds(module) == [kf.SPREAD] * is_wrong
