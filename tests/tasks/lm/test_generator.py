"""Texts of a generator: the same alone, among others and token by token; a beam's are those of a plain search."""

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf
import toy_text
from numpy_beam_search import beam_search

from lingvo_moe.core import kernels
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.kernels.packed_weights import WEIGHTS, PackAs
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.version import VERSION
from lingvo_moe.tasks.lm import saved_generator
from lingvo_moe.tasks.lm.generator import GenerateOptions, load_generator
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.lm.saved_generator import SavedGenerator
from lingvo_moe.tasks.text.decoding.export import export
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from lingvo_moe.tasks.text.vocabulary.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary

PROMPTS = ["red house", "", "open the green tree", "close stone", "edit \ud800 file"]
# The parts of DeepSeek-V3.
LATENT_EXPERTS = (
    "task.attention=latent;task.attention.rank=6;task.attention.turned_dim=4;task.num_experts=4;"
    "task.moe.router=top_k;task.moe.router.gate=sigmoid;task.moe.router.balance_bias=0.1;"
    "task.moe.num_shared_experts=1;task.multi_token_weight=0.3"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("lm")
    toy_text.save_run(path)
    return path


@pytest.fixture(scope="module")
def generator(run):
    return load_generator(run, GenerateOptions(max_source_length=6, max_length=24))[0]


@pytest.fixture(scope="module")
def next_logits(run):
    """Ids, with BOS -> the logits of the next one, by the pass over all of them."""
    model, vocab = TextRunDir(run).Task(LmModel), Vocabulary(toy_text.VOCAB)
    theta = load_theta(TextRunDir(run), model)[0].Transform(tf.constant)

    def compute(ids):
        row = tf.constant([ids])
        at = tf.range(row.shape[1])[tf.newaxis]
        batch = NestedMap(ids=row, labels=row, segment_ids=tf.ones_like(row), segment_pos=at)
        with use_mesh(single_device()):
            carry, _, _ = model.Forward().Run(theta, Context(batch))
            y = model.decoder.final_norm.FProp(theta.decoder.final_norm, carry.x)
            logits = model.softmax.FProp(theta[model.softmax_table], y)
        return logits[0, -1, : vocab.size].numpy()

    return vocab, compute


@pytest.mark.slow
def test_a_text_is_the_same_alone_and_token_by_token(generator):
    assert generator.Generate([], []) == []
    kinds = (Sampling(20), Sampling(3), Sampling(20, 0.9, 0, 0.9, 7), Sampling(20, 2.0, 9, 1.0, 8))
    settings = [kinds[i % 4] for i in range(len(PROMPTS))]
    together = generator.Generate(PROMPTS, settings)
    assert together[1].tokens <= 3 and len({one.text for one in together}) == len(PROMPTS)
    encode = Vocabulary(toy_text.VOCAB).Encode
    lengths = [len(encode(prompt.replace("\ud800", "\ufffd"))) for prompt in PROMPTS]
    assert [one.prompt_tokens for one in together] == [min(n, 6) for n in lengths]
    assert [one.truncated for one in together] == [n > 6 for n in lengths]
    assert min(lengths) <= 6 < max(lengths)
    for prompt, each, one in zip(PROMPTS, settings, together):
        assert generator.Generate([prompt], [each]) == [one]
        ends = "stop" if one.tokens < each.max_tokens else "length"
        assert one.finish_reason == ends
        parts = list(generator.Stream(prompt, each))
        assert "".join(text for text, _ in parts) == one.text
        assert [end for _, end in parts] == [None] * (len(parts) - 1) + [one]


def test_greedy_and_beam_search_are_those_over_the_whole_pass(run, generator, next_logits):
    vocab, compute = next_logits
    beam = load_generator(run, GenerateOptions(beam_size=3))[0]
    allowed = np.arange(vocab.size) != UNK_ID
    start = [BOS_ID, *vocab.Encode(PROMPTS[0])]
    for size, made in ((1, generator), (3, beam)):
        (best,) = beam_search(
            lambda tokens: compute([*start, *tokens]),
            max_length=6,
            beam_size=size,
            top_k=1,
            length_alpha=0.6,
            allowed=allowed,
        )
        (out,) = made.Generate(PROMPTS[:1], [Sampling(5)])
        assert vocab.Decode(start) + out.text == vocab.Decode([*start, *best.tokens])
        assert out.tokens == len(best.tokens) - 1
    with pytest.raises(ValueError, match=r"temperature=1.0 has no effect in a beam search"):
        beam.Generate([""], [Sampling(6, 1.0)])
    for setting in (
        {"min_p": 0.1},
        {"repetition_penalty": 2.0},
        {"stop": ("a",)},
        {"logprobs": True},
    ):
        with pytest.raises(
            ValueError, match=f"{next(iter(setting))}=.* has no effect in a beam search"
        ):
            beam.Generate([""], [Sampling(6, **setting)])
    with pytest.raises(ValueError, match="cannot be streamed"):
        next(beam.Stream("", Sampling(6)))


def test_a_repetition_penalty_and_log_probabilities_are_those_of_the_whole_pass(
    generator, next_logits
):
    """Keskar et al. 2019: of tokens that were there, positive logits are divided, and negative ones multiplied."""
    vocab, compute = next_logits
    ids, penalty, logprobs = [BOS_ID, *vocab.Encode(PROMPTS[0])], 1.7, []
    allowed = [i for i in range(vocab.size) if i not in (BOS_ID, UNK_ID, PAD_ID)]
    while len(logprobs) < 8:
        logits = compute(ids).astype(np.float64)
        less = [x / penalty if x > 0 else x * penalty for x in logits]
        chosen = max(allowed, key=lambda i: less[i] if i in ids else logits[i])
        if chosen == EOS_ID:
            break
        logprobs.append(logits[chosen] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        ids.append(chosen)
    settings = [Sampling(8, repetition_penalty=penalty, logprobs=True), Sampling(8)]
    one, plain = generator.Generate(PROMPTS[:1] * 2, settings)
    new = ids[-len(logprobs) :]
    assert [piece for piece, _ in one.logprobs] == vocab.Pieces(new)
    np.testing.assert_allclose([value for _, value in one.logprobs], logprobs, atol=1e-4)
    assert plain.text != one.text and plain.logprobs is None
    assert generator.Generate(PROMPTS[:1], [Sampling(8, 1.0, min_p=1.0)])[0].text == plain.text


def test_a_stop_ends_an_answer_and_a_stream_at_the_same_place(generator):
    plain = Sampling(20, 1.0, seed=2)
    (whole,) = generator.Generate(PROMPTS[:1], [plain])
    text = whole.text
    for stops in (
        (text[5:8],),
        (text[9:10], text[4:7]),
        (text[:2],),
        ("\0no",),
        (text[6:9] + "\0", text[7]),
    ):
        settings = dataclasses.replace(plain, stop=stops, logprobs=True)
        at = min([i for i in map(text.find, stops) if i >= 0], default=len(text))
        (one,) = generator.Generate(PROMPTS[:1], [settings])
        assert one.text == text[:at]
        assert one.finish_reason == ("stop" if at < len(text) else whole.finish_reason)
        assert len(one.logprobs) == one.tokens and (one.tokens < whole.tokens) == (
            at < len(text) - 6
        )
        parts = list(generator.Stream(PROMPTS[0], settings))
        assert "".join(part for part, _ in parts) == one.text and parts[-1][1] == one


@pytest.mark.parametrize("more", ["", "task.tied_softmax=False;task.num_experts=4"])
def test_packed_weights_give_the_logits_of_the_weights_as_they_are(tmp_path, more):
    """8 bits change them by a few hundredths of their deviation."""
    toy_text.save_run(tmp_path, f"task.model_dim=32;{more}".rstrip(";"))
    model = TextRunDir(tmp_path).Task(LmModel)
    theta = model.InitTheta(make_seed(0, 0))
    ids = tf.constant(np.random.default_rng(0).integers(4, 300, (2, 5)), tf.int32)
    mask, time = tf.linalg.band_part(tf.ones([2, 5, 5]), -1, 0) > 0, tf.range(5)
    found = []
    with use_mesh(single_device()), kernels.using(tensorflow):
        for weights in (theta, *(model.PackWeights(theta, PackAs(kind)) for kind in WEIGHTS)):
            found.append(model.ExtendStep(weights, ids, model.InitCache(2, 5), time, mask)[0])
    plain, packed, ints = (x.numpy() for x in found)
    np.testing.assert_allclose(packed, plain, rtol=1e-5, atol=1e-5)
    assert 0 < np.std(ints - plain) < 0.05 * np.std(plain)


@pytest.mark.slow
def test_an_export_of_8_bits_with_experts_and_latent_attention_gives_the_same_texts(
    tmp_path, monkeypatch
):
    toy_text.save_run(tmp_path / "run", LATENT_EXPERTS)
    options = GenerateOptions(max_source_length=6, max_length=8, weights="int8")
    made, about = load_generator(tmp_path / "run", options)
    export(made, tmp_path / "model", about)
    kinds = [leaf.dtype for leaf in made._weights.variables]
    assert about["weights"] == "int8" and tf.int8 in kinds
    settings = [Sampling(8)] * 2
    want, got = (
        g.Generate(PROMPTS[:2], settings) for g in (made, SavedGenerator(tmp_path / "model"))
    )
    assert got == want and all(one.tokens for one in want) and got[0].text != got[1].text
    logged = [Sampling(8, 0.9, stop=("e",), logprobs=True, seed=3)] * 2
    found = SavedGenerator(tmp_path / "model").Generate(PROMPTS[:2], logged)
    assert found == made.Generate(PROMPTS[:2], logged) and found[0].logprobs
    with monkeypatch.context() as patch:
        patch.setitem(saved_generator.SETTINGS, "heat", tf.TensorSpec([], tf.float32))
        message = rf"has no heat: it was exported by lingvo_moe {re.escape(VERSION)}, and this is"
        with pytest.raises(ValueError, match=message):
            SavedGenerator(tmp_path / "model")
    with pytest.raises(ValueError, match="int4: must be one of float32, int8"):
        GenerateOptions(weights="int4")


def test_wrong_settings_are_refused(generator):
    with pytest.raises(ValueError, match="max_tokens=25 is more than the 24 that this generator"):
        generator.Generate([""], [Sampling(25)])
    integers = ("max_tokens=0", "max_tokens=1000001", "top_k=-1")
    for bad in (*integers, "temperature=-1", "top_p=0", "top_p=1.1", "min_p=2"):
        name, _, value = bad.partition("=")
        with pytest.raises(ValueError, match=f"{name}={value}[.0]*: must be"):
            Sampling(**{name: int(value) if bad in integers else float(value)})
    for stop in ("end", ["a", ""], ["a"] * 17, [3]):
        with pytest.raises(ValueError, match="must be up to 16 strings, none of them empty"):
            Sampling(stop=stop)
