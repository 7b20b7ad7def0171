"""task.remat in the translation model with experts: the same step, with fewer products and all-to-alls."""

import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.layers import kept
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh

SIZES = (
    "task.num_encoder_layers=4;task.num_decoder_layers=4;input.batch_size=8;task.num_groups=8;"
    "task.dropout=0.2;task.repeat=True;task.moe.dispatcher=index"
)
CHOSEN = ["dispatched", "returned", "hidden", "experts_hidden"]


def _gradients(remat, args):
    """The gradients of all weights over four devices, and the collectives."""
    params = registry.GetParams("mt.M4Tiny", f"{SIZES};task.remat={remat}")
    task, inputs = params.task.Instantiate(), params.input.Instantiate()
    state, batch = train_step(task, inputs).arg_specs
    if not args:
        with use_mesh(single_device()):
            theta = tf.function(task.InitTheta, autograph=False)(make_seed(3, 0))
        args += [theta, task.SampleBatch(inputs, np.random.RandomState(0))]

    def gradients(theta, batch):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(theta.Flatten())
            loss, _ = task.FProp(theta, batch, seed=make_seed(1, 2))
        grads = tape.gradient(loss, theta.Flatten())
        return NestedMap(loss=loss, grads=[tf.convert_to_tensor(g) for g in grads])

    return run_sharded(gradients, args, Mesh.parse("expert:4"), [state.theta, batch])


def test_what_is_kept_is_neither_computed_nor_sent_again():
    args = []
    want, full = _gradients("full", args)
    got, chosen = _gradients(CHOSEN, args)
    for x, y in zip(got.Flatten(), want.Flatten(), strict=True):
        np.testing.assert_allclose(x, y, 1e-6, 1e-6 * max(np.abs(y).max(), 1e-3))
    # Encoder and decoder: 2 in the forward pass, 2 in what is computed again, 2 in the backward pass.
    assert full["all-to-all"] == 12
    assert chosen["all-to-all"] == 12 - 4
    # Of each block, the first product of the dense layer and both of the experts.
    assert full.hlo.count(" dot(") - chosen.hlo.count(" dot(") == 2 * 3


def _refused(override):
    with pytest.raises(ValueError) as e:
        registry.GetParams("mt.M4Tiny", override).task.Instantiate()
    return str(e.value)


def test_what_is_no_choice_is_refused():
    names = ", ".join(kept.NAMES)
    assert _refused("task.remat=dost").endswith(
        f"task.remat=dost: must be full, dots or a list of names (did you mean 'dots'?); the names are {names}"
    )
    assert "there is no 'hiden' (did you mean 'hidden'?); the names are query, key," in _refused(
        "task.remat=['query', 'hiden']"
    )
    assert "must be full, dots or a list of names, e.g. ['hidden']" in _refused("task.remat=hidden")
    assert "task.repeat=False keeps every activation" in _refused("task.remat=none")
    unrolled = _refused("task.remat=dots;task.repeat=False")
    assert re.fullmatch(
        r"task.remat='dots': has no effect with task.repeat=False, .*; set task.repeat=True, or task.remat=full",
        unrolled,
    )


def test_names_that_no_layer_of_the_model_has_are_refused_when_the_step_is_traced():
    """mt.M4Tiny without experts has none of the names of theirs."""

    def lowered(remat):
        params = registry.GetParams("mt.M4Tiny", f"task.num_experts=0;task.remat={remat}")
        return lower_step(
            train_step(params.task.Instantiate(), params.input.Instantiate()), single_device()
        )

    with pytest.raises(ValueError) as e:
        lowered(["hidden", "returned"])
    assert str(e.value) == (
        "task.remat=['hidden', 'returned']: no layer of this model has 'returned'; the model's names are query, key, "
        "value, attention, hidden, feed_forward"
    )
    lowered(["hidden"])


def test_a_list_is_read_from_text():
    for text in ("['hidden', 'dispatched']", '["hidden","dispatched"]', "[hidden, dispatched]"):
        params = registry.GetParams("mt.M4Tiny", f"task.remat={text}")
        assert params.task.remat == ["hidden", "dispatched"]
        assert (
            registry.GetParams("mt.M4Tiny").FromText(params.ToText()).task.remat
            == params.task.remat
        )
        assert params.task.Instantiate().encoder.blocks.p.remat == ("hidden", "dispatched")
    assert registry.GetParams("mt.M4Tiny", 'task.remat="dots"').task.remat == "dots"


def test_where_repeat_is_open_remat_belongs_to_the_loop():
    task = registry.GetParams("mt.M4Tiny", "task.repeat=auto;task.remat=dots").task
    forms = task.cls.OpenForms(task)
    assert (forms.recomputing.remat, forms.keeping.remat) == ("dots", "full")
    assert task.Instantiate().decoder.blocks.p.remat == kept.PRODUCTS
