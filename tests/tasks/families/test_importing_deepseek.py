"""Checkpoints of DeepSeek, Kimi K2 and gpt-oss give the library's logits and greedy tokens once they are imported.

benchmarks/peers/record_deepseek.py made the files in testdata/.
"""

import importlib.util

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from imported import (
    TESTDATA,
    assert_as_recorded,
    change,
    load_imported,
    logits_of,
    set_config,
)

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.weights.source import WeightsError
from lingvo_moe.tasks.families import importing
from lingvo_moe.tasks.families.importing import import_checkpoint, open_published

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="needs tokenizers: pip install --no-deps -r requirements-tokenizers.txt",
)
HEAD = "model.layers.3."


@pytest.fixture
def small_slices(monkeypatch):
    """Tensors are imported in slices of few values."""
    monkeypatch.setattr(importing, "_AT_ONCE", 200)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite", "kimi_k2", "gpt_oss_mxfp4"])
def test_logits_and_greedy_tokens(name, checkpoint, tmp_path):
    """deepseek_v2 is the case of huggingface/transformers PR#47435: YaRN's scale of scores, by a factor of 40."""
    model, theta = load_imported(checkpoint(name), tmp_path / "run")
    assert_as_recorded(model, theta, name)


def test_square_experts_are_not_transposed(checkpoint, tmp_path, small_slices):
    """The case of Megatron-Bridge PR#3743: gpt-oss's matrices are square, so no shape says which way they go."""
    directory = checkpoint("gpt_oss")
    shapes = {n: e.shape[1:] for n, e in open_published(directory).source.entries.items()}
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (32, 32)
    model, theta = load_imported(directory, tmp_path / "run")
    assert_as_recorded(model, theta, "gpt_oss")


def test_deepseek_v3_and_its_head_for_the_token_after_the_next(checkpoint, tmp_path):
    """All scores that choose experts are negative, the case of huggingface/transformers#45440; and the head, which
    that library leaves out, is there."""
    model, theta = load_imported(checkpoint("deepseek_v3"), tmp_path / "run")
    assert_as_recorded(model, theta, "deepseek_v3")
    expected = np.load(TESTDATA / "deepseek_v3/expected.npz")
    ids = tf.constant(expected["multi_token_ids"], tf.int32)
    at = tf.tile(tf.range(ids.shape[1] - 1)[tf.newaxis], [ids.shape[0], 1])
    segments = tf.ones_like(at)
    batch = NestedMap(ids=ids[:, :-1], labels=ids[:, 1:], segment_ids=segments, segment_pos=at)
    with use_mesh(single_device()):
        _, metrics = model.FProp(theta.Transform(tf.constant), batch)
    nll = [metrics.nll, metrics.multi_token_nll]
    np.testing.assert_allclose(nll, expected["nll"], rtol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("norm", [False, True])
def test_gates_are_normalized_and_scaled_once(norm, scale, checkpoint, tmp_path, small_slices):
    """The cases of sglang PR#35152, a factor of 2.5 applied twice, and torchtitan#1448, no normalization."""
    directory = checkpoint("deepseek_v3")
    set_config(directory, norm_topk_prob=norm, routed_scaling_factor=scale)
    model, theta = load_imported(directory, tmp_path / "run")
    expected = np.load(TESTDATA / "deepseek_v3/expected.npz")
    logits = logits_of(model, theta, expected["ids"])
    np.testing.assert_allclose(logits, expected[f"logits_{norm}_{scale}"], atol=1e-4, rtol=1e-4)


def test_a_head_without_place_is_left_out_by_name(checkpoint, tmp_path):
    """Two heads for later tokens, where there is a place for one."""
    directory = checkpoint("deepseek_v3")
    second = "model.layers.4."
    change(
        directory,
        lambda t: t | {n.replace(HEAD, second): x for n, x in t.items() if n.startswith(HEAD)},
    )
    set_config(directory, num_nextn_predict_layers=2)
    left_out = import_checkpoint(open_published(directory), tmp_path / "run", lambda line: None)
    assert {HEAD + "eh_proj.weight", second + "eh_proj.weight"} <= {*left_out}
    assert all(name.startswith((HEAD, second)) for name in left_out)


def test_tables_of_the_head_that_are_no_copies_are_refused(checkpoint, tmp_path):
    directory, name = checkpoint("deepseek_v3"), f"{HEAD}embed_tokens.weight"
    change(directory, lambda t: t | {name: t[name] + 1})
    with pytest.raises(WeightsError, match=f"{name} must be a copy of model.embed_tokens.weight"):
        import_checkpoint(open_published(directory), tmp_path / "run", lambda line: None)


def _in_float8(tensors, scales):
    """Tensors with the matrices of experts in float8, and scales for each of their blocks, named so."""
    changed = {}
    for name, x in tensors.items():
        changed[name] = x
        if ".experts." in name:
            changed[name] = x.astype(ml_dtypes.float8_e4m3fn)
            of_block = np.full((1, 1), 2.0, ml_dtypes.float8_e8m0fnu)
            changed[name.removesuffix(".weight") + scales] = of_block
    return changed


EXPERT = "model.layers.2.mlp.experts.4.up_proj.weight"
FLOAT8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}


@pytest.mark.parametrize("scales", [".weight_scale_inv", ".scale"])
def test_experts_in_float8_are_scaled_by_powers_of_two(scales, checkpoint, tmp_path):
    """The case of sglang#39193, by both names that DeepSeek gives the scales."""
    directory = checkpoint("kimi_k2")
    plain = open_published(directory).source.Read(EXPERT)
    change(directory, lambda t: _in_float8(t, scales))
    set_config(directory, quantization_config=FLOAT8)
    _, theta = load_imported(directory, tmp_path / "run")
    values = theta.decoder.blocks.body.layers[0].ffn.experts.wi[0, 4]
    np.testing.assert_array_equal(values, 2 * plain.astype("float8_e4m3fn").astype("float32").T)


def test_float8_without_scales_is_refused(checkpoint):
    directory = checkpoint("kimi_k2")
    change(directory, lambda t: _in_float8(t, ".other"))
    set_config(directory, quantization_config=FLOAT8)
    with pytest.raises(WeightsError, match="is of float8_e4m3fn, and has 0 tensors of scales"):
        open_published(directory)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("deepseek_v3", "rope_interleave", False),
        ("deepseek_v3", "n_group", "4"),
        ("deepseek_v3", "rope_scaling", {**YARN, "mscale": 0.5}),
        ("deepseek_v3", "index_topk", 2048),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("gpt_oss", "swiglu_limit", 8.0),
        ("gpt_oss", "layer_types", ["full_attention"] * 2),
        ("gpt_oss", "experts_per_token", 3),
        ("gpt_oss", "rope_scaling", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
        ("gpt_oss", "rope_scaling", {**YARN, "attention_factor": 2.0}),
    ],
)
def test_a_config_that_cannot_be_represented_is_refused_by_its_key(name, key, value, checkpoint):
    directory = checkpoint(name)
    set_config(directory, rope_parameters=None, **{key: value})
    with pytest.raises(WeightsError, match=f"config.json: {key}="):
        open_published(directory)
