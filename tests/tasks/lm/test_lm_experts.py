"""The language model with experts: which layers have them; its step sharded, in stages and step by step.

Letters: B row, T time, E expert, L layer.
"""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_steps, compare_steps
from refusals import refuses

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.layers import masks
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

SIZES = "task.vocab_size=40;input.target_vocab_size=40;input.target_length=8;task.num_groups=8"
EXPERTS = (
    "task.num_experts=4;task.expert_hidden_dim=24;task.dense_first_layers=1;task.moe_every=2;task.num_layers=5;"
    "task.moe.router=top_k;task.moe.router.balance_bias=0.1;task.moe.num_shared_experts=1"
)


def _experiment(*overrides):
    params = registry.GetParams("lm.Tiny", ";".join((SIZES, EXPERTS, *overrides)))
    return params, params.task.Instantiate(), params.input.Instantiate()


def test_every_nth_layer_after_the_dense_ones_has_experts():
    _, model, _ = _experiment()
    shapes = {s.path: s.shape for s in model.VariableSpecs().Flatten()}
    assert shapes["lm.decoder.first.body.layers_0.ffn.wi"] == (1, 16, 32)
    assert shapes["lm.decoder.blocks.body.layers_0.ffn.wi"] == (2, 16, 32)
    assert shapes["lm.decoder.blocks.body.layers_1.ffn.experts.wi"] == (2, 4, 16, 24)
    assert shapes["lm.decoder.blocks.body.layers_1.ffn.shared_experts.wi"] == (2, 16, 24)
    assert model.MetricLayers() == {"moe/decoder": ["layer_2", "layer_4"]}
    parts = model.FlopsByPart(NestedMap(ids=np.zeros((8, 8))))
    assert set(parts) == {"decoder.self_atten", "decoder.ffn", "decoder.moe", "softmax"}
    with pytest.raises(ParamError, match="num_layers=6: must be a multiple of 2, after which"):
        _experiment("task.num_layers=6")


# The parts of DeepSeek-V3, its head for the token after the next included.
LATENT = (
    "task.attention=latent;task.attention.rank=6;task.attention.turned_dim=4;task.attention.query_rank=5;"
    "task.position=yarn;task.position.mscale_all=1.0;task.norm=rms;task.multi_token_weight=0.3;"
    "task.moe.router.gate=sigmoid;task.moe.router.expert_groups=2;task.dropout=0.0;task.optimizer=sgd"
)
# Those of Llama 4 and gpt-oss, as far as they go together.
WINDOWS = (
    "task.num_kv_heads=1;task.attention=extended;task.attention.window=3;task.attention.sinks=True;"
    "task.attention.biases=True;task.attention.qk_norm=head;task.nth_attention=extended;"
    "task.nth_attention.use_positions=False;task.nth_attention.temperature_length=2;task.position=rotary;"
    "task.activation=clamped_swiglu;task.moe.num_shared_experts=0;task.moe.experts.biases=True;"
    "task.moe.router.logit_bias=True;task.moe.router.k=1;task.moe.gate_inputs=True;task.dropout=0.0;"
    "task.optimizer=sgd;task.moe.dispatcher=dropless"
)


STAGES = "task.pipeline.stages=2;task.pipeline.micro_batches=2;task.pipeline.schedule=gpipe"
# Of 8 tokens; the plain step computes attention at once.
BLOCKS = "task.attention_block=3"


@pytest.mark.slow
def test_a_step_in_stages_over_devices_is_the_plain_step():
    """The auxiliary loss, its metrics by layer and the next balance bias are among what is compared; SGD's velocities
    are the gradients."""
    changes = f"{LATENT};task.moe_every=1;task.num_layers=3"
    sharding = "task.activation_split={'B': 'model', 'G': 'model', 'E': 'model'};task.weight_split={'E': 'model'}"
    _, plain, inputs = _experiment(changes)
    step = train_step(_experiment(changes, BLOCKS, sharding, STAGES)[1], inputs)
    compare_steps(step, train_step(plain, inputs, 2), plain, inputs, "stage:2,model:2")


def test_a_step_with_heads_and_experts_over_devices_is_that_of_one():
    inside = "'N': 'model', 'H': 'model', 'V': 'model'"
    rows = "('data', 'expert')"
    sharding = (
        f"task.activation_split={{'B': {rows}, 'G': {rows}, 'E': 'expert', {inside}}};"
        f"task.weight_split={{'E': 'expert', {inside}}}"
    )
    _, plain, inputs = _experiment(WINDOWS)
    step = train_step(_experiment(WINDOWS, BLOCKS, sharding)[1], inputs)
    mesh = "data:2,expert:2,model:2"
    collectives = compare_steps(step, train_step(plain, inputs), plain, inputs, mesh)
    # In the loops over two blocks: numbers of rows and rows to the experts, rows back; the first two again, since the
    # backward pass computes a block again; the gradients of both.
    assert collectives["all-to-all"] == 7


def test_the_head_predicts_the_token_after_the_next_of_the_same_text():
    """Each pair of tokens of a text costs the logarithm of the number of tokens if all are equally probable."""
    _, model, inputs = _experiment(LATENT)
    batch = model.SampleBatch(inputs, np.random.RandomState(0))
    with use_mesh(single_device()):
        theta = model.InitTheta(make_seed(0, 0))
        batch = batch.Transform(tf.constant)
        weights = NestedMap(theta, multi_token=theta.multi_token.Transform(tf.zeros_like))
        _, metrics = model.FProp(weights, batch)
    real = batch.segment_ids.numpy() > 0
    pairs = real[:, :-1] & (batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]).numpy()
    np.testing.assert_allclose(
        metrics.multi_token_nll, np.log(40) * pairs.sum() / real.sum(), rtol=1e-5
    )


def test_experts_grow_out_of_dense_layers_of_every_kind():
    """The first layers, the dense ones of blocks and the second head's layer among them: the loss stays."""
    same = "task.expert_hidden_dim=0;task.moe.num_shared_experts=0;task.multi_token_weight=0.3"
    _, large, inputs = _experiment(same)
    differ = large.GrowsFrom(large.p)
    small = large.p.Copy().Set(**differ).Instantiate()
    batch = large.SampleBatch(inputs, np.random.RandomState(0)).Transform(tf.constant)
    with use_mesh(single_device()):
        before = small.InitTheta(make_seed(0, 0))
        after = large.Grow(before, large.InitTheta(make_seed(1, 0)))
        (_, old), (_, new) = (m.FProp(t, batch) for m, t in ((small, before), (large, after)))
    for name in ("nll", "multi_token_nll"):
        np.testing.assert_allclose(new[name], old[name], rtol=1e-5)


def test_steps_over_a_cache_give_the_rows_of_the_whole_pass():
    _, model, _ = _experiment()
    with use_mesh(single_device()):
        theta = model.InitTheta(make_seed(0, 0)).decoder
        x = tf.constant(np.random.RandomState(0).randn(2, 6, 16), tf.float32)
        ones, at = tf.ones([2, 6], tf.int32), tf.tile(tf.range(6)[tf.newaxis], [2, 1])
        mask = masks.causal_segment_mask(ones, at)
        aux = NestedMap(self_mask=mask, paddings=tf.zeros([2, 6]))
        whole, _ = model.decoder.FProp(theta, x, aux)
        cache = model.decoder.InitCache(2, 6)
        assert len(cache) == 3  # the first layer, then blocks of two

        def step(x, cache, time, mask):
            return model.decoder.ExtendStep(theta, x, cache, time, NestedMap(self_mask=mask))

        assert_steps(step, x, cache, mask, whole)


@refuses(
    ValueError,
    (f"{BLOCKS};task.attention_dropout=0.1", "attention_block=3: blocks have no dropout"),
    ("task.attention=latent;task.num_kv_heads=1", "num_kv_heads=1: has no effect with Latent"),
    ("task.moe.gate_inputs=True", "gate_inputs=True: .* gives a token 2 experts; choose"),
    ("task.moe.router.expert_groups=3", "expert_groups=3: 4 experts do not fall into"),
    ("task.moe.router.expert_groups=4", "groups_per_token=1: 2 experts .* from 2 to 4 groups"),
    ("task.moe.experts.biases=True", "shared experts have none; set num_shared_experts=0"),
    ("task.position=llama3;task.position.high_turns=0.5", "high_turns=0.5: must be at least"),
    ("task.position=yarn;task.position.fast_turns=0.5", "fast_turns=0.5: must be at least"),
)
def test_parts_that_do_not_go_together_are_refused(override):
    _experiment(override)
