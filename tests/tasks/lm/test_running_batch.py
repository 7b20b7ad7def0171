"""Texts that join and leave a running batch at any time are those that run alone, and give all pages back."""

import dataclasses
import random

import numpy as np
import pytest
import tensorflow as tf
import toy_text
from rows import products_ignore_the_batch

from lingvo_moe.core.decode.pages import PAGE
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.moe.routers.losses_and_metrics import noting_choices
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.lm.generator import GenerateOptions, load_draft, load_generator
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.lm.paged_search import END
from lingvo_moe.tasks.lm.running_batch import RunningBatch
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.decoding.text_batch import FILLED, RunningText
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta

# Grouped heads with rotary positions, windows and sinks; ALiBi's numbers, with a head for each.
MODELS = (
    "task.num_kv_heads=1;task.attention=extended;task.attention.window=40;task.attention.sinks=True",
    "task.position=alibi;task.num_experts=4",
    "task.attention=latent;task.attention.rank=6;task.attention.turned_dim=4",
)


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    path = tmp_path_factory.mktemp("lm")
    toy_text.save_run(path, MODELS[0])
    return load_generator(path, GenerateOptions(max_source_length=200, max_length=80))[0]


def _texts(count):
    """Prompts of up to 150 tokens, of which many begin alike, and settings of all kinds."""
    rng = random.Random(0)
    begins = [[1, *(rng.randrange(4, 290) for _ in range(size))] for size in (0, 3, 70, 130)]
    kinds = (Sampling(24), Sampling(3), Sampling(40, 0.9, 0, 0.9, 7), Sampling(24, 0.5, 9))
    kinds += (Sampling(12, repetition_penalty=1.4),)
    for number in range(count):
        more = [rng.randrange(4, 290) for _ in range(rng.randrange(1, 20))]
        settings = dataclasses.replace(rng.choice(kinds), number=number)
        yield RunningText([*rng.choice(begins), *more], settings)


def _run(batch, texts):
    for text in texts:
        batch.Join(text)
    while batch.running or batch.waiting:
        batch.Step()
    assert batch.free_pages == batch.pages


def _answer(text):
    exact = text.log_probs if products_ignore_the_batch() else None
    return text.new, text.reason, exact


def test_texts_that_join_and_leave_are_those_that_run_alone(generator):
    """50 texts; some are cut off, and some give their pages back for others and are read again."""
    alone, rng = list(_texts(50)), random.Random(1)
    for text in alone:
        _run(RunningBatch(generator, 1, 12), [text])
    together, gone, waited = list(_texts(50)), set(), 0
    batch, coming = RunningBatch(generator, 6, 14), list(together)
    while coming or batch.running or batch.waiting:
        while coming and rng.random() < 0.5:
            batch.Join(coming.pop(0))
        before = {*batch.running}
        for text in batch.Step():
            assert text.pages == [] or text in batch.running
        waited += any(text in before for text in batch.waiting)
        if batch.running and rng.random() < 0.02:
            gone.add(text := rng.choice(batch.running))
            batch.Leave(text)
    assert batch.free_pages == batch.pages and waited and 0 < len(gone) < 15
    for text, want in zip(together, alone):
        if text in gone:
            assert text.new == want.new[: len(text.new)]
        else:
            assert _answer(text) == _answer(want)
            assert text.log_probs == pytest.approx(want.log_probs, abs=1e-4)


def test_a_long_begin_is_read_once_and_long_prompts_in_parts(generator, monkeypatch):
    begin, read = [1, *range(10, 10 + FILLED + 3)], []
    fill = generator.Fill
    monkeypatch.setattr(
        generator,
        "Fill",
        lambda places, pool: (read.append(places[0].shape), fill(places, pool))[1],
    )
    batch = RunningBatch(generator, 4, 40)
    texts = [RunningText([*begin, 200 + i], Sampling(5)) for i in range(3)]
    _run(batch, texts)
    # The last tokens of all prompts, which are in no full page of the first, are read together.
    assert read == [(1, FILLED), (3, 16)]
    assert [text.filled for text in texts] == [0] * 3
    with pytest.raises(
        DataError, match=rf"more than the {40 * PAGE} tokens that all texts together"
    ):
        batch.Join(RunningText(begin * 10, Sampling(5)))


@pytest.fixture(scope="module")
def other(generator, tmp_path_factory):
    path = tmp_path_factory.mktemp("other")
    toy_text.save_run(path, "task.num_layers=2")
    return load_draft(path, generator.options, trust_run=False)


def test_a_text_runs_alone_by_products_of_8_bits(other):
    assert other.fewest_rows == other._weights.fewest_rows == 1
    alone, together = list(_texts(4)), list(_texts(4))
    for text in alone:
        _run(RunningBatch(other, 1, 12), [text])
    _run(RunningBatch(other, 3, 30), together)
    assert list(map(_answer, alone)) == list(map(_answer, together))


def test_a_draft_changes_no_text(generator, other, monkeypatch):
    """All tokens of the model itself are taken, which may end a text, or reach max_tokens; few of another's are."""
    for model in (generator, other):  # more texts end

        def step(places, more, pool, step=model.Step):
            pool, tokens, *rest = step(places, more, pool)
            return pool, np.where(tokens % 13 == 0, END, tokens), *rest

        monkeypatch.setattr(model, "Step", step)
    alone = list(_texts(30))
    _run(RunningBatch(generator, 4, 40), alone)
    assert {text.reason for text in alone} == {"stop", "length"}
    for draft in (generator, other):
        drafted = list(_texts(30))
        batch = RunningBatch(generator, 5, 14, draft)
        _run(batch, drafted)
        for text, want in zip(drafted, alone, strict=True):
            assert _answer(text) == _answer(want)
            assert text.log_probs == pytest.approx(want.log_probs, abs=1e-4)
        assert batch.drafted == sum(text.drafted for text in drafted) > 300
        assert batch.taken == sum(text.taken for text in drafted)
        if draft is other:
            assert batch.taken < 0.2 * batch.drafted
        else:
            assert batch.taken > (1 if products_ignore_the_batch() else 0.98) * batch.drafted - 1
    # A text may stop between tokens that come together.
    prompts = ["open the green tree", "red house"]
    (whole,) = generator.Generate(prompts[:1], [Sampling(40, stop=("never",))])
    stops = [Sampling(40, stop=(whole.text[i : i + 2],), logprobs=True) for i in (9, 11, 14)]
    plain = [one for stop in stops for one in generator.Generate(prompts, [stop] * 2)]
    monkeypatch.setattr(generator, "_draft", generator._draft)  # to put it back
    generator.DraftBy(generator)
    together = [one for stop in stops for one in generator.Generate(prompts, [stop] * 2)]
    for one, want in zip(together, plain, strict=True):
        assert one.draft[0] >= one.draft[1] > 0 and one.About()["draft_tokens"] == one.draft[0]
        assert dataclasses.replace(one, draft=None, logprobs=None) == dataclasses.replace(
            want, logprobs=None
        )
        assert [piece for piece, _ in one.logprobs] == [piece for piece, _ in want.logprobs]
    monkeypatch.setattr(other, "_AllPieces", lambda: [*generator._AllPieces()[:-1], "x"])
    with pytest.raises(ValueError, match="the draft has 'x' as piece 2"):
        generator.DraftBy(other)


@pytest.mark.slow
@pytest.mark.parametrize("more", MODELS[1:])
def test_other_kinds_of_attention_continue_as_over_whole_caches(tmp_path, more):
    toy_text.save_run(tmp_path, more)
    generator = load_generator(tmp_path, GenerateOptions(max_length=40))[0]
    prompts = ["open the green tree and close the red house, then edit the file", "red house"]
    settings = [Sampling(30, logprobs=True), Sampling(30, 0.8, logprobs=True)]
    for prompt, each, want in zip(prompts, settings, generator.Generate(prompts, settings)):
        *_, (_, got) = generator.Stream(prompt, each)
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
        values = [[value for _, value in one.logprobs] for one in (got, want)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_a_step_says_which_experts_its_tokens_chose(tmp_path):
    """They are those that a pass over all of the text chooses for its last token."""
    toy_text.save_run(tmp_path, "task.num_experts=4;task.moe.router=top_k;task.moe.router.k=2")
    generator = load_generator(tmp_path, GenerateOptions())[0]
    text = next(_texts(1))
    ids = tf.constant([text.ids])
    at = tf.range(ids.shape[1])[tf.newaxis]
    rows = NestedMap(ids=ids, labels=ids, segment_ids=tf.ones_like(ids), segment_pos=at)
    run = TextRunDir(tmp_path)
    model = run.Task(LmModel)
    theta = load_theta(run, model)[0].Transform(tf.constant)
    model = LmModel(model.p.Copy().Set(repeat=False))  # no loop, in which choices would be
    with use_mesh(single_device()), noting_choices() as choices:
        model.Forward().Run(theta, Context(rows))
    batch = RunningBatch(generator, 1, 12)
    batch.Join(text)
    while not batch.tokens:
        batch.Step()
    last = [one.numpy()[0, -1] for one in choices]
    figures = batch.loads.Figures()
    assert len(last) == len(figures["dead_experts"]) > 0
    assert list(figures["dead_experts"]) == [0.5] * len(last)
    counts = batch.loads._counts[0]
    assert [set(np.flatnonzero(row)) for row in counts] == [set(one) for one in last]
