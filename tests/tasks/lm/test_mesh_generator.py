"""A generator over a mesh: the texts, samples and log-probabilities of one host."""

import itertools
import random

import numpy as np
import pytest
import toy_text

from lingvo_moe.core.config import registry
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.lm.generator import GenerateOptions, Generator
from lingvo_moe.tasks.lm.mesh_batch import MeshBatch
from lingvo_moe.tasks.lm.mesh_generator import MeshGenerator
from lingvo_moe.tasks.text.decoding.text_batch import RunningText

pytestmark = pytest.mark.slow

# Of unequal length in one bucket; more than rows.
PROMPTS = ["red house", "", "open the green tree", "close stone", "edit file"]
SMALL = (
    "task.vocab_size=400;task.model_dim=16;task.hidden_dim=32;task.num_layers=2;task.key_dim=8;"
    "task.expert_hidden_dim=16"
)
LATENT = (
    "task.num_kv_heads=0;task.attention=latent;task.attention.rank=6;task.attention.turned_dim=4"
)


def _both(mesh: str, more: str, options: GenerateOptions) -> tuple[Generator, MeshGenerator]:
    """A small lm.MoEDemo on one host, and over a mesh."""
    task = registry.GetParams("lm.MoEDemo", f"{SMALL};{more}").task.Instantiate()
    with use_mesh(single_device()):
        theta = task.InitTheta(make_seed(4, 0)).Transform(lambda w: w.numpy() * 3)
    engine = PjrtEngine(mesh)
    placed = engine.Put(theta, task.VariableSpecs())
    over = MeshGenerator(engine, task, placed, toy_text.VOCAB, options)
    return Generator(task, theta, toy_text.VOCAB, options), over


def test_texts_over_a_mesh_are_those_of_one_host():
    """Greedy and drawn, token by token, with a stop string; two devices have two experts each."""
    options = GenerateOptions(max_source_length=12, max_length=24, rows=4)
    host, mesh = _both("expert:2,model:1", "task.num_experts=4", options)
    settings = [
        Sampling(10, logprobs=True),
        Sampling(3),
        Sampling(14, 0.9, 0, 0.9, 7, logprobs=True),
        Sampling(10, 2.0, 9, 1.0, 8, repetition_penalty=1.5),
        Sampling(10, min_p=0.1, stop=("e",)),
    ]
    texts = host.Generate(PROMPTS, settings)
    assert len({one.text for one in texts}) == len(PROMPTS)
    for one, other in zip(texts, mesh.Generate(PROMPTS, settings), strict=True):
        assert (other.text, other.tokens, other.finish_reason, other.prompt_tokens) == (
            one.text,
            one.tokens,
            one.finish_reason,
            one.prompt_tokens,
        )
        for (piece, log_prob), (want, expected) in zip(other.logprobs or [], one.logprobs or []):
            assert piece == want
            np.testing.assert_allclose(log_prob, expected, atol=2e-5)
    # Each of two streams takes the pages of the other.
    streams = [mesh.Stream(prompt, one) for prompt, one in zip(PROMPTS[2:4], settings[2:4])]
    ends = [*itertools.zip_longest(*streams)]
    streamed = [next(end for _, end in filter(None, column) if end) for column in zip(*ends)]
    assert [one.text for one in streamed] == [one.text for one in texts[2:4]]
    assert mesh.mesh_search.programs == 3  # empty pages; one that reads tokens, one that draws them


def test_texts_join_and_leave_a_batch_over_two_devices():
    """Texts take rows and pages of others, and some lose their pages; all are those that run alone."""
    options = GenerateOptions(max_source_length=100, max_length=24, rows=4)
    host, mesh = _both("expert:2,model:1", "task.num_experts=4", options)
    rng = random.Random(3)
    begin = [rng.randrange(4, 290) for _ in range(40)]
    texts = []
    for number in range(12):
        prompt = [1, *begin[: rng.choice((0, 40))], *rng.choices(range(4, 290), k=2 + number)]
        settings = Sampling(rng.choice((3, 9, 20)), 0.8 * (number % 2), seed=5, number=number)
        texts.append((prompt, settings))
    alone, together = ([RunningText([*ids], one) for ids, one in texts] for _ in range(2))
    for text in alone:
        _run(host.Batch(1, 1 << 20), [text])
    batch = MeshBatch(mesh.mesh_search, 8, 8, 4)
    assert len(batch._pools) == 2 and batch.pages == 8
    waited, coming = 0, [*together]
    gone = coming[5]
    while coming or batch.running or batch.waiting:
        before = {*batch.running}
        for text in [coming.pop(0) for _ in range(min(len(coming), rng.randrange(7)))]:
            batch.Join(text)
        batch.Step()
        waited += any(text in before for text in batch.waiting)
        if gone in batch.running and gone.new:
            batch.Leave(gone)
    assert batch.free_pages == batch.pages
    for text, want in zip(together, alone, strict=True):
        if text is gone:
            assert text.new and text.new == want.new[: len(text.new)]
        else:
            assert (text.new, text.reason) == (want.new, want.reason)
            np.testing.assert_allclose(text.log_probs, want.log_probs, atol=5e-5)
    assert len(batch.loads.Figures()["dead_experts"]) == 1  # of two layers one has experts
    assert waited and len({tuple(text.new) for text in alone}) == len(alone)


def _run(batch, texts):
    for text in texts:
        batch.Join(text)
    while batch.running or batch.waiting:
        batch.Step()


def test_beams_over_heads_and_vocabulary_are_those_of_one_host():
    """Heads share one latent vector."""
    options = GenerateOptions(beam_size=3, max_source_length=12, max_length=8, rows=4)
    host, mesh = _both("expert:1,model:2", LATENT, options)
    settings = [Sampling(7)] * len(PROMPTS)
    texts = [one.text for one in host.Generate(PROMPTS, settings)]
    assert texts == [one.text for one in mesh.Generate(PROMPTS, settings)]
    assert len({*texts}) > 2
