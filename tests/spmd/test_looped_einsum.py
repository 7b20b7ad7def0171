"""Figure 4(c): both operands sharded along dimensions that are not contracted, the result slice by slice."""

import re

import numpy as np
import pytest
import tensorflow as tf
from refusals import refuses
from spmd_case import Case, check, floats

from lingvo_moe.core.engine.eager.testing import Collectives, run_sharded, run_single
from lingvo_moe.core.sharding import Mesh, ShardingError, use_mesh
from lingvo_moe.core.sharding.annotate import replicate, split
from lingvo_moe.core.sharding.looped_einsum import looped_einsum

MESH = Mesh.parse("d:8")
LOOP = {"collective-permute": 1}
# One permute for the slices of the right operand, one for those of its gradient.
TWO = {"collective-permute": 2}


def _case(name: str, equation: str, lhs: tuple, rhs: tuple, mesh: str = "d:8", **kwargs) -> Case:
    letters = kwargs.pop("letters", "")
    return Case(
        name,
        lambda a, b: looped_einsum(equation, a, b, "d", letters),
        (floats(*lhs), floats(*rhs, seed=1)),
        mesh,
        reference=lambda a, b: tf.einsum(equation, a, b),
        **kwargs,
    )


CASES = [
    _case("a matrix product", "IK,KJ->IJ", (16, 12), (12, 24), forward=LOOP, backward=TWO),
    _case("by rows of both", "IK,JK->IJ", (8, 4), (24, 4), forward=LOOP, several_processes=True),
    _case("a batch dimension", "BIK,BKJ->BIJ", (3, 8, 4), (3, 4, 16), forward=LOOP),
    _case("two contracted dimensions", "IKL,LJK->IJ", (8, 2, 3), (3, 8, 2), forward=LOOP),
    _case("letters chosen", "IHK,JNK->IHJN", (2, 8, 4), (3, 16, 4), letters="HN", forward=LOOP),
    _case("copies along another axis", "IK,KJ->IJ", (8, 4), (4, 8), "c:2,d:4", forward=LOOP),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case):
    check(case, CASES)


ROWS, COLUMNS, INNER = 16, 1024, 64
SLICE = COLUMNS * INNER * 4 // 8  # bytes of the right operand on a device
ARGS = (floats(ROWS, INNER), floats(INNER, COLUMNS))
SPLITS = (("d", None), (None, "d"))


def _looped(a, b):
    return looped_einsum("IK,KJ->IJ", a, b, "d")


def _gathered(a, b):
    return split(tf.einsum("IK,KJ->IJ", split(a, 0, 8), replicate(b)), 0, 8)


def _gradients(fn):
    def gradients(a, b, u):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            loss = tf.reduce_sum(fn(a, b) * split(u, 0, 8))
        da, db = tape.gradient(loss, [a, b])
        return split(da, 0, 8), split(db, 1, 8)

    return gradients


def _largest(hlo: str) -> int:
    """Bytes of the largest tensor in a compiled module's text."""
    sizes = [np.prod([int(n) for n in m.split(",")]) for m in re.findall(r"f32\[([\d,]+)\]", hlo)]
    return int(4 * max(sizes))


def _is_a_loop(found: Collectives) -> None:
    assert " while(" in found.hlo
    assert set(found) == {"collective-permute"}, dict(found)
    # Where one operand is gathered, that is the largest tensor: eight slices. Here a slice is.
    assert _largest(found.hlo) == SLICE


def test_no_operand_is_ever_whole_on_a_device():
    got, found = run_sharded(_looped, ARGS, MESH, SPLITS)
    want, gathered = run_sharded(_gathered, ARGS, MESH, SPLITS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    _is_a_loop(found)
    assert dict(gathered) == {"all-gather": 1} and _largest(gathered.hlo) == 8 * SLICE
    assert gathered.memory["temporaries"] >= 8 * SLICE
    # The slice that is used, the one that arrives, and the result before it is put in order.
    result = ROWS * COLUMNS * 4 // 8
    assert found.memory["temporaries"] < 3 * SLICE + 2 * result + 4096
    assert found.memory["temporaries"] < gathered.memory["temporaries"] / 2


def test_the_gradients_keep_the_promise():
    args = (*ARGS, floats(ROWS, COLUMNS, seed=2))
    splits = (*SPLITS, ("d", None))
    got, found = run_sharded(_gradients(_looped), args, MESH, splits)
    want, gathered = run_sharded(_gradients(_gathered), args, MESH, splits)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    _is_a_loop(found)
    assert found["collective-permute"] == 2
    # Slices of operand and gradient: in use, arriving; and slices of the incoming gradient in order.
    incoming = ROWS * COLUMNS * 4 // 8
    assert found.memory["temporaries"] < 6 * SLICE + 2 * incoming + 4096
    # Gathered, the gradient of the whole right operand is there too, to be added up.
    assert gathered.memory["temporaries"] >= 16 * SLICE
    assert found.memory["temporaries"] < gathered.memory["temporaries"] / 2


def _second_gradients(fn):
    """Gradients of the squares of the gradients: loops whose bodies are functions, with tensors of both kinds."""

    def gradients(a, b):
        with tf.GradientTape() as outer:
            outer.watch([a, b])
            with tf.GradientTape() as tape:
                tape.watch([a, b])
                loss = tf.reduce_sum(fn(a, b) ** 3)
            da, db = tape.gradient(loss, [a, b])
            squares = tf.reduce_sum(da * da) + tf.reduce_sum(db * db)
        return tuple(outer.gradient(squares, [a, b]))

    return gradients


def test_the_gradients_have_gradients():
    args = (0.3 * floats(8, 4), 0.3 * floats(4, 16))
    got, _ = run_sharded(_second_gradients(_looped), args, MESH)
    want = run_single(_second_gradients(lambda a, b: a @ b), args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@refuses(ShardingError,
    ("IK->I", {}, "expected an equation of two operands"),
    ("IKL,KJ->IJ", {}, "letter 'L' has to be in two of the three terms"),
    ("IIK,KJ->IJ", {}, "letter 'I' has to be in two .* not twice in one"),
    ("IK,KJ->IJ", {"letters": "IK"}, "letters has 'K', which has to be in rhs and the result alone: one of"),
    ("IK,KJ->IJ", {"axis": "e"}, "has no axis 'e'"),
    ("IK,KJ->IJ", {"shape": (15, 4)}, "dimension 0 of shape .15, 4. has 15 elements, not a multiple"),
)  # fmt: skip
def test_what_cannot_be_looped_raises(equation, kwargs):
    shape, axis = kwargs.pop("shape", (8, 4)), kwargs.pop("axis", "d")
    with use_mesh(MESH):
        looped_einsum(equation, tf.ones(shape), tf.ones([4, 8]), axis, **kwargs)
