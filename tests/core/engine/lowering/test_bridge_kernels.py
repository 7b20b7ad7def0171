"""Lowering replaces operations that TensorFlow's bridge compiles slowly; the program computes the same."""

import ctypes
import gc
import re

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from lingvo_moe.core.engine.lowering import bridge_kernels
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh

_SPECS = [TensorSpec((4, 3), "float32"), TensorSpec((3, 3), "float32")]


@tf.function(autograph=False)
def _scaled(x_AB, w_BC):
    y_AC = tf.einsum("AB,BC->AC", x_AB, w_BC)
    return y_AC * tf.math.reciprocal(tf.reduce_sum(y_AC, -1, keepdims=True))


def _step(x_AB, w_BC):
    """Both operations, inside and outside of a loop and of a function, with their gradients."""
    with tf.GradientTape() as tape:
        tape.watch([x_AB, w_BC])
        _, y_AB = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, y: (i + 1, tf.math.reciprocal(tf.einsum("AB,BC->AC", y, w_BC) + 2.0)),
            (tf.constant(0), x_AB),
            maximum_iterations=3,
        )
        loss = tf.reduce_sum(_scaled(y_AB, w_BC)) * tf.math.reciprocal(tf.reduce_sum(w_BC))
    return tape.gradient(loss, [x_AB, w_BC])


def _lowered(fn, *specs):
    return lower(fn, specs, Mesh.parse("data:2"))


def _check_same_program(fn, specs, monkeypatch):
    cheap = _operations(fn, specs)
    monkeypatch.setattr(bridge_kernels, "_replace_all", lambda *_: None)
    assert cheap == _operations(fn, specs)


def _operations(fn, specs):
    """The lines of the program, without the transpositions that move nothing, and with its values renumbered."""
    names: dict[
        str, str
    ] = {}  # of the values in scope: a number is used again outside of a loop's body
    lines = []
    for line in _lowered(fn, *specs).Text().splitlines():
        result, _, rest = line.partition(" = ") if line.strip().startswith("%") else ("", "", line)
        rest = re.sub(r"%\w+", lambda m: names.get(m[0], m[0]), rest)
        value = result.strip().split(":")[0]
        transposed = re.match(r"stablehlo.transpose (%\w+), dims = \[(.*)\]", rest)
        if transposed and (dims := re.findall(r"\d+", transposed[2])) == sorted(dims):
            names[value] = transposed[1]
            continue
        if value:
            names[value] = f"%value{len(lines)}"
        lines.append(rest)
    return lines


def test_the_program_is_the_same(monkeypatch):
    _check_same_program(_step, _SPECS, monkeypatch)


_SIZES = {letter: size for size, letter in enumerate("abcdef", 2)}
_EQUATIONS = [
    "ab,bc->ac", "ab,cb->ca", "abc,acd->abd", "abc,bad->cd", "abc,cab->ab", "ab,c->bca", "ab,ab->",
    "a,a->a", "abcd,cdef->efab", "abd,ac->bdca", "dabc,bdc->cad",
    "ab,bc->c", "aa,ab->b", "...ab,bc->...ac",  # more than one product
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "float16"])
def test_products_and_roots_of_any_kind_give_the_same_program(dtype, monkeypatch):
    operands = [equation.split("->")[0].split(",") for equation in _EQUATIONS]
    shapes = [
        tuple(_SIZES[c] for c in letters if c.isalpha()) for pair in operands for letters in pair
    ]

    def all_products(*args):
        pairs = zip(_EQUATIONS, args[::2], args[1::2], strict=True)
        products = [tf.einsum(equation, x, y) for equation, x, y in pairs]
        roots = [root(x) for root in (tf.sqrt, tf.math.rsqrt) for x in args[:2]]
        return [*products, *roots, tf.sqrt(tf.exp(args[0]))]

    _check_same_program(all_products, [TensorSpec(shape, dtype) for shape in shapes], monkeypatch)


def test_nothing_that_takes_long_is_left_and_the_users_definition_stays(monkeypatch):
    concrete = _scaled.get_concrete_function(*(tf.TensorSpec(s.shape, s.dtype) for s in _SPECS))
    defined = {}
    monkeypatch.setattr(
        context.Context, "add_function_def", lambda _, f: defined.update({f.signature.name: f})
    )
    monkeypatch.setattr(context.Context, "get_compiler_ir", lambda *_, **__: b"")
    bridge_kernels.bridge_hlo(concrete, [])
    lowered = {n.op for n in defined[concrete.name.decode()].node_def}
    assert {"XlaCustomCallV2", "RealDiv"} < lowered
    assert not lowered & {"Einsum", "Reciprocal"}
    own = {n.op for n in context.context().get_function_def(concrete.name).node_def}
    assert {"Einsum", "Reciprocal"} < own


def test_a_lowered_function_is_not_kept():
    """The memory that malloc counts as in use, in three functions of 200 operations each: 4 MB if they were kept."""

    def in_use():
        gc.collect()
        return _malloc_statistics().in_use

    def many(x):
        for _ in range(100):
            x = tf.tanh(x) + 1.0
        return x

    def hlo():
        spec = tf.TensorSpec((4,), "float32")
        function = tf.function(many, jit_compile=True, autograph=False)
        return bridge_kernels.bridge_hlo(function.get_concrete_function(spec), [spec])

    hlo()
    before = in_use()
    for _ in range(3):
        hlo()
    assert in_use() - before < 2 << 20


class _Statistics(ctypes.Structure):
    """The beginning of the C library's `struct mallinfo2`; bytes in use are the eighth number."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "e", "f", "g", "in_use", "h", "i")
    ]


def _malloc_statistics():
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Statistics
    return mallinfo()


def test_every_result_of_a_function_is_replaced():
    """The order of a map of results depends on the process's hashes; with many results, some order would fail."""

    @tf.function(autograph=False)
    def many(x):
        return [tf.math.reciprocal(x + float(i)) for i in range(40)]

    concrete = many.get_concrete_function(tf.TensorSpec((2,), "float32"))
    definition = concrete.function_def
    nodes = [node.name for node in definition.node_def if node.op == "Reciprocal"]
    for key, name in zip(list(definition.ret), nodes, strict=True):  # as gradients read them
        definition.ret[key] = f"{name}:y:0"
    bridge_kernels._replace_all(definition, concrete._inference_function)
    assert [name for name in definition.ret.values() if not name.endswith(":z:0")] == []
