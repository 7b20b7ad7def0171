"""Weights of different shapes in packed variables: initial values, optimizers, and the way back."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same
from pipeline_toys import SIZES, WithExtras, cells, make
from slots import init_slots

from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adam import AdamW
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.core.pipeline.cells import FeatureExtractionLayer
from lingvo_moe.core.pipeline.layers import PipeliningLayer, SeqLayer
from lingvo_moe.core.pipeline.stage_vectors import by_path, from_paths
from lingvo_moe.core.sharding import Mesh

SEED = np.array([1, 2], np.int32)
STAGES = {"weight_split": {"Z": "stage"}}


@pytest.fixture(scope="module")
def plain():
    return make(SeqLayer, WithExtras)


@pytest.fixture(scope="module")
def pipelined():
    return make(PipeliningLayer, WithExtras, **STAGES)


def test_a_stage_has_the_weights_of_its_cell_and_no_others(pipelined):
    specs = pipelined.VariableSpecs()
    assert sorted(specs) == ["after", "before", "cells"]
    shapes = {name: spec.shape for name, spec in specs.cells.items()}
    largest = max(a * b for a, b in itertools.pairwise(SIZES))
    assert shapes == {
        "float32_2d": (4, largest),
        "float32_1d": (4, max(SIZES[1:])),
        "float32_state": (4, max(SIZES[:-1])),
    }
    for spec in specs.cells.Flatten():
        assert spec.letters == "ZF" and spec.split == ("stage", None)
        for k, row in enumerate(spec.packs):
            assert {part.path.split(".")[1] for part in row} == {f"c{k}"}
    assert not specs.cells.float32_state.trainable


def test_initial_values_are_those_without_a_pipeline(plain, pipelined):
    """The stages run one after another, or each on its own devices."""
    want = by_path(plain.VariableSpecs(), run_single(plain.InitTheta, [SEED]))
    in_turn = make(PipeliningLayer, WithExtras)
    at_once, collectives = run_sharded(pipelined.InitTheta, [SEED], Mesh.parse("stage:4,data:2"))
    assert not collectives["all-gather"]
    for layer, theta in ((in_turn, run_single(in_turn.InitTheta, [SEED])), (pipelined, at_once)):
        found = by_path(layer.VariableSpecs(), theta)
        assert sorted(found) == sorted(want)
        for path, value in want.items():
            np.testing.assert_array_equal(found[path], value, err_msg=path)


def _as_two_stages(path):
    """The path of a variable of four cells where two of them are a stage: seq.c3.w is seq.d1.c3.w."""
    name = path.split(".")[1]
    return path.replace(name, f"d{int(name[1]) // 2}.{name}") if name[0] == "c" else path


@pytest.mark.parametrize("kind", [np.asarray, tf.constant])
def test_theta_goes_from_one_pipeline_to_another_and_back(plain, pipelined, kind):
    specs = plain.VariableSpecs()
    theta = run_single(plain.InitTheta, [SEED]).Transform(kind)
    packed = from_paths(pipelined.VariableSpecs(), by_path(specs, theta))
    values = by_path(pipelined.VariableSpecs(), packed)
    pairs = [
        FeatureExtractionLayer.Params().Set(name=f"d{j}", sub=cells(WithExtras)[2 * j : 2 * j + 2])
        for j in range(2)
    ]
    two = make(PipeliningLayer, cell_tpl=pairs)
    other = from_paths(
        two.VariableSpecs(), {_as_two_stages(path): value for path, value in values.items()}
    )
    assert other.cells.float32_2d.shape == (2, 35 + 21)
    values = by_path(two.VariableSpecs(), other)
    back = from_paths(specs, {path: values[_as_two_stages(path)] for path in by_path(specs, theta)})
    for (path, found), (_, want) in zip(back.FlattenItems(), theta.FlattenItems()):
        np.testing.assert_array_equal(found, want, err_msg=path)
        assert isinstance(found, tf.Tensor) == (kind is tf.constant)


@pytest.mark.parametrize("optimizer", [
    Sgd.Params().Set(weight_decay=0.1, decay_include=["*.b"], decay_exclude=["*.w"]),
    AdamW.Params().Set(weight_decay=0.1, decay_min_dims=1),
], ids=["sgd", "adamw"])  # fmt: skip
def test_optimizers_update_packed_weights_as_they_do_others(plain, pipelined, optimizer):
    optimizer = optimizer.Instantiate()
    rng = np.random.RandomState(0)
    specs = plain.VariableSpecs()

    def update(layer_specs, theta, grads):
        slots = init_slots(optimizer, layer_specs, tf.constant(SEED), theta)
        for step in range(2):
            state = NestedMap(theta=theta, slots=slots, step=tf.constant(step))
            theta, slots, metrics = optimizer.Update(state, grads, layer_specs, 1.0)
        return (
            by_path(layer_specs, theta),
            by_path(optimizer.SlotSpecs(layer_specs), slots),
            metrics,
        )

    theta = plain.InitTheta(tf.constant(SEED))
    grads = specs.Transform(lambda s: tf.constant(rng.randn(*s.shape), tf.float32))
    want = update(specs, theta, grads)
    packed_specs = pipelined.VariableSpecs()
    packed = [from_paths(packed_specs, by_path(specs, tree)) for tree in (theta, grads)]
    found = update(packed_specs, *packed)
    assert_same(found, want, 1e-6, floor=0.1)
