"""Shardings of products without communication, and drawings of shards."""

import numpy as np
import pytest

from lingvo_moe.analysis.programs.hlo import module as hlo
from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding, parse_sharding
from lingvo_moe.analysis.programs.partitioner.sharding_figure import figure, names
from lingvo_moe.analysis.programs.partitioner.sharding_rules import (
    product_sharding,
    transposed_back,
)
from lingvo_moe.core.sharding import Mesh

GRID = Mesh.parse("x:2,y:4")
WHOLE = "{replicated}"
DISPATCH = (
    "lhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
)
MATMUL = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def _instruction(result, opcode, attributes):
    text = f"""HloModule m, num_partitions=8

ENTRY %main (a: f32[8], b: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
  %b = f32[8]{{0}} parameter(1)
  ROOT %r = {result} {opcode}(%a, %b), {attributes}
}}
"""
    return hlo.parse_module(text).entry.root


def _sharding(text):
    (found,) = parse_sharding(text, 8)
    return found


@pytest.mark.parametrize("result, dims, lhs, rhs, mapping", [
    # GSEC,GSM->GECM with both sharded along the batch dimension G.
    ("f32[8,8,4,32]", DISPATCH, "{devices=[8,1,1,1]<=[8]}", "{devices=[8,1,1]<=[8]}", (("x", "y"), None, None, None)),
    # A free dimension of one operand, at any position.
    ("f32[8,16]", MATMUL, "{devices=[8,1]<=[8]}", WHOLE, (("x", "y"), None)),
    ("f32[8,16]", MATMUL, WHOLE, "{devices=[1,8]<=[8]}", (None, ("x", "y"))),
    ("f32[8,16]", "lhs_contracting_dims={0}, rhs_contracting_dims={0}",
     "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}", WHOLE, ("y", None)),
    # No sharding: sums over parts, and two dimensions that are sharded by the same devices.
    ("f32[8,16]", MATMUL, "{devices=[1,8]<=[8]}", "{devices=[8,1]<=[8]}", None),
    ("f32[8,16]", MATMUL, "{devices=[8,1]<=[8]}", "{devices=[1,8]<=[8]}", None),
    ("f32[8,16]", MATMUL, WHOLE, WHOLE, None),
])  # fmt: skip
def test_a_product_of_what_each_device_has(result, dims, lhs, rhs, mapping):
    dot = _instruction(result, "dot", dims)
    found = product_sharding(dot, _sharding(lhs), _sharding(rhs))
    assert (found and found.OnMesh(GRID)) == mapping


def test_before_a_transposition():
    transpose = _instruction("f32[4,16,8]", "transpose", "dimensions={2,0,1}")
    after = _sharding("{devices=[4,2,1]<=[8]}")
    before = transposed_back(after, transpose)
    assert before.tiles == (2, 1, 4)
    for part in np.ndindex(4, 2, 1):
        assert before.DeviceOf((part[1], part[2], part[0])) == after.DeviceOf(part)
    assert transposed_back(_sharding(WHOLE), transpose) is None


# --- drawings


def _cells(grid):
    return [cell.tip for cell in grid.cells]


def test_a_grid_has_a_cell_for_each_part():
    grid = figure(_sharding("{devices=[2,4]<=[8]}"), (4, 8), 8)
    assert _cells(grid) == [
        f"[{2 * i}:{2 * i + 2}, {2 * j}:{2 * j + 2}] on device {4 * i + j}"
        for i in range(2)
        for j in range(4)
    ]
    assert "dim 0 in 2 and dim 1 in 4 parts, shape 4x8" in grid.label


def test_of_many_parts_the_first_and_the_last_are_drawn():
    sharding = TensorSharding("tiled", (2048, 1), tuple(range(2048)))
    grid = figure(sharding, (4096, 8), 2048)
    assert len(_cells(grid)) == 9
    assert _cells(grid)[-1] == "[4094:4096, 0:8] on device 2047"
    assert len(grid.dots) == 1


@pytest.mark.parametrize(
    "devices, said",
    [((0,), "0"), ((0, 4), "0,4"), (range(4), "0-3"), ((0, 2, 4, 6), "0,2,4,…"), ((3, 4), "3,4")],
)
def test_numbers_of_devices(devices, said):
    assert names(tuple(devices)) == said
