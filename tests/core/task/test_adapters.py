"""Low-rank adapters: nothing changes at first, they alone are trained, and merged weights compute the same."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.task.adapters import merged, scale_of

SIZES = (
    "task.model_dim=8;task.hidden_dim=8;task.num_layers=1;task.num_heads=2;task.key_dim=4;task.vocab_size=16;"
    "input.target_vocab_size=16;input.batch_size=2;input.target_length=8;task.dropout=0;task.num_groups=1;task.num_experts=2;task.moe_every=1;"
    "task.label_smoothing=0;task.repeat=False;task.moe.router=top_k;task.moe.dispatcher=dropless"
)
ADAPTED = (
    ";task.adapter_rank=3;task.adapter_alpha=6;task.adapter_weights=self_atten\\.[qo]$|experts\\.wo"
)


@pytest.fixture(scope="module")
def step():
    """The parameters, the task, a state with random adapters, a batch, and the state after a step."""
    params = registry.GetParams("lm.Tiny", SIZES + ADAPTED)
    task = params.task.Instantiate()
    rng = np.random.RandomState(0)
    with use_mesh(single_device()):
        state = tf.function(task.InitState)(tf.constant(0))
        for adapter in state.theta.adapters.values():
            adapter.b = tf.constant(rng.normal(size=adapter.b.shape), tf.float32)
        batch = task.SampleBatch(params.input.Instantiate(), rng).Transform(tf.constant)
        after, metrics = tf.function(task.TrainStep)(state, batch)
    return params, task, state, batch, after, metrics


def _gradients(task, theta, batch):
    @tf.function
    def run():
        return task.Differentiate(theta, lambda: task.FProp(theta, batch))[::2]

    return run()


def _plain(params):
    task = params.task.Copy()
    task.adapter_rank = 0
    return task.Instantiate()


def test_adapters_begin_without_effect_and_have_the_products_shapes(step):
    params, task, *_ = step
    theta = tf.function(task.InitTheta)(tf.constant([0, 0]))
    without = merged(theta.Transform(lambda x: x.numpy()), scale_of(params.task))
    for path, values in without.FlattenItems():
        np.testing.assert_array_equal(values, theta.GetItem(path))
    shapes = {name: (tuple(x.a.shape), tuple(x.b.shape)) for name, x in theta.adapters.items()}
    assert len(shapes) == 3
    q, o = (f"decoder_blocks_body_layers_0_self_atten_{name}" for name in "qo")
    assert shapes[q] == ((1, 8, 3), (1, 3, 8)) and shapes[o] == ((1, 8, 3), (1, 3, 8))


def test_a_step_changes_adapters_alone_by_the_gradients_of_merged_weights(step):
    params, task, state, batch, after, _ = step
    for path, before in state.theta.FlattenItems():
        same = np.array_equal(before, after.theta.GetItem(path))
        assert same is not path.startswith("adapters."), path
    assert sum(1 for path, _ in state.slots.FlattenItems() if not path.startswith("adapters")) == 0
    scale, plain = scale_of(params.task), _plain(params)
    weights = merged(state.theta.Transform(lambda x: x.numpy()), scale).Transform(tf.constant)
    with use_mesh(single_device()):
        loss, dense = _gradients(plain, weights, batch)
        ours, grads = _gradients(task, state.theta, batch)
    np.testing.assert_allclose(ours, loss, rtol=1e-5)
    for path, grad in dense.FlattenItems():
        name = "".join(c if c.isalnum() else "_" for c in path).replace("__", "_")
        if name in state.theta.adapters:
            a, b = (state.theta.adapters[name][part].numpy() for part in "ab")
            flat = grad.numpy().reshape(*a.shape[:-1], b.shape[-1])
            expected = scale * flat @ np.swapaxes(b, -1, -2), scale * np.swapaxes(a, -1, -2) @ flat
            np.testing.assert_allclose(grads.adapters[name].a, expected[0], atol=1e-5)
            np.testing.assert_allclose(grads.adapters[name].b, expected[1], atol=1e-5)


def test_a_pattern_that_no_weight_has_is_refused():
    params = registry.GetParams("lm.Tiny", SIZES + ADAPTED)
    params.task.adapter_weights = "nothing"
    with pytest.raises(ParamError, match=r"matches none of decoder\.blocks"):
        params.task.Instantiate().VariableSpecs()
    params.task.adapter_weights = "("
    with pytest.raises(ParamError, match="is no regular expression"):
        params.task.Instantiate().VariableSpecs()
