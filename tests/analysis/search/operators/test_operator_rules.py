"""The rules of operations: half of the operands along a letter give half of the result."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.analysis.search.operators import RULES

_Function = Callable[..., Any]
# (operation, function, shapes of operands, letters that results keep)
_CASES: list[tuple[str, _Function, Sequence[Sequence[int]], int]] = [
    ("AddV2", lambda x, y: x + y, [(4, 6), (6,)], 2),
    ("AddV2", lambda x, y: x + y, [(4, 1), (1, 6)], 2),
    ("BiasAdd", tf.nn.bias_add, [(4, 2, 6), (6,)], 3),
    ("Sum", lambda x: tf.reduce_sum(x, [0, -1]), [(4, 6, 8)], 1),
    ("Max", lambda x: tf.reduce_max(x, 1, keepdims=True), [(4, 6)], 1),
    ("Cumsum", lambda x: tf.cumsum(x, 1), [(4, 6)], 1),
    ("ArgMax", lambda x: tf.argmax(x, 1), [(4, 6)], 1),
    ("TopKV2", lambda x: tf.math.top_k(x, 3)[0], [(4, 6)], 1),
    ("Reshape", lambda x: tf.reshape(x, [x.shape[0] * x.shape[1], -1]), [(4, 6, 8)], 2),
    ("Reshape", lambda x: tf.reshape(x, [x.shape[0], x.shape[1] // 3, 3, x.shape[2] // 2, 2]), [(4, 6, 8)], 3),
    ("Reshape", lambda x: tf.reshape(x, [x.shape[0] // 3, -1]), [(6, 4)], 1),
    ("Squeeze", lambda x: tf.squeeze(x, 1), [(4, 1, 6)], 2),
    ("ExpandDims", lambda x: tf.expand_dims(x, 1), [(4, 6)], 2),
    ("Transpose", lambda x: tf.transpose(x, [2, 0, 1]), [(4, 6, 8)], 3),
    ("Bitcast", lambda x: tf.bitcast(x, tf.int32), [(4, 6)], 2),
    ("Bitcast", lambda x: tf.bitcast(x, tf.uint8), [(4, 6)], 2),
    ("Bitcast", lambda x: tf.bitcast(x, tf.complex64), [(4, 6, 2)], 2),
    ("PadV2", lambda x: tf.pad(x, [[0, 0], [1, 2]], constant_values=2.0), [(4, 6)], 1),
    ("Tile", lambda x: tf.tile(x, [1, 3]), [(4, 6)], 1),
    ("StridedSlice", lambda x: x[:, 1:3, 0, tf.newaxis], [(4, 6, 2, 8)], 2),
    ("ConcatV2", lambda x, y: tf.concat([x, y], 1), [(4, 6), (4, 2)], 1),
    ("Split", lambda x: tf.split(x, 2, 1)[1], [(4, 6)], 1),
    ("Pack", lambda x, y: tf.stack([x, y], 1), [(4, 6), (4, 6)], 2),
    ("Unpack", lambda x: tf.unstack(x, axis=1)[1], [(4, 2, 6)], 2),
    ("MatMul", lambda x, y: tf.matmul(x, y, transpose_b=True), [(4, 6), (8, 6)], 2),
    ("MatMul", lambda x, y: tf.matmul(x, y, transpose_a=True), [(6, 4), (6, 8)], 2),
    ("BatchMatMulV2", lambda x, y: tf.matmul(x, y, transpose_b=True), [(4, 1, 2, 6), (2, 8, 6)], 4),
    ("Einsum", lambda x, y: tf.einsum("abc,cdb->dab", x, y), [(4, 6, 2), (2, 8, 6)], 3),
    ("Einsum", lambda x: tf.einsum("abc->ca", x), [(4, 6, 2)], 2),
    ("Conv2D", lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"), [(4, 8, 8, 2), (3, 3, 2, 6)], 2),
    ("DepthwiseConv2dNative", lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME"),
     [(4, 8, 8, 2), (3, 3, 2, 1)], 2),
    ("MaxPool", lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), [(4, 8, 8, 2)], 2),
]  # fmt: skip


def _traced(name: str, fn: _Function, arrays: Sequence[np.ndarray]) -> tuple[Any, Any, Any]:
    """The operation of that type, its rule, and the graph, which keeps it alive."""
    concrete = tf.function(fn, autograph=False).get_concrete_function(*map(tf.constant, arrays))
    op = next(op for op in concrete.graph.get_operations() if op.type == name)
    return op, RULES[name](op), concrete


def _half(x: np.ndarray, dims: Sequence[Any], letter: str, which: int) -> np.ndarray:
    for dim, found in enumerate(dims):
        if found == letter:
            x = np.split(x, 2, axis=dim)[which]
    return x


@pytest.mark.parametrize("name, fn, shapes, num_letters", _CASES)
def test_half_of_the_operands_give_half_of_the_result(name, fn, shapes, num_letters):
    rng = np.random.RandomState(0)
    arrays = [rng.randn(*shape).astype(np.float32) for shape in shapes]
    op, rule, graph = _traced(name, fn, arrays)
    index = {t.ref(): i for i, t in enumerate(graph.inputs)}
    place = {index[t.ref()]: dims for t, dims in zip(op.inputs, rule.inputs) if t.ref() in index}
    whole = fn(*map(tf.constant, arrays)).numpy()
    result = graph.outputs[0].op.inputs[0]  # behind an Identity
    out = rule.outputs[[t.ref() for t in op.outputs].index(result.ref())]
    kept = [letter for letter in rule.sizes if letter not in rule.reduced]
    assert len(kept) == num_letters
    for letter in kept:
        assert rule.sizes[letter] % 2 == 0
        for which in (0, 1):
            halves = [_half(x, place.get(i, ()), letter, which) for i, x in enumerate(arrays)]
            got = fn(*map(tf.constant, halves)).numpy()
            np.testing.assert_allclose(got, _half(whole, out, letter, which), atol=1e-5)


def test_a_target_is_among_the_largest_of_its_row():
    scores, targets = np.zeros((4, 6), np.float32), np.zeros(4, np.int32)
    _, rule, _ = _traced("InTopKV2", lambda x, y: tf.math.in_top_k(y, x, 2), [scores, targets])
    assert rule.inputs == (("B", None), ("B",), None) and rule.outputs == (("B",),)


def test_a_look_up_sums_over_the_table_s_rows():
    table, ids = np.zeros((8, 4), np.float32), np.zeros((2, 6), np.int32)
    _, rule, _ = _traced("GatherV2", tf.gather, [table, ids])
    assert rule.heavy and rule.outputs == ((*rule.inputs[1], rule.inputs[0][1]),)
    assert rule.reduced == {rule.inputs[0][0]}
