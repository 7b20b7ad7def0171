"""Imported models over a mesh have the translations, texts and scores of one host."""

import importlib.util
import json
import re

import numpy as np
import pytest
from imported import set_config
from published import CODES, copied, tensors_of

from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.weights.safetensors_file import write_safetensors
from lingvo_moe.core.weights.source import Entry
from lingvo_moe.tasks.families.importing import import_checkpoint, open_published
from lingvo_moe.tasks.lm.generator import GenerateOptions, load_generator
from lingvo_moe.tasks.lm.mesh_generator import load_mesh_generator
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, load_translator
from lingvo_moe.tasks.text.quality.forced_decoding import ScoreOptions, Scorer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("tokenizers") is None,
        reason="needs tokenizers: pip install --no-deps -r requirements-tokenizers.txt",
    ),
]
LINES = ["bad cat", "abc", "", "gh f ed", "xyz", "pq"]
DIRECTIONS = [f"{CODES[i]}-{CODES[i + 1]}" for i in range(len(LINES))]
TEXTS = [[3, 4, 5], [30, 2, 9, 11, 8], [7], [21, 22], [36, 1, 5, 6]]
_TABLE = re.compile(r"embed_tokens|shared\.weight|lm_head|shared_head\.head")


def run_of(name, directory):
    """Imports a recorded checkpoint with other sizes and random weights.

    Two and four devices divide its heads, its tokens, three more than its tokenizer has, and its experts.
    """
    source = copied(name, directory / name)
    config = json.loads((source / "config.json").read_text())
    sizes = {"vocab_size": config["vocab_size"] + 3}
    experts = [n for n in ("num_experts", "num_local_experts") if config.get(n) == 5]
    sizes |= dict.fromkeys(experts, 4)
    if "d_model" in config:
        sizes |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    set_config(source, **sizes)
    tensors = {n: _resized(n, x) for n, x in tensors_of(source).items()}
    if experts:
        tensors = {n: x for n, x in tensors.items() if not re.search(r"experts\.(expert_)?4\.", n)}
    (source / "pytorch_model.bin").unlink(missing_ok=True)
    entries = {n: Entry(x.shape, str(x.dtype)) for n, x in tensors.items()}
    with open(source / "model.safetensors", "wb") as file:
        write_safetensors(file, entries, tensors.values())
    import_checkpoint(open_published(source), directory / "run", lambda line: None)
    return directory / "run"


def _resized(name, x):
    """A matrix of random numbers: a table of three tokens more, a router of four of five experts."""
    rows, *more = x.shape
    seed, rows = sum(name.encode()), 4 if rows == 5 else rows
    if not more:
        return x[:rows]
    if _TABLE.search(name):  # copies have many names
        seed, rows = int("head" in name), rows + 3
    return np.random.default_rng(seed).normal(0, 0.4, [rows, *more]).astype(np.float32)


def test_translations_of_nllb_moe_over_a_mesh(tmp_path):
    """Each device has two of four experts. The language of each line is its first token."""
    run = run_of("nllb_moe", tmp_path)
    options = TranslateOptions(beam_size=2, max_source_length=8, max_length=8, rows=4)
    want = load_translator(run, options)[0].Translate(LINES, DIRECTIONS)
    over, _ = load_translator(run, options, engine=PjrtEngine("expert:2,model:1"))
    out = over.Translate(LINES, DIRECTIONS)
    assert out.translations == want.translations
    assert len({row[0] for row in out.translations}) > 2
    np.testing.assert_allclose(out.scores, want.scores, rtol=2e-5)
    assert over.mesh_search.programs == 2


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama3", "data:1,model:2"), ("mixtral", "expert:2,model:2")]
)
def test_texts_and_scores_over_a_mesh(name, mesh, tmp_path):
    """A device has half of the heads and of the vocabulary, of whose 40 tokens the tokenizer has 37."""
    run, engine = run_of(name, tmp_path), PjrtEngine(mesh)
    options = GenerateOptions(max_source_length=8, max_length=12, rows=4)
    host, over = load_generator(run, options)[0], load_mesh_generator(engine, run, options)[0]
    settings = [
        *(Sampling(10, logprobs=True), Sampling(12, 0.9, 0, 0.9, 7, logprobs=True)),
        *(Sampling(9), Sampling(10, 2.0, 9, 1.0, 8), Sampling(12, repetition_penalty=1.3)),
    ]
    texts = host.Generate(TEXTS, settings)
    assert len({one.text for one in texts}) == len(TEXTS)
    for one, other in zip(texts, over.Generate(TEXTS, settings), strict=True):
        for name in ("text", "tokens", "finish_reason"):
            assert getattr(other, name) == getattr(one, name)
        for (piece, log_prob), (want, expected) in zip(other.logprobs or [], one.logprobs or []):
            assert piece == want
            np.testing.assert_allclose(log_prob, expected, atol=2e-5)
    assert over.mesh_search.programs == 3
    check_that_no_weight_moves(over.mesh_search, engine.mesh)
    scorers = (Scorer(run, ScoreOptions(8, 8, rows=4), engine=e) for e in (None, engine))
    for one, other in zip(*(scorer.ScoreIds(TEXTS) for scorer in scorers), strict=True):
        np.testing.assert_allclose(other[0], one[0], atol=1e-5, rtol=1e-5)


def check_that_no_weight_moves(search, mesh):
    """A step gathers less than a matrix, where one of training gathers all that a device has not."""
    matrices = []
    for path, x in search.theta.FlattenItems():
        if ".experts." in path:
            assert x.sharding.shard_shape(x.shape)[1] * mesh.size == x.shape[1]
        elif ".self_atten." in path:
            matrices.append(x.nbytes // x.shape[0])
    block = [*search._built.values()][-1]
    gathered = [c.num_bytes for c in block.Collectives() if c.kind == "all-gather"]
    assert max(gathered) < min(matrices) // mesh.axis_size("model")
