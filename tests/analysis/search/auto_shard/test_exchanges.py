"""exchanges.py: what moves between two layouts, against the planner of single redistributions."""

import itertools

import pytest

from lingvo_moe.analysis.search.auto_shard.exchanges import Layout, exchanges, gradient_exchanges
from lingvo_moe.analysis.search.auto_shard.strategy import mapping_of
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.redistribution_plan import plan_redistribution, total_bytes

_MESH = Mesh.parse("data:2,model:4")
_SHAPE = (16, 16)


def _layouts() -> list[Layout]:
    one = [(), ("data",), ("model",)]
    return [p for p in itertools.product(one, repeat=2) if not p[0] or p[0] != p[1]]


def _received(source: Layout, target: Layout) -> float:
    """Bytes that a device receives."""
    total = 0.0
    for kind, share, axes in exchanges(_MESH, source, target):
        ways = _MESH.axis_size(axes)
        num = share * 4 * 16 * 16
        total += num if kind == "collective-permute" else num * (ways - 1) / ways
    return total


def test_bytes_are_those_of_the_planner_of_redistributions():
    for source, target in itertools.product(_layouts(), repeat=2):
        plan = plan_redistribution(
            _SHAPE, 4, (_MESH, mapping_of(source)), (_MESH, mapping_of(target))
        )
        received, best = _received(source, target), total_bytes(plan)
        if any(a and b and a != b for a, b in zip(source, target)):
            # The planner also cuts axes into factors, and knows in which order parts lie.
            assert best / 2 <= received <= 4 * best, (source, target)
        else:
            assert received == best, (source, target)


def test_axes_that_move_together_are_one_collective():
    both = ("data", "model")
    assert [e.kind for e in exchanges(_MESH, (both, ()), ((), both))] == ["all-to-all"]


@pytest.mark.parametrize("scatters, kinds", [(True, ["reduce-scatter"]), (False, ["all-reduce"])])
def test_the_gradient_of_a_gather_is_a_sum_of_which_each_keeps_a_part(scatters, kinds):
    whole: Layout = ((), ())
    found = gradient_exchanges(_MESH, whole, (("model",), ()), ("model",), scatters)
    assert [e.kind for e in found] == kinds
