"""Parts of layers in a language model and in translation: which layers have experts; the step sharded, in stages and
token by token.

Letters: B row, T time, E expert, L layer.
"""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, compare_steps
from refusals import refuses

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

LM, MT = "lm.Tiny", "mt.M4Tiny"
SIZES = {
    LM: "task.vocab_size=40;input.target_vocab_size=40;input.target_length=8;task.num_groups=8",
    MT: "task.source_vocab_size=44;task.target_vocab_size=40;input.source_vocab_size=44;input.target_vocab_size=40;"
    "input.source_length=12;input.target_length=8;task.num_groups=8;task.moe.dispatcher=index",
}
EXPERTS = (
    "task.num_experts=4;task.expert_hidden_dim=24;task.dense_first_layers=1;task.moe_every=2;"
    "task.moe.router=top_k;task.moe.router.balance_bias=0.1;task.moe.num_shared_experts=1"
)
BOTH = pytest.mark.parametrize("model", [LM, MT])


def _experiment(model, *overrides, layers=5):
    override = ";".join((SIZES[model], EXPERTS, *filter(None, overrides)))
    numbers = {LM: ("num_layers",), MT: ("num_encoder_layers", "num_decoder_layers")}[model]
    override += "".join(f";task.{number}={layers}" for number in numbers)
    params = registry.GetParams(model, override)
    return params, params.task.Instantiate(), params.input.Instantiate()


@BOTH
def test_every_nth_layer_after_the_dense_ones_has_experts(model):
    _, task, inputs = _experiment(model)
    shapes = {s.path.partition(".")[2]: s.shape for s in task.VariableSpecs().Flatten()}
    for stack in task.STACKS:
        assert shapes[f"{stack.name}.first.body.layers_0.ffn.wi"] == (1, 16, 32)
        body = f"{stack.name}.blocks.body"
        assert shapes[f"{body}.layers_0.ffn.wi"] == (2, 16, 32)
        assert shapes[f"{body}.layers_1.ffn.experts.wi"] == (2, 4, 16, 24)
        assert shapes[f"{body}.layers_1.ffn.shared_experts.wi"] == (2, 16, 24)
        assert task.MetricLayers()[f"moe/{stack.name}"] == ["layer_2", "layer_4"]
    flops = task.Costs().FlopsByPart(inputs.BatchSpec())
    parts = {
        f"{stack.name}.{part}" for stack in task.STACKS for part in ("self_atten", "ffn", "moe")
    }
    assert flops.keys() == parts | ({"decoder.cross_atten"} if model == MT else set()) | {"softmax"}
    with pytest.raises(ParamError, match="layers=6: must be a multiple of 2, after which"):
        _experiment(model, layers=6)


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


# Those of Marian, T5 and fairseq, as far as they go together.
OTHER = (
    "task.norm_place=after;task.embedding_scale=1.0;task.softmax_scale=0.4;task.position.offset=2"
)

STAGES = "task.pipeline.stages=2;task.pipeline.micro_batches=2;task.pipeline.schedule=gpipe"
# Of 8 tokens; the plain step computes attention at once.
BLOCKS = "task.attention_block=3"


@pytest.mark.slow
@BOTH
def test_a_step_in_stages_over_devices_is_the_plain_step(model):
    """The auxiliary loss, its metrics by layer and the next balance bias are among what is compared; SGD's velocities
    are the gradients. Translation has no first layers in stages."""
    first = 1 if model == LM else 0
    changes = f"{LATENT};task.moe_every=1;task.dense_first_layers={first}"
    sharding = "task.activation_split={'B': 'model', 'G': 'model', 'E': 'model'};task.weight_split={'E': 'model'}"
    _, plain, inputs = _experiment(model, changes, layers=2 + first)
    staged = _experiment(model, changes, BLOCKS, sharding, STAGES, layers=2 + first)[1]
    step = train_step(staged, inputs)
    compare_steps(step, train_step(plain, inputs, 2), plain, inputs, "stage:2,model:2")


@pytest.mark.slow
@BOTH
def test_a_step_with_heads_and_experts_over_devices_is_that_of_one(model):
    inside = "'N': 'model', 'H': 'model', 'V': 'model'"
    rows = "('data', 'expert')"
    sharding = (
        f"task.activation_split={{'B': {rows}, 'G': {rows}, 'E': 'expert', {inside}}};"
        f"task.weight_split={{'E': 'expert', {inside}}}"
    )
    _, plain, inputs = _experiment(model, WINDOWS, layers=3)
    step = train_step(_experiment(model, WINDOWS, BLOCKS, sharding, layers=3)[1], inputs)
    mesh = "data:2,expert:2,model:2"
    collectives = compare_steps(step, train_step(plain, inputs), plain, inputs, mesh)
    # In the loops over blocks: numbers of rows and rows to the experts, rows back; the first two again, since the
    # backward pass computes a block again; the gradients of both.
    assert collectives["all-to-all"] == 7 * len(plain.STACKS)


@BOTH
def test_the_head_predicts_the_token_after_the_next_of_the_same_text(model):
    """Each pair of tokens of a text costs the logarithm of the number of tokens if all are equally probable."""
    _, task, inputs = _experiment(model, LATENT, layers=3)
    batch = task.SampleBatch(inputs, np.random.RandomState(0))
    with use_mesh(single_device()):
        theta = task.InitTheta(make_seed(0, 0))
        batch = batch.Transform(tf.constant)
        weights = NestedMap(theta, multi_token=theta.multi_token.Transform(tf.zeros_like))
        _, metrics = task.FProp(weights, batch)
    segments = task.STACKS[-1].Row(batch).segment_ids.numpy()
    pairs = (segments > 0)[:, :-1] & (segments[:, 1:] == segments[:, :-1])
    want = np.log(40) * pairs.sum() / (segments > 0).sum()
    np.testing.assert_allclose(metrics.multi_token_nll, want, rtol=1e-5)


@BOTH
def test_experts_grow_out_of_dense_layers_of_every_kind(model):
    """The first layers, the dense ones of blocks and the second head's layer among them: the loss stays."""
    same = "task.expert_hidden_dim=0;task.moe.num_shared_experts=0;task.multi_token_weight=0.3"
    _, large, inputs = _experiment(model, same)
    small = large.p.Copy().Set(**large.GrowsFrom(large.p)).Instantiate()
    batch = large.SampleBatch(inputs, np.random.RandomState(0)).Transform(tf.constant)
    with use_mesh(single_device()):
        before = small.InitTheta(make_seed(0, 0))
        after = large.Grow(before, large.InitTheta(make_seed(1, 0)))
        (_, old), (_, new) = (m.FProp(t, batch) for m, t in ((small, before), (large, after)))
    for name in ("nll", "multi_token_nll"):
        np.testing.assert_allclose(new[name], old[name], rtol=1e-5)


@BOTH
@pytest.mark.parametrize("parts", [LATENT, WINDOWS, OTHER], ids=["latent", "windows", "other"])
def test_steps_of_decoding_give_what_the_whole_pass_gives(model, parts):
    more = {LATENT: "task.tied_softmax=False", OTHER: "task.norm_place=both"}.get(parts, "")
    if (model, parts) == (MT, OTHER):
        more = "task.source_vocab_size=40;input.source_vocab_size=40;task.shared_embedding=True"
    _, task, inputs = _experiment(model, parts, more, layers=3)
    batch = task.SampleBatch(inputs, np.random.RandomState(0))
    for row in batch.values() if model == MT else [batch]:
        row.segment_ids = np.ones_like(row.ids)
        row.segment_pos = np.tile(np.arange(row.ids.shape[1], dtype=np.int32), (len(row.ids), 1))
    batch = batch.Transform(lambda x: tf.constant(x[:2]))
    row = task.STACKS[-1].Row(batch)
    with use_mesh(single_device()):
        theta = task.InitTheta(make_seed(0, 0))
        whole, _ = task.LogProbs(theta, batch)
        rows, length = row.ids.shape
        if model == MT:
            cache = task.InitCache(theta, task.Encode(theta, batch.src), 1, length)
        else:
            cache = task.InitCache(rows, length)
        steps = []
        for t in range(length):
            mask = tf.tile(tf.range(length)[tf.newaxis, tf.newaxis] <= t, [rows, 1, 1])
            ids = row.ids[:, t : t + 1]
            logits, cache = task.ExtendStep(theta, ids, cache, tf.constant(t), mask)
            log_probs = tf.nn.log_softmax(logits)
            steps.append(tf.gather(log_probs, row.labels[:, t : t + 1], batch_dims=2))
    assert_same(tf.concat(steps, 1), whole, tol=2e-5)


@refuses(
    ValueError,
    (f"{BLOCKS};task.attention_dropout=0.1", "attention_block=3: blocks have no dropout"),
    ("task.attention=latent;task.num_kv_heads=1", "num_kv_heads=1: has no effect with Latent"),
    ("task.moe.gate_inputs=True", "gate_inputs=True: .* gives a token 2 experts; choose"),
    ("task.moe.router.expert_groups=3", "expert_groups=3: 4 experts do not fall into"),
    ("task.moe.router.expert_groups=4", "groups_per_token=1: 2 experts .* from 2 to 4 groups"),
    ("task.position=llama3;task.position.high_turns=0.5", "high_turns=0.5: must be at least"),
    ("task.position=yarn;task.position.fast_turns=0.5", "fast_turns=0.5: must be at least"),
)
@BOTH
def test_parts_that_do_not_go_together_are_refused(override, model):
    _experiment(model, override)


def test_first_layers_with_cross_attention_are_in_no_stage():
    with pytest.raises(ParamError, match="dense_first_layers=1: first layers with cross-attention"):
        _experiment(MT, STAGES)
