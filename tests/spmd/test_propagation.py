"""The reach of a few annotations (paper, section 3.2): the MoE layer by the paper's three, and small cases.

What is compared is every collective of the compiled program, by kind and bytes.

Letters: G group, S token in group, E expert, C capacity slot, M model, H hidden.
"""

import numpy as np
import pytest
import tensorflow as tf
import toy_moe
from spmd_case import floats

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, replicate, single_device, split, use_mesh

pytestmark = pytest.mark.slow  # in all

D = 8
G, S, E, C, M, H = 8, 24, 16, 2, 8, 24
MESH = Mesh.parse(f"d:{D}")

# The paper's annotations, by the names that `algorithm_2` gives them.
THREE = ("inputs 0", "wg", "dispatched 0")
# Its dispatch einsum, sharded along G before it is sharded along E, and what the combining einsum takes.
TWO_MORE = ("dispatched 1", "outputs 0")
# Also where the experts leave their outputs, if nothing says how the weights lie.
ONE_MORE = ("outputs 1",)


@pytest.fixture(scope="module")
def layer() -> MoELayer:
    sizes = {"model_dim": M, "hidden_dim": H, "num_experts": E, "num_groups": G}
    splits = {"activation_split": {"B": "d", "G": "d", "E": "d"}, "weight_split": {"E": "d"}}
    return toy_moe.layer(dispatcher="einsum", **sizes, **splits)


def _args(layer: MoELayer) -> tuple[list, list]:
    """Returns the arguments, and their shardings in training."""
    with use_mesh(single_device()):
        theta = layer.InitTheta(make_seed(0, 0))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(G, S, M)).astype(np.float32)
    paddings = (rng.random((G, S)) < 0.2).astype(np.float32)
    splits = [layer.VariableSpecs(), ("d", None, None), ("d", None), None]
    return [theta, x, paddings, np.array([3, 4], np.int32)], splits


def algorithm_2(layer: MoELayer, annotations: tuple[str, ...]):
    """The paper's program, lines 1 to 8, annotated only at `annotations`: a tensor and a dimension of it.

    The router's and the dispatcher's own annotations are left out by `bare`.
    """

    def at(name, t):
        for dim in reversed(range(t.shape.rank)):
            t = split(t, dim, D) if f"{name} {dim}" in annotations else t
        return t

    def forward(theta, x_GSM, paddings_GS, seed):
        inputs = at("inputs", x_GSM)
        wg = replicate(theta.router.wg) if "wg" in annotations else theta.router.wg
        routing = layer.router.FProp(
            NestedMap(wg=wg), inputs, paddings_GS, C, seed=layer.FoldSeed(seed, "router")
        )
        dispatch_mask = layer.dispatcher._Mask(routing, routing.kept, tf.float32)
        combine_weights = layer.dispatcher._Mask(routing, routing.gate, tf.float32)
        dispatched = at("dispatched", tf.einsum("GSEC,GSM->EGCM", dispatch_mask, inputs))
        h = tf.nn.relu(tf.einsum("EGCM,EMH->EGCH", dispatched, theta.experts.wi))
        outputs = at("outputs", tf.einsum("EGCH,EHM->GECM", h, theta.experts.wo))
        return tf.einsum("GSEC,GECM->GSM", combine_weights, outputs)

    return forward


def gradients(forward):
    def run(theta, x, paddings, seed):
        variables = [x, *theta.Flatten()]
        with tf.GradientTape() as tape:
            tape.watch(variables)
            y = forward(theta, x, paddings, seed)
            loss = tf.reduce_sum(y * tf.sin(x))
        return tuple(tape.gradient(loss, variables))

    return run


def measure(fn, args, splits):
    """Results, and (kind, bytes) of all collectives."""
    got, found = run_sharded(fn, args, MESH, splits)
    return got, sorted((c.kind, c.num_bytes) for c in parse_collectives(found.hlo))


@pytest.fixture(scope="module")
def full(layer):
    """The annotated layer, its arguments as in training: (arguments, splits, [(results, collectives) of
    the forward program, the same of the gradient program])."""
    args, splits = _args(layer)

    def forward(theta, x, paddings, seed):
        return layer.FProp(theta, x, paddings, seed=seed)[0]

    programs = [measure(fn, args, splits) for fn in (forward, gradients(forward))]
    return args, splits, programs


@pytest.fixture
def bare(monkeypatch):
    """Disables all annotations of layers."""
    monkeypatch.setattr(BaseLayer, "Shard", lambda self, x, letters: x)


def compare(layer, full, annotations) -> list[list[tuple[str, int]] | None]:
    """Compares the forward and the gradient program: None where it communicates as the annotated layer does,
    else what it does. Values and gradients have to be the same in any case."""
    args, splits, programs = full
    forward = algorithm_2(layer, annotations)
    differences: list[list[tuple[str, int]] | None] = []
    for fn, (want, collectives) in zip((forward, gradients(forward)), programs, strict=True):
        got, found = measure(fn, args, splits)
        for g, w in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
        differences.append(None if found == collectives else found)
    return differences


def test_the_annotated_layer_moves_slots_and_sums_the_gating_gradient(full):
    _, _, [(_, forward), (_, backward)] = full
    slots = ("all-to-all", 4 * E * C * M)
    assert forward == [slots] * 2
    assert backward == [("all-reduce", 4 * M * E), *[slots] * 4]


def test_the_papers_three_annotations_do_not_suffice(layer, full, bare):
    """XLA takes the sharding along E back through the dispatch einsum: it gathers tokens and sums their whole."""
    forward, backward = compare(layer, full, THREE)
    tokens = 4 * G * S * M
    assert forward is not None and backward is not None
    assert ("all-gather", tokens) in forward
    assert ("all-reduce", tokens) in forward
    assert not [kind for kind, _ in forward if kind == "all-to-all"]
    assert ("all-gather", tokens) in backward


FIVE = (*THREE, *TWO_MORE)


def test_five_annotations_suffice(layer, full, bare):
    assert compare(layer, full, FIVE) == [None, None]


def test_replicating_the_gating_weights_may_be_left_out(layer, full, bare):
    assert compare(layer, full, tuple(a for a in FIVE if a != "wg")) == [None, None]


@pytest.mark.parametrize("left_out", TWO_MORE)
def test_neither_of_the_two_can_be_spared(layer, full, bare, left_out):
    assert None not in compare(layer, full, tuple(a for a in FIVE if a != left_out))


def test_weights_that_lie_nowhere_take_a_sixth(layer, full, bare):
    """XLA brings the hidden layer to G instead of the outputs, unless the outputs are sharded along E first."""
    args, _, programs = full
    whole = (args, [None] * 4, programs)
    forward, backward = compare(layer, whole, FIVE)
    assert forward == [("all-to-all", 4 * E * C * M), ("all-to-all", 4 * E * C * H)]
    assert backward is not None
    assert compare(layer, whole, (*FIVE, *ONE_MORE)) == [None, None]


def _kinds(fn, *args):
    got, found = run_sharded(fn, args, MESH)
    for g, w in zip(tf.nest.flatten(got), tf.nest.flatten(run_single(fn, args, MESH)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-4)
    return found


def test_from_an_operand_to_its_users():
    def fn(x, w):
        return tf.tanh(split(x, 0, D) @ w) + tf.reduce_mean(x)

    found = _kinds(fn, floats(16, 32), floats(32, 48))
    assert dict(found) == {}
    assert "f32[2,48]" in found.hlo and "f32[16,48]" not in found.hlo


def test_from_a_result_to_its_operands():
    def fn(x, w):
        return split(tf.tanh(tf.tanh(x * 2.0) @ w), 0, D)

    found = _kinds(fn, floats(16, 32), floats(32, 48))
    assert dict(found) == {}
    assert "f32[2,32]" in found.hlo and "f32[2,48]" in found.hlo and "f32[16,48]" not in found.hlo


def test_into_the_backward_pass():
    """Gradients of activations are sharded as these are, that of the weight is summed over devices."""

    def fn(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            loss = tf.reduce_sum(tf.tanh(split(x, 0, D) @ w) ** 2)
        return tape.gradient(loss, [x, w])

    found = _kinds(fn, floats(16, 32), floats(32, 48))
    sent = [(c.kind, c.num_bytes) for c in parse_collectives(found.hlo)]
    assert sent == [("all-reduce", 4 * 32 * 48)]
    assert "f32[16,48]" not in found.hlo


def test_neighbours_are_cut_alike():

    def fn(x, y):
        y = tf.tanh(y)
        return tf.exp(split(x, 1, D) + y), y * 2.0

    found = _kinds(fn, floats(16, 32), floats(16, 32))
    assert dict(found) == {}
    assert "f32[16,4]" in found.hlo and not [
        line for line in found.hlo.splitlines() if "f32[16,32]" in line and "tanh(" in line
    ]


def test_two_cuts_that_disagree_are_recut_once():
    """Between rows and columns there is one all-to-all, not one at each of the operations in between."""

    def fn(x):
        x = tf.exp(tf.tanh(split(x, 0, D)) * 2.0)
        return split(tf.sin(x + 1.0), 1, D)

    found = _kinds(fn, floats(16, 32))
    assert dict(found) == {"all-to-all": 1}
