"""A loop over layers keeps the activations that `remat` names: same numbers, fewer products in the backward pass."""

import ast
import functools
import pathlib
import re
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, compare, with_gradients
from layer_testing import init, normal, self_aux, set_dropout, single, stack_params, wave

from lingvo_moe.core import kernels, layers, tensors
from lingvo_moe.core.engine.eager.testing import run_single
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.kernels import tensorflow as tensorflow_kernels
from lingvo_moe.core.layers.feed_forward import FeedForward
from lingvo_moe.core.nested_map import flatten
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.vectorized import vectorized

B, T = 4, 6
# The products of a block of two layers that are computed again: each has six with weights and two others. The output of
# the block's last layer is not needed.
RECOMPUTED = 2 * (6 + 2) - 1


def _run(remat=(), rate=0.0, layers=1, ffn=FeedForward):
    """A stack of two blocks of so many layers, and the function that gives its values and gradients."""
    p = set_dropout(stack_params(remat=remat), rate)
    p.Set(block=p.block[:layers])
    for each in p.block:
        each.ffn_tpl.cls = ffn
    layer = p.Instantiate()
    aux = self_aux(np.ones([B, T], int), np.tile(np.arange(T), (B, 1)), causal=True)

    def fn(theta, x):
        return layer.FProp(theta, x, aux, seed=make_seed(1, 2))[0]

    return layer, with_gradients(fn, wave)


def _args(layer):
    return init(layer), normal(0, B, T, 8)


def _recomputed(remat, layers, ffn=FeedForward):
    """The number of products that the backward loop of the program computes again."""
    layer, fn = _run(remat, layers=layers, ffn=ffn)
    run = tf.function(lambda *args: single(fn, *args), jit_compile=True, autograph=False)
    hlo = run.experimental_get_compiler_ir(*_args(layer))(stage="optimized_hlo")
    # What runs on a CPU as one product may be a loop or a call: their names tell which product they are of.
    names = set(re.findall(r'op_name="([^"]*/Einsum)"', hlo))
    return sum("PartitionedCall" not in name and "gradient_tape" not in name for name in names)


@functools.cache
def _plain():
    """A layer with dropout that keeps nothing, its arguments, and what it gives."""
    layer, fn = _run(rate=0.3)
    args = list(_args(layer))
    return layer, args, run_single(fn, args, jit_compile=False)


def test_same_values_and_gradients():
    _, args, want = _plain()
    names = tuple(stack_params().Instantiate().DeclaredKeeps())
    assert names == ("query", "key", "value", "attention", "hidden", "feed_forward")
    got = run_single(_run(names, 0.3)[1], args, jit_compile=False)
    assert_same(got, want, 1e-6, floor=0.0)


def test_same_numbers_with_the_kernels_of_tensorflow():
    def run(remat):
        layer, fn = _run(remat)
        with kernels.using(tensorflow_kernels):
            return tf.function(lambda *args: single(fn, *args), autograph=False)(*_args(layer))

    assert_same(run("dots"), run("full"), 1e-6, floor=0.0)


@pytest.mark.parametrize(("remat", "removed"), [
    (("feed_forward",), 1),  # nothing needs the last layer's
    ("dots", 2 * 6 - 1),
])  # fmt: skip
def test_products_that_are_kept_are_not_computed_again(remat, removed):
    assert _recomputed(remat, 2) == RECOMPUTED - removed


def test_stages_of_a_pipeline_do_not_compute_again_what_is_kept():
    """The work of a stage, all of whose blocks run again in its backward pass, is mapped over the stages."""
    products = []
    for remat in ("full", "dots"):
        layer, fn = _run(remat)
        theta, x = _args(layer)

        def work(*slices, fn=fn, theta=theta):
            return flatten(fn(theta.Pack(list(slices[1:])), slices[0]))

        def stages(*elems, work=work):
            return vectorized(work, "stage", elems)

        specs = [TensorSpec((2, *e.shape), e.dtype.name) for e in (x, *theta.Flatten())]
        products.append(
            lower(stages, specs, Mesh.parse("stage:2,expert:1")).Text().count("dot_general")
        )
    # In each of two functions that differentiate a block; nothing needs its last product's output.
    assert products[0] - products[1] == 2 * (6 - 1)


def test_on_several_devices_each_keeps_its_part():
    layer, args, want = _plain()
    splits = [layer.VariableSpecs(), ("expert", None, None)]
    fn = _run("dots", 0.3)[1]
    _, collectives = compare(fn, args, splits, "expert:4", lambda *_: want)
    assert "f32[2,1,6,16]" in collectives.hlo  # a device's part of the hidden layers
    assert "f32[2,4,6,16]" not in collectives.hlo


def test_an_inner_loop_has_names_of_its_own():
    """A mark belongs to the innermost loop around it."""
    x = tf.constant(1.0)

    def annotate(x, prefix=""):
        return x

    with tensors.collecting(["hidden"]) as outer:
        with tensors.collecting([]) as inner:
            tensors.keep(x, "hidden", annotate)
        tensors.keep(x, "query", annotate)
        tensors.keep(x, "hidden", annotate)
    tensors.keep(x, "hidden", annotate)
    assert (len(outer.values), len(inner.values)) == (1, 0)


class Doubled(FeedForward):
    """A layer of one's own, which keeps one more product."""

    KEEPS: ClassVar = {**FeedForward.KEEPS, "mine": tensors.Kept.PRODUCT}

    def FProp(self, theta, x, paddings, seed=None):
        y, extras = super().FProp(theta, x, paddings, seed)
        mine = self.Keep(tf.einsum("BTM,HM->BTH", x, theta.wo), "mine", "BTH")
        return y + tf.einsum("BTH,MH->BTM", tf.sin(mine), theta.wi), extras


def test_what_a_layer_of_ones_own_declares_is_kept():
    layer, fn = _run(("mine",), ffn=Doubled)
    args = _args(layer)
    want = run_single(_run(ffn=Doubled)[1], args, jit_compile=False)
    assert_same(run_single(fn, args, jit_compile=False), want, 1e-6, floor=0.0)
    assert _recomputed(("mine",), 1, Doubled) == _recomputed((), 1, Doubled) - 1


def _names(path):
    """The names that a file gives to `Keep`, then those of its `KEEPS`."""
    marked, declared = set(), set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            if getattr(node.func, "attr", "") == "Keep":
                marked.add(node.args[1].value)
            if node.args and getattr(node.args[0], "attr", "") == "Keep":  # functools.partial
                marked.update(k.value.value for k in node.keywords if k.arg == "name")
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "KEEPS":
            strings = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
            declared.update(strings)
    return marked, declared


def test_every_declared_name_is_marked():
    """A mark that is not declared is refused when it is traced."""
    root = pathlib.Path(layers.__file__).parents[1]
    marked, declared = (
        set().union(*each) for each in zip(*map(_names, root.rglob("*.py")), strict=True)
    )
    assert marked == declared


def test_errors():
    with pytest.raises(ValueError, match="FeedForward keeps 'mine', which its KEEPS does not"):
        FeedForward.Params().Set(model_dim=8, hidden_dim=8).Instantiate().Keep(None, "mine", "")
    with pytest.raises(ValueError, match=r"remat=\['hidden'\] has no effect with unroll=True"):
        stack_params(remat=("hidden",), repeat=False).Instantiate()
