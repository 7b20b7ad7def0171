"""Parts of layers in a language model and in translation: which layers have experts; the step sharded, in stages and
token by token; positions that are biases of scores.

Letters: B row, T time, E expert, L layer.
"""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, compare_steps, state_and_batch
from refusals import refuses

from lingvo_moe.core import kernels
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.engine.eager.testing import run_single
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.kernels import tensorflow, xla
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

LM, MT = "lm.Tiny", "mt.M4Tiny"
SIZES = {
    LM: "task.vocab_size=40;input.target_vocab_size=40;input.target_length=8",
    MT: "task.source_vocab_size=44;task.target_vocab_size=40;input.source_vocab_size=44;input.target_vocab_size=40;"
    "input.source_length=12;input.target_length=8",
}
EXPERTS = (
    "task.num_experts=4;task.expert_hidden_dim=24;task.dense_first_layers=1;task.moe_every=2;task.num_groups=8;"
    "task.moe.dispatcher=index;task.moe.router=top_k;task.moe.router.balance_bias=0.1;task.moe.num_shared_experts=1"
)
BOTH = pytest.mark.parametrize("model", [LM, MT])


def _experiment(model, *overrides, layers=5, experts=EXPERTS):
    override = ";".join((SIZES[model], *filter(None, (experts, *overrides))))
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
        assert task.Metrics().Layers()[f"moe/{stack.name}"] == ["layer_2", "layer_4"]
    flops = task.Costs().FlopsByPart(inputs.BatchSpec())
    parts = {
        f"{stack.name}.{part}" for stack in task.STACKS for part in ("self_atten", "ffn", "moe")
    }
    assert flops.keys() == parts | ({"decoder.cross_atten"} if model == MT else set()) | {"softmax"}
    with pytest.raises(ParamError, match="layers=6: must be a multiple of 2, after which"):
        _experiment(model, layers=6)


# The parts of DeepSeek-V3, its head for the token after the next included.
ROUTED = (
    "task.norm=rms;task.multi_token_weight=0.3;task.moe.router.gate=sigmoid;task.moe.router.expert_groups=2;"
    "task.dropout=0.0;task.optimizer=sgd"
)
LATENT = (
    "task.attention=latent;task.attention.rank=6;task.attention.turned_dim=4;task.attention.query_rank=5;"
    f"task.position=yarn;task.position.mscale_all=1.0;{ROUTED}"
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
ALIBI, T5 = "task.position=alibi", "task.position=t5"
OUTSIDE = f"{ALIBI};task.position.cls=type/toy_positions/LogPenalty"
DENSE = "task.num_experts=0"

STAGES = "task.pipeline.stages=2;task.pipeline.micro_batches=2;task.pipeline.schedule=gpipe"
# Of 8 tokens; the plain step computes attention at once.
BLOCKS = "task.attention_block=3"


@pytest.mark.slow
@BOTH
def test_a_step_in_stages_over_devices_is_the_plain_step(model):
    """The auxiliary loss, its metrics by layer and the next balance bias are among what is compared; SGD's velocities
    are the gradients. Routing is random, by seeds of micro-batches and layers. Translation has no first layers in
    stages, and no experts here, since compiling takes long."""
    sharding = "task.activation_split={'B': 'model'}"
    experts, parts, blocks = DENSE, "task.norm=rms;task.dropout=0.0;task.optimizer=sgd", ""
    if model == LM:
        sharding = "task.activation_split={'B': 'model', 'G': 'model', 'E': 'model'};task.weight_split={'E': 'model'}"
        experts, parts, blocks = (
            f"{EXPERTS};task.moe_every=1;task.moe.router.jitter=0.3",
            LATENT,
            BLOCKS,
        )
    layers = 3 if model == LM else 2
    _, plain, inputs = _experiment(model, parts, layers=layers, experts=experts)
    staged = _experiment(model, parts, blocks, sharding, STAGES, layers=layers, experts=experts)[1]
    step = train_step(staged, inputs)
    compare_steps(step, train_step(plain, inputs, 2), plain, inputs, "stage:2,model:2")


@pytest.mark.slow
def test_a_step_with_heads_and_experts_over_devices_is_that_of_one():
    """A language model's is that of one of these two stacks; core/task/test_micro_batches.py has its experts so."""
    inside = "'N': 'model', 'H': 'model', 'V': 'model'"
    rows = "('data', 'expert')"
    sharding = (
        f"task.activation_split={{'B': {rows}, 'G': {rows}, 'E': 'expert', {inside}}};"
        f"task.weight_split={{'E': 'expert', {inside}}}"
    )
    no_first = "task.dense_first_layers=0"
    _, plain, inputs = _experiment(MT, WINDOWS, no_first, layers=2)
    step = train_step(_experiment(MT, WINDOWS, no_first, BLOCKS, sharding, layers=2)[1], inputs)
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
    small = large.p.Copy().Set(**large.Growth(large.p).GrowsFrom()).Instantiate()
    batch = large.SampleBatch(inputs, np.random.RandomState(0)).Transform(tf.constant)
    with use_mesh(single_device()):
        before = small.InitTheta(make_seed(0, 0))
        after = large.Grow(before, large.InitTheta(make_seed(1, 0)))
        (_, old), (_, new) = (m.FProp(t, batch) for m, t in ((small, before), (large, after)))
    for name in ("nll", "multi_token_nll"):
        np.testing.assert_allclose(new[name], old[name], rtol=1e-5)


@BOTH
@pytest.mark.parametrize(
    "parts",
    [LATENT, WINDOWS, OTHER, ALIBI, T5, OUTSIDE],
    ids=["latent", "windows", "other", "alibi", "t5", "outside"],
)
def test_steps_of_decoding_give_what_the_whole_pass_gives(model, parts):
    """First layers, which are in another loop, have the table of the stack too."""
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
    ops = tensorflow if model == MT and "position=" in parts else xla
    with use_mesh(single_device()), kernels.using(ops):
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


def test_tables_are_one_a_stack_or_one_a_layer():
    shapes = {}
    for shared in (True, False):
        shares = f"{T5};task.position.shared={shared}"
        model = _experiment(MT, shares, layers=2, experts=DENSE)[1]
        items = model.VariableSpecs().FlattenItems()
        shapes[shared] = {path: spec.shape for path, spec in items if path.endswith("table")}
        for stack in (model.encoder, model.decoder):
            atten = stack.blocks.body.layers[0].self_atten
            assert atten.position.p.bidirectional == (stack is model.encoder)
    layer = "blocks.body.layers[0].self_atten.position.table"
    tables = {False: (layer, (2, 32, 2)), True: ("position.table", (32, 2))}
    for shared, (path, shape) in tables.items():
        found = {path: shape for path, shape in shapes[shared].items() if "position" in path}
        assert found == {f"{stack}.{path}": shape for stack in ("encoder", "decoder")}


def test_cross_attention_has_the_biases_and_the_scale_of_self_attention():
    more = "task.attention.biases=True;task.attention.score_scale=1"
    model = _experiment(MT, more, layers=2, experts=DENSE)[1]
    layer = model.decoder.blocks.body.layers[0]
    specs = layer.VariableSpecs()
    for name in ("self_atten", "cross_atten"):
        assert layer.children[name].p.score_scale == 1.0
        assert {f"{projection}_bias" for projection in "qkvo"} < specs[name].keys()


@BOTH
def test_a_bias_from_outside_the_package_trains(model):
    _, task, inputs = _experiment(model, OUTSIDE, layers=2, experts=DENSE)
    state, batch = state_and_batch(task, inputs)
    after, metrics = run_single(train_step(task, inputs).fn, [state, batch], jit_compile=False)
    assert np.isfinite(metrics.loss)
    slopes = [
        (before, new)
        for (path, before), (_, new) in zip(
            state.theta.FlattenItems(), after.theta.FlattenItems(), strict=True
        )
        if path.endswith("slope")
    ]
    assert len(slopes) == len(task.STACKS)
    assert all(np.all(before != new) for before, new in slopes)


@pytest.mark.slow
def test_in_stages_the_table_of_all_layers_has_the_gradient_of_the_step_without():
    more, rows = f"{T5};task.optimizer=sgd;task.dropout=0", 'task.activation_split={"B": "data"}'
    stages = "task.pipeline.stages=2;task.pipeline.micro_batches=2"
    _, plain, inputs = _experiment(LM, more, layers=2, experts=DENSE)
    staged = _experiment(LM, more, stages, rows, layers=2, experts=DENSE)[1]
    compare_steps(train_step(staged, inputs), train_step(plain, inputs, 2), plain, inputs)
