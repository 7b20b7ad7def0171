"""Translation and language models whose positions are biases of scores: steps, stages, and one of a user's own."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same, compare_steps, state_and_batch

from lingvo_moe.core import kernels
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.eager.testing import run_single
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.kernels import tensorflow, xla
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

OWN = "task.position=alibi;task.position.cls=type/toy_positions/LogPenalty"
# First layers, which are in another loop, have the table of the stack too.
FIRST = "task.position=t5;task.num_experts=2;task.num_groups=2;task.moe_every=1;task.dense_first_layers=1"
SIZES = {
    "lm.Tiny": "task.num_layers=2",
    "mt.M4Tiny": "task.num_experts=0;task.num_encoder_layers=2;task.num_decoder_layers=2",
}


def _experiment(name, *overrides):
    params = registry.GetParams(name, ";".join((SIZES[name], "input.batch_size=4", *overrides)))
    return params.task.Instantiate(), params.input.Instantiate()


def _rows(length):
    """Two rows of one text each."""
    ids, labels = np.random.RandomState(0).randint(3, 200, (2, 2, length)).astype("int32")
    at = np.tile(np.arange(length, dtype="int32"), [2, 1])
    row = {"ids": ids, "labels": labels, "segment_ids": np.ones_like(at), "segment_pos": at}
    return NestedMap(row).Transform(tf.constant)


@pytest.mark.parametrize(("name", "ops"), [("lm.Tiny", xla), ("mt.M4Tiny", tensorflow)])
@pytest.mark.parametrize("position", ["task.position=alibi", "task.position=t5", FIRST, OWN])
def test_steps_of_a_search_give_the_log_probabilities_of_the_pass(position, name, ops):
    model, _ = _experiment(name, position)
    theta = model.InitTheta(make_seed(0, 0))
    row, length = _rows(5), 5
    with use_mesh(single_device()), kernels.using(ops):
        if name.startswith("lm"):
            want, _ = model.LogProbs(theta, row)
            cache = model.InitCache(2, length)
        else:
            src = _rows(4)
            want, _ = model.LogProbs(theta, NestedMap(src=src, tgt=row))
            cache = model.InitCache(theta, model.Encode(theta, src), 1, length)
        for t in range(length):
            mask = tf.tile(tf.range(length)[tf.newaxis, tf.newaxis] <= t, [2, 1, 1])
            ids = row.ids[:, t : t + 1]
            logits, cache = model.ExtendStep(theta, ids, cache, tf.constant(t), mask)
            log_probs = tf.nn.log_softmax(logits[:, 0])
            got = tf.gather(log_probs, row.labels[:, t], batch_dims=1)
            assert_same(got, want[:, t], tol=1e-4)


def test_tables_are_one_a_stack_or_one_a_layer():
    shapes = {}
    for shared in (True, False):
        model, _ = _experiment("mt.M4Tiny", f"task.position=t5;task.position.shared={shared}")
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
    model, _ = _experiment("mt.M4Tiny", "task.attention.biases=True;task.attention.score_scale=1")
    layer = model.decoder.blocks.body.layers[0]
    specs = layer.VariableSpecs()
    for name in ("self_atten", "cross_atten"):
        assert layer.children[name].p.score_scale == 1.0
        assert {f"{projection}_bias" for projection in "qkvo"} < specs[name].keys()


@pytest.mark.parametrize("name", SIZES)
def test_a_bias_from_outside_the_package_trains(name):
    model, inputs = _experiment(name, OWN)
    state, batch = state_and_batch(model, inputs)
    after, metrics = run_single(train_step(model, inputs).fn, [state, batch], jit_compile=False)
    assert np.isfinite(metrics.loss)
    slopes = [
        (before, new)
        for (path, before), (_, new) in zip(
            state.theta.FlattenItems(), after.theta.FlattenItems(), strict=True
        )
        if path.endswith("slope")
    ]
    assert len(slopes) == (2 if name.startswith("mt") else 1)
    assert all(np.all(before != new) for before, new in slopes)


@pytest.mark.slow
def test_in_stages_the_table_of_all_layers_has_the_gradient_of_the_step_without():
    more = "task.position=t5;task.optimizer=sgd;task.dropout=0"
    stages = "task.pipeline.stages=2;task.pipeline.micro_batches=2"
    plain, inputs = _experiment("lm.Tiny", more)
    staged, _ = _experiment("lm.Tiny", more, stages, 'task.activation_split={"B": "data"}')
    compare_steps(train_step(staged, inputs), train_step(plain, inputs, 2), plain, inputs)
