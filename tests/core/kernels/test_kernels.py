"""The two sets of kernels have the same functions, and these agree in values and gradients.

Letters: B batch, T query, S key, M model, H hidden, N head, A head of keys and values, K key dimension, V vocabulary,
E expert, G group, C capacity slot, L layer.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import kernels, processor, randomness
from lingvo_moe.core.kernels import tensorflow, without_avx512, xla
from lingvo_moe.core.kernels.scores import Seen
from lingvo_moe.core.layers.feed_forward import ACTIVATIONS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh

FUNCTIONS = [
    name
    for name, one in vars(kernels.Kernels).items()
    if inspect.isfunction(one) and name[0] != "_"
]


def _normal(seed: int, *shape: int) -> tf.Tensor:
    return tf.constant(np.random.RandomState(seed).randn(*shape).astype("float32"))


def _as_is(x: tf.Tensor, letters: str) -> tf.Tensor:
    assert len(letters) == x.shape.rank
    return x


def _results(ops: Any, fn: Callable, inputs: list[tf.Tensor]) -> list[np.ndarray]:
    """fn's tensors and, where they are floats, the gradients of the sum of their squares."""
    with kernels.using(ops), tf.GradientTape() as tape:
        tape.watch(inputs)
        results = tf.nest.flatten(fn(ops, *inputs))
        floating = [r for r in results if r.dtype.is_floating]
        total = tf.add_n([tf.reduce_sum(r * r) for r in floating] or [tf.constant(0.0)])
    grads = tape.gradient(total, inputs) if floating else []
    return [np.asarray(t) for t in [*results, *grads]]


def _assert_close(expected: list, found: list, tol: float = 1e-5) -> None:
    assert len(expected) == len(found)
    for a, b in zip(expected, found):
        np.testing.assert_allclose(b, a, rtol=tol, atol=tol * max(1.0, float(np.abs(a).max())))


def _attention(ops, query, source, *weights, cross, dropped=False, bfloat16=False):
    if bfloat16:
        query, source = tf.cast(query, tf.bfloat16), tf.cast(source, tf.bfloat16)
    keys = source if cross else query
    mask = tf.constant(np.random.RandomState(1).rand(2, 5, keys.shape[1]) < 0.7)
    mask |= tf.eye(*mask.shape[1:], dtype=tf.bool)
    w = NestedMap(zip("qkvo", weights))
    q, k, v = ops.project_heads(query, keys, w, 0.5, _as_is)
    q *= ops.per_head(1.0 + tf.cast(_normal(9, 2, 5, 3), q.dtype) ** 2)
    q = ops.in_layout(ops.out_of_layout(q) + tf.cast(_normal(10, 2, 5, 2, 3), q.dtype))
    drop = functools.partial(_dropout, ops) if dropped else None
    seen = Seen(mask, sinks_N=_normal(11, 2) if cross else None)
    y = ops.project_back(ops.attend(q, k, v, seen, drop), w.o)
    return tf.cast(y, tf.float32) + 0.0 * tf.reduce_sum(tf.cast(source, tf.float32))


def _search(ops, x, memory, *weights):
    """Two steps of two hypotheses, the second of which continues the first one; each attends to a memory too."""
    w = NestedMap(zip("qkvo", weights))
    shape = kernels.CacheShape(2, 2, 2, w.k.shape[1], 3, tf.float32)
    caches = [ops.empty_cache(shape) for _ in "kv"]
    assert len(ops.CACHE) == caches[0].shape.rank
    _, *kv = ops.project_heads(None, memory, w, 0.5, _as_is)
    masks = np.array([[[1, 0, 0, 0], [0, 1, 0, 0]], [[1, 0, 1, 0], [1, 0, 0, 1]]])
    results = []
    for t in range(2):
        step = x[:, 2 * t : 2 * t + 2]
        q, *new = ops.project_heads(step, step, w, 0.5, _as_is)
        caches = [ops.write_cache(c, n, tf.constant(t)) for c, n in zip(caches, new)]
        mask = tf.constant(np.stack([masks[t]] * 2))
        results.append(ops.project_back(ops.attend_cache(q, *caches, Seen(mask)), w.o))
        q, *_ = ops.project_heads(step, None, w, 0.5, _as_is)
        results.append(ops.project_back(ops.attend(q, *kv, Seen(tf.ones([2, 1, 4]))), w.o))
    # Steps are not differentiated.
    zero = 0.0 * tf.add_n([tf.reduce_sum(each) for each in (x, memory, *weights)])
    return [tf.stop_gradient(y) + zero for y in results]


def _attention_inputs(kv_heads: int) -> list[tf.Tensor]:
    shapes = [(8, 2, 3), (8, kv_heads, 3), (8, kv_heads, 3), (2, 3, 8)]
    weights = [0.5 * _normal(i, *shape) for i, shape in enumerate(shapes)]
    return [_normal(7, 2, 5, 8), _normal(8, 2, 4, 8), *weights]


def _experts(ops, x, *weights, rate=0.0, activation="relu"):
    drop = functools.partial(kernels.dropout, rate=rate, seed=randomness.make_seed(1, 2))
    function = ACTIVATIONS[activation]
    named = NestedMap(zip((*function.weights, "wo"), weights, strict=True))
    return ops.experts_feed_forward(x, named, function, drop if rate else None, _as_is)


def _expert_inputs(slots: int, activation: str = "relu") -> list[tf.Tensor]:
    wi = [0.3 * _normal(3 + i, 3, 5, 6) for i, _ in enumerate(ACTIVATIONS[activation].weights)]
    return [_normal(0, 3, 2, slots, 5), *wi, 0.3 * _normal(2, 3, 6, 5)]


def _token_losses(ops, x, table, smoothing, scale=1.0):
    """`scale`: logits so far apart that a label's probability may be 0 in float32."""
    rng = np.random.RandomState(0)
    labels = tf.constant(rng.randint(0, 11, (2, 9)), tf.int32)
    weights = tf.constant(rng.rand(2, 9) < 0.8)
    losses = ops.token_losses(scale * x, table, labels, weights, smoothing, _as_is)
    assert tf.reduce_sum(losses[2]) > 0
    return losses[0], tf.stop_gradient(losses[1]), tf.stop_gradient(losses[2])


def _dropout(ops, x, rows=None):
    y = ops.dropout(x, 0.4, randomness.make_seed(1, 2), rows)
    assert 0.2 < np.mean(y == 0) < 0.6
    return y


def _adafactor(ops, weight, *, dims, stack_dims, clip=1.0, scaled=True):
    grad = tf.sin(40.0 * tf.stop_gradient(weight))
    shape = weight.shape.as_list()
    slots = NestedMap(full=tf.abs(_normal(3, *shape)))
    if dims is not None:
        row, col = ([n for d, n in enumerate(shape) if d != out] for out in reversed(dims))
        slots = NestedMap(row=tf.abs(_normal(3, *row)), col=tf.abs(_normal(4, *col)))
    recipe = kernels.AdafactorRecipe(
        tf.constant(0.9), tf.constant(0.1), 1e-30, 1e-3, clip, scaled, dims, stack_dims
    )
    delta, slots = ops.adafactor(weight, grad, slots, recipe)
    grad_square = delta.grad_square
    if grad_square is None:
        grad_square = ops.sum_of_squares(grad)
    # No optimizer differentiates its update.
    results = [delta.SubtractFrom(weight), delta.SumOfSquares(), grad_square, *slots.Flatten()]
    return [tf.constant(r.numpy()) + 0.0 * tf.reduce_sum(weight) for r in results]


_ROWS = tf.constant([[6, 0], [3, 3]])
_SORTED = tf.constant([3, 1, 3, 0, 1, 1, 7, 3])
_SIZES = tf.constant([4, 0, 3])


def _sorted_rows(ops, fewest=1):
    """The rows of groups 0 to 6 in their order, whatever lies between and after them."""
    place, source, sizes = ops.sort_rows(_SORTED, 7, fewest)
    assert set(sizes.numpy()) == {0, *(max(n, fewest) for n in (1, 3))}
    group = tf.repeat(tf.range(7), sizes)
    rows = source[: tf.size(group)]
    there = rows >= 0
    tf.debugging.assert_equal(tf.gather(_SORTED, rows[there]), group[there])
    tf.debugging.assert_equal(tf.gather(source, place[:6]), tf.range(6))
    tf.debugging.assert_equal(source[tf.size(group) :], -1)
    return rows[there]


def test_a_group_with_rows_has_as_many_places_as_asked_for():
    tf.debugging.assert_equal(_sorted_rows(tensorflow, fewest=4), _sorted_rows(xla))


CASES: dict[str, tuple[Callable, list[tf.Tensor]]] = {
    "product": (lambda ops, x, w: ops.product(x, w), [_normal(0, 2, 5, 4), _normal(1, 4, 6)]),
    "experts_feed_forward few": (_experts, _expert_inputs(4)),
    "experts_feed_forward many": (_experts, _expert_inputs(100)),
    "experts_feed_forward drop": (functools.partial(_experts, rate=0.3), _expert_inputs(4)),
    "grouped_matmul few": (lambda ops, x, w: ops.grouped_matmul(x, w, _SIZES, None),
        [_normal(0, 9, 4), _normal(1, 3, 4, 6)]),
    "grouped_matmul many": (lambda ops, x, w: ops.grouped_matmul(x, w, _SIZES, 10_000),
        [_normal(0, 9, 4), _normal(1, 3, 4, 6)]),
    "sort_rows": (lambda ops, x: _sorted_rows(ops), [tf.zeros([])]),
    "normalize": (lambda ops, x, scale, bias: ops.normalize(x, scale, bias, 1e-6),
        [3.0 + _normal(0, 2, 5, 6), _normal(1, 6), _normal(2, 6)]),
    "normalize rms": (lambda ops, x, scale: ops.normalize(x, scale, None, 1e-6),
        [3.0 + _normal(0, 2, 5, 6), _normal(1, 6)]),
    "logits": (lambda ops, x, table: ops.logits(x, table, _as_is), [_normal(0, 2, 3, 4), _normal(1, 7, 4)]),
    "cross_entropy": (lambda ops, x: ops.cross_entropy(x, tf.constant([[1, 6, 0], [3, 3, 2]]), 0.1),
        [_normal(0, 2, 3, 7)]),
    "dropout": (_dropout, [1.0 + _normal(0, 20, 30) ** 2]),
    "dropout rows": (functools.partial(_dropout, rows=_ROWS), [1.0 + _normal(0, 2, 2, 30) ** 2]),
    "sum_of_squares": (lambda ops, x: ops.sum_of_squares(x), [_normal(0, 5, 7)]),
    "one_pass": (
        lambda ops, x, y: ops.one_pass(lambda a, b: (a * b, a / (1.0 + b * b)), x, y),
        [_normal(0, 5, 7), _normal(1, 5, 7)],
    ),
    "slices": (lambda ops, *stacks: [[w * (i + 1) for w in ws] for i, ws in enumerate(ops.slices(stacks, 3))],
        [_normal(0, 3, 2, 4), _normal(1, 3, 5)]),
    "slices none": (lambda ops, x: [x, tf.constant(len(ops.slices([], 3)))], [_normal(0, 3)]),
    "select new": (lambda ops, x, y: ops.select(tf.constant(True), [x, y], [y, x]), [_normal(0, 3), _normal(1, 3)]),
    "select old": (lambda ops, x, y: ops.select(tf.constant(False), [x, y], [y, x]), [_normal(0, 3), _normal(1, 3)]),
    "batch_independent": (lambda ops, x: ops.batch_independent(tf.math.rsqrt, x), [1.0 + _normal(0, 2, 5, 1) ** 2]),
}  # fmt: skip
for _activation in ("gelu", "swiglu"):
    for _slots in (4, 100):
        CASES[f"experts_feed_forward {_activation} {_slots}"] = (
            functools.partial(_experts, activation=_activation),
            _expert_inputs(_slots, _activation),
        )
# Attention's functions are compared together, since the layout between them is each set's own.
STEPS = {"project_heads", "per_head", "in_layout", "out_of_layout", "attend", "project_back"}
SEARCH = {"empty_cache", "write_cache", "seen_positions", "attend_cache"}
for _heads in (2, 1):
    for _cross in (False, True):
        _fn = functools.partial(_attention, cross=_cross, dropped=_cross)
        CASES[f"attention heads={_heads} cross={_cross}"] = _fn, _attention_inputs(_heads)
    CASES[f"search heads={_heads}"] = _search, _attention_inputs(_heads)
for _smoothing, _scale in ((0.0, 1.0), (0.2, 1.0), (0.2, 60.0)):
    CASES[f"token_losses {_smoothing} {_scale}"] = (
        functools.partial(_token_losses, smoothing=_smoothing, scale=_scale),
        [_normal(1, 2, 9, 4), _normal(2, 11, 4)],
    )
for _name, _dims, _stack, _options in (
    ("last two", (0, 1), 0, {}),
    ("last two of a stack", (1, 2), 1, {}),
    ("last two of experts", (1, 2), 0, {"clip": 0.0, "scaled": False}),
    ("others", (0, 2), 0, {}),
    ("full", None, 1, {}),
):
    CASES[f"adafactor {_name}"] = (
        functools.partial(_adafactor, dims=_dims, stack_dims=_stack, **_options),
        [_normal(0, 4, 6) if _dims == (0, 1) else _normal(0, 3, 4, 6)],
    )


CASES["adafactor of many experts"] = (
    functools.partial(_adafactor, dims=(1, 2), stack_dims=0),
    [_normal(0, 66, 4, 6)],
)


@pytest.mark.parametrize("ops", [xla, tensorflow], ids=["xla", "tensorflow"])
def test_each_set_has_the_functions_of_the_protocol(ops):
    for name in FUNCTIONS:
        declared = inspect.signature(getattr(kernels.Kernels, name))
        wanted = [p for p in declared.parameters.values() if p.name != "self"]
        found = inspect.signature(getattr(ops, name))
        assert list(found.parameters.values()) == wanted, name
        assert found.return_annotation == declared.return_annotation, name


def test_each_function_is_compared():
    compared = {name.split()[0] for name in CASES} - {"attention", "search"}
    assert compared | STEPS | SEARCH == set(FUNCTIONS)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_agree(name):
    fn, inputs = CASES[name]
    _assert_close(_results(xla, fn, inputs), _results(tensorflow, fn, inputs))


@pytest.mark.parametrize("ops, expected", [(xla, [0, 1, 0, 0]), (tensorflow, [0, 1, 1, 0])])
def test_of_tied_logits_xla_counts_the_lowest_id(ops, expected):
    """Ids 1 and 2 share the largest logit; each of the four ids is the label once."""
    x, table = tf.ones([1, 4, 1]), tf.constant([[0.0], [2.0], [2.0], [1.0]])
    with use_mesh(single_device()):
        losses = ops.token_losses(x, table, tf.range(4)[tf.newaxis], tf.ones([1, 4]), 0.1, _as_is)
    np.testing.assert_array_equal(losses[2][0], expected)


def test_bfloat16_attention_keeps_its_type():
    fn = functools.partial(_attention, cross=False, bfloat16=True)
    # Small: how a product rounds depends on the processor, and probabilities near 0 and 1 enlarge that.
    inputs = [0.5 * x for x in _attention_inputs(2)]
    _assert_close(_results(xla, fn, inputs), _results(tensorflow, fn, inputs), tol=3e-2)


def test_bfloat16_logits_are_a_plain_product():
    """TensorFlow's einsum of bfloat16 takes over 20 times as long on processors without AVX-512."""
    inputs = [_normal(1, 2, 9, 4), _normal(2, 11, 4)]
    logits = tf.function(lambda x, table: tensorflow.logits(tf.cast(x, "bfloat16"), table, _as_is))
    operations = logits.get_concrete_function(*inputs).graph.get_operations()
    assert "MatMul" in [op.type for op in operations]
    _assert_close([xla.logits(*inputs, _as_is)], [logits(*inputs)], tol=2e-2)


def test_bfloat16_losses_agree():
    def fn(ops, x, table):
        return _token_losses(ops, tf.cast(x, "bfloat16"), table, 0.2)[0]

    inputs = [tf.cast(tf.cast(x, "bfloat16"), "float32") for x in CASES["token_losses 0.2 1.0"][1]]
    _assert_close(_results(xla, fn, inputs), _results(tensorflow, fn, inputs), tol=3e-2)


def test_gradients_of_bfloat16_losses_have_what_is_left_to_learn():
    """The label's probability is 0.9975, and the nearest ones in bfloat16 are 0.9961 and 1."""
    x, table = tf.ones([1, 1, 1], "bfloat16"), tf.constant([[6.0], [0.0]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        labels, weights = tf.zeros([1, 1], "int32"), tf.ones([1, 1])
        loss = tensorflow.token_losses(x, table, labels, weights, 0.0, _as_is)[0]
    assert tape.gradient(loss, x).numpy().item() == pytest.approx(
        -6.0 / (1.0 + np.exp(6.0)), rel=0.02
    )


def test_rounding_does_not_depend_on_the_number_of_elements():
    x = 1.0 + _normal(0, 37, 1) ** 2
    together = tensorflow.batch_independent(tf.math.rsqrt, x)
    alone = [tensorflow.batch_independent(tf.math.rsqrt, x[i : i + 1]) for i in range(37)]
    np.testing.assert_array_equal(together, tf.concat(alone, 0))


@pytest.mark.parametrize("slots", [4, 100])
def test_no_expert_s_weights_are_transposed(slots):
    """Neither weights nor their gradients are transposed; with few rows, experts are computed one by one."""

    @tf.function(autograph=False)
    def step(*args: tf.Tensor) -> list[tf.Tensor]:
        y = _experts(tensorflow, *args)
        return tf.gradients(tf.reduce_sum(y * tf.cos(y)), args)

    graph = step.get_concrete_function(*_expert_inputs(slots)).graph
    kinds = {op.type for op in graph.get_operations()}
    assert "BatchMatMulV2" in kinds and "Einsum" not in kinds
    few = slots == 4
    assert ("Transpose" in kinds) == few and ("MatMul" in kinds) == few


@pytest.mark.parametrize("sides", [(8, 1024), (1536, 256), (512, 512), (8, 1000), (512, 1024)])
@pytest.mark.parametrize("instructions", ["avx2", "avx2 avx512f"])
def test_a_weight_has_its_gradient_however_its_operands_are_read(sides, instructions, monkeypatch):
    """Checks the gradient of plain and of wider operands, alone and by expert; first or second is wide, or both."""
    monkeypatch.setattr(processor, "features", lambda: instructions)
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(5, sides[0])), draw.normal(size=sides)
    x, w, dy = (tf.constant(a, tf.float32) for a in (x, w, draw.normal(size=(5, sides[1]))))

    @tf.function(autograph=False)
    def gradients():
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = without_avx512.matmul(x, w)
        by_expert = without_avx512.weight_gradient(tf.stack([x, 2 * x]), tf.stack([dy, dy]))
        return y, *tape.gradient(y, [x, w], dy), by_expert

    y, dx, dw, by_expert = gradients()
    np.testing.assert_allclose(y, x.numpy() @ w.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, dy.numpy() @ w.numpy().T, rtol=1e-4, atol=1e-3)
    want = x.numpy().T @ dy.numpy()
    np.testing.assert_allclose(dw, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(by_expert, [want, 2 * want], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots", [32, 100])
@pytest.mark.parametrize("instructions", ["avx2", "avx2 avx512f"])
def test_a_few_hundred_rows_are_multiplied_by_wider_copies_of_weights(
    slots, instructions, monkeypatch
):
    """Checks experts with slots and without, forward and backward, and that copies are made where they save time."""
    monkeypatch.setattr(processor, "features", lambda: instructions)
    weights = [0.05 * _normal(seed, 2, 512, 512) for seed in (1, 2)]
    inputs = [_normal(0, 2, 2, slots, 512), *weights]

    def run(ops: Any, x: tf.Tensor, wi: tf.Tensor, wo: tf.Tensor) -> list[tf.Tensor]:
        sizes = tf.constant([2 * slots - 3, 2 * slots + 3])
        rows = tf.reshape(x, [4 * slots, 512])
        return [_experts(ops, x, wi, wo), ops.grouped_matmul(rows, wi, sizes, None)]

    _assert_close(_results(xla, run, inputs), _results(tensorflow, run, inputs), tol=1e-4)
    traced = tf.function(functools.partial(run, tensorflow), autograph=False)
    with kernels.using(tensorflow):
        kinds = [op.type for op in traced.get_concrete_function(*inputs).graph.get_operations()]
    # Two copies for each expert of each product; one, of all rows, for the grouped product.
    assert kinds.count("ConcatV2") > 6 or instructions != "avx2"
