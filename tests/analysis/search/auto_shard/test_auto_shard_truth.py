"""The search's answer against all others of a tiny function, each of them compiled."""

import itertools

import auto_shard_functions as functions
import pytest
import tensorflow as tf
from auto_shard_functions import spec

from benchmarks.auto_parallel_truth import compile_step, compiled_seconds
from lingvo_moe import xla_sharding as xs
from lingvo_moe.analysis.plans.machines.ring import ACCELERATOR
from lingvo_moe.analysis.search.auto_shard import solver
from lingvo_moe.core.sharding import Mesh

_MESH = Mesh.parse("device:4")


def _head(x_BM: tf.Tensor, w_MV: tf.Tensor) -> tf.Tensor:
    """A normalization, and a classifier's loss."""
    mean = tf.reduce_mean(x_BM, 0)
    y = (x_BM - mean) * tf.math.rsqrt(tf.reduce_mean(tf.square(x_BM - mean), 0) + 1e-5)
    return -tf.reduce_sum(tf.nn.log_softmax(y @ w_MV)[:, 0])


_CASES = [
    (functions.perceptron, [spec(65536, 256), spec(256, 512), spec(512, 256)], [1, 2]),
    (_head, [spec(512, 2048), spec(2048, 65536)], [0, 1]),
]


@pytest.mark.parametrize("fn, specs, by", _CASES)
def test_no_compiled_strategy_is_better_by_more_than_a_twentieth(fn, specs, by):
    names = [list(fn.__annotations__)[i] for i in by]
    search = xs.auto_shard(fn, _MESH, differentiate=names).Searched(*specs)
    choices, edges = search.costs.choices, search.costs.edges
    best = solver.solve(choices, edges, None)
    compiled = {}
    for chosen in itertools.product(*(range(len(c.choices)) for c in choices)):
        strategy = search.AsStrategy(solver.cost(choices, edges, chosen), {})
        compiled[chosen] = compiled_seconds(
            compile_step(fn, strategy, specs, by).HloText(), ACCELERATOR
        )
    assert len(compiled) in (12, 16)
    assert compiled[best.chosen] <= 1.05 * min(compiled.values())
    assert compiled[best.chosen] < max(compiled.values()) / 4
