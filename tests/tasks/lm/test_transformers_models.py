"""Small models of each family give the logits and the greedy tokens that the `transformers` library gave for the same
weights; DeepSeek-V3's head for the token after the next gives its losses and gradients.

benchmarks/peers/record_transformers.py made the arrays in testdata/. The experiments are those of the published models,
with other sizes. Letters: L layer of a stack.
"""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same

from lingvo_moe.core.config import registry
from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.lm.prompt_search import PromptSearch

TESTDATA = Path(__file__).parent / "testdata"
SIZES = "task.vocab_size=13;task.model_dim=8;task.hidden_dim=12;task.num_heads=4;task.key_dim=4"
EXPERTS = "task.num_experts=8;task.expert_hidden_dim=6;task.num_kv_heads=2;task.moe.router.k=2"
CHUNKS = (
    f"{EXPERTS};task.moe.router.k=1;task.attention.chunk=4;task.nth_attention.temperature_length=2"
)
LATENT = (
    f"task.num_layers=2;{EXPERTS};task.num_kv_heads=0;task.dense_first_layers=1;task.attention.rank=6;"
    "task.attention.turned_dim=4;task.attention.value_dim=5"
)
MODELS = {
    "Llama31_8B": "task.num_layers=1;task.num_kv_heads=2;task.hidden_dim=6",
    "Mixtral8x7B": f"task.num_layers=1;{EXPERTS}",
    "OLMoE1B7B": f"task.num_layers=1;{EXPERTS};task.model_dim=16",
    "Qwen3_30B_A3B": f"task.num_layers=1;{EXPERTS}",
    "GptOss20B": f"task.num_layers=2;{EXPERTS};task.attention.window=3",
    "Llama4Maverick": f"task.num_layers=4;{CHUNKS}",
    "Llama4Scout": f"task.num_layers=2;{CHUNKS};task.nth_attention_every=2;task.position.original_length=16",
    "DeepSeekV3": f"{LATENT};task.attention.query_rank=5;task.moe.router.expert_groups=4;"
    "task.moe.router.groups_per_token=2",
    "DeepSeekV2Lite": LATENT,
}


def _stacked(layers):
    return map_structure(lambda *weights: tf.stack(weights), *layers)


def _theta(recorded, model):
    """The recorded weights in the structure of the model's; a head of its own is below multi_token."""
    p = model.decoder.p
    layers = [recorded[f"layer_{i}"] for i in range(model.p.num_layers)]
    first, rest, size = layers[: p.num_first], layers[p.num_first :], len(p.block)
    decoder = NestedMap(final_norm=recorded.final_norm)
    if first:
        decoder.first = NestedMap(body=NestedMap(layers=[_stacked(first)]))
    blocks = [_stacked(rest[i::size]) for i in range(size)]
    decoder.blocks = NestedMap(body=NestedMap(layers=blocks))
    theta = NestedMap(decoder=decoder, embedding=recorded.embedding, softmax=recorded.softmax)
    if "multi_token" in recorded:
        theta.multi_token = recorded.multi_token
    return theta


def _recorded(name, more="", files=("",)):
    """The model with further overrides; of files of its name, which end so, all arrays, the last one's first; and its
    weights."""
    model = registry.GetParams(
        f"lm.{name}", f"{SIZES};task.fprop_dtype=float32;{MODELS[name]};{more}".rstrip(";")
    ).task.Instantiate()
    recorded = NestedMap()
    for end in files:
        with np.load(TESTDATA / f"{name}{end}.npz") as arrays:
            for path, value in arrays.items():
                recorded.Set(path, tf.constant(value))
    theta = _theta(recorded, model)
    shapes = [(path, spec.shape) for path, spec in model.VariableSpecs().FlattenItems()]
    assert shapes == [(path, tuple(x.shape)) for path, x in theta.FlattenItems()]
    return model, recorded, theta


@pytest.mark.parametrize("name", MODELS)
def test_logits(name):
    model, recorded, theta = _recorded(name)
    ids = tf.cast(recorded.ids, tf.int32)
    at = tf.tile(tf.range(ids.shape[1])[tf.newaxis], [ids.shape[0], 1])
    batch = NestedMap(ids=ids, labels=ids, segment_ids=tf.ones_like(ids), segment_pos=at)
    with use_mesh(single_device()):  # without the axes of the experiment
        carry, _, _ = model.Forward().Run(theta, Context(batch))
        y = model.decoder.final_norm.FProp(theta.decoder.final_norm, carry.x)
        logits = model.softmax.FProp(theta[model.softmax_table], y)
    np.testing.assert_allclose(logits, recorded.logits, atol=1e-4, rtol=1e-4)


class Endless:
    """A model with one more id, which is never likely: the end of a text. The library's text goes on."""

    def __init__(self, model):
        self._model = model
        self.InitCache, self.CacheLetters = model.InitCache, model.CacheLetters
        self.last = model.p.vocab_size - 1

    def ExtendStep(self, theta, ids, *args):
        logits, cache = self._model.ExtendStep(theta, tf.minimum(ids, self.last), *args)
        return tf.pad(logits, [[0, 0], [0, 0], [0, 1]], constant_values=-1e6), cache


@pytest.mark.parametrize("name", MODELS)
def test_200_greedy_tokens(name):
    model, recorded, theta = _recorded(name)
    endless, count = Endless(model), recorded.greedy.shape[1]
    end = endless.last + 1
    options = SearchOptions(1, bos_id=end + 1, eos_id=end, pad_id=end + 2)
    search = PromptSearch(endless, options, count, np.full(end + 1, True))
    most = tf.constant([count, count])
    find = tf.function(lambda ids: search.Search(theta, ids, most, None), autograph=False)
    found = find(tf.cast(recorded.ids, tf.int32))
    assert count == 200 and found.lengths_B.numpy().tolist() == [200, 200]
    np.testing.assert_array_equal(found.ids_BT[:, :count], recorded.greedy)


def test_the_loss_of_the_head_for_the_token_after_the_next_and_its_gradients():
    """The library's head reads the same model; gradients flow by way of the stack, the tables and both."""
    more = "task.multi_token_weight=0.3;task.aux_loss_weight=0.0"
    model, recorded, theta = _recorded("DeepSeekV3", more, ("", "_multi_token"))
    ids, labels = recorded.ids[:, :-1], recorded.ids[:, 1:]
    at = tf.tile(tf.range(ids.shape[1])[tf.newaxis], [ids.shape[0], 1])
    batch = NestedMap(ids=ids, labels=labels, segment_ids=tf.ones_like(at), segment_pos=at)
    batch = batch.Transform(lambda x: tf.cast(x, tf.int32))
    leaves = theta.Flatten()
    with use_mesh(single_device()):
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            loss, metrics = model.FProp(theta, batch)
        grads = theta.Pack(tape.gradient(loss, leaves, unconnected_gradients="zero"))
    nll = tf.stack([metrics.nll, metrics.multi_token_nll])
    assert_same(nll, recorded.nll)
    assert_same(loss, tf.reduce_sum(recorded.nll * [1.0, 0.3]))
    (first,) = grads.decoder.first.body.layers
    got = NestedMap(
        embedding=grads.embedding,
        final_norm=grads.decoder.final_norm,
        layer_0=map_structure(lambda x: x[0], first),
        multi_token=grads.multi_token,
        softmax=grads.softmax,
    )
    assert_same(got, NestedMap({name: recorded.grad[name] for name in got}), floor=1.0)
