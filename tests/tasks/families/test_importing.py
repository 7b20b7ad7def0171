"""Checkpoints that the `transformers` library wrote give its logits and its greedy tokens once they are imported.

benchmarks/peers/record_published.py made the files in testdata/. Letters: B row, T token.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same

from lingvo_moe.core.engine.checkpoints import streamed
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.weights.safetensors_file import open_safetensors, write_safetensors
from lingvo_moe.core.weights.source import Entry, WeightsError
from lingvo_moe.tasks.families.importing import import_checkpoint, open_published
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from tools import import_checkpoint as import_checkpoint_command

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="needs tokenizers: pip install --no-deps -r requirements-tokenizers.txt",
)

TESTDATA = Path(__file__).parent / "testdata"
NAMES = ["llama3", "llama_tied", "mixtral"]
WEIGHTS = "model.safetensors"
TOKENS = [f"<{i}>" for i in range(37)]


@pytest.fixture
def checkpoint(tmp_path):
    """Copies a checkpoint of a name, and gives it a tokenizer."""

    def copy(name):
        directory = tmp_path / name
        shutil.copytree(TESTDATA / name, directory)
        (directory / "expected.npz").unlink()
        model = {
            "type": "WordLevel",
            "vocab": {t: i for i, t in enumerate(TOKENS)},
            "unk_token": TOKENS[0],
        }
        (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
        marks = {"bos_token": TOKENS[1], "eos_token": TOKENS[2]}
        (directory / "tokenizer_config.json").write_text(json.dumps(marks))
        return directory

    return copy


def _change(directory, change):
    """Writes the weights again with other tensors: `change` takes and gives arrays by name."""
    source = open_safetensors(directory / WEIGHTS)
    tensors = change({name: source.Read(name) for name in source.entries})
    entries = {name: Entry(x.shape, str(x.dtype)) for name, x in tensors.items()}
    with open(directory / WEIGHTS, "wb") as file:
        write_safetensors(file, entries, tensors.values())


def _import(directory, run):
    import_checkpoint(open_published(directory), run, lambda line: None)
    opened = TextRunDir(run)
    model = opened.Task()
    return model, load_theta(opened, model)[0]


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(name, checkpoint, tmp_path):
    model, theta = _import(checkpoint(name), tmp_path / "run")
    theta = theta.Transform(tf.constant)
    expected = np.load(TESTDATA / name / "expected.npz")
    whole = np.concatenate([expected["ids"], expected["greedy"]], 1).astype(np.int32)
    ids = tf.constant(whole[:, :-1])
    at = tf.tile(tf.range(ids.shape[1])[tf.newaxis], [ids.shape[0], 1])
    batch = NestedMap(ids=ids, labels=ids, segment_ids=tf.ones_like(ids), segment_pos=at)
    with use_mesh(single_device()):
        carry, _, _ = model.Forward().Run(theta, Context(batch))
        y = model.decoder.Normalized(theta.decoder, carry.x)
        logits = model.softmax.FProp(theta[model.softmax_table], y).numpy()
    length = expected["ids"].shape[1]
    np.testing.assert_allclose(logits[:, :length], expected["logits"], atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(logits[:, length - 1 :].argmax(-1), expected["greedy"])


CHANGES = {
    "lacks model.layers.1.mlp.up_proj.weight$": lambda t: {
        n: x for n, x in t.items() if n != "model.layers.1.mlp.up_proj.weight"
    },
    "has no place for model.layers.3.mlp.up_proj.weight$": lambda t: (
        t | {"model.layers.3.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"]}
    ),
    r"model.layers.0.mlp.up_proj.weight has the shape \[24, 20\]; the model needs \[20, 24\]": lambda t: (
        t | {"model.layers.0.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"].T.copy()}
    ),
    "weight is of float8_e4m3fn, and has 0 tensors of scales": lambda t: (
        t | {"model.norm.weight": t["model.norm.weight"].astype("float8_e4m3fn")}
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_other_tensors_are_refused_by_name_and_nothing_is_written(message, checkpoint):
    directory = checkpoint("llama_tied")
    _change(directory, CHANGES[message])
    with pytest.raises(WeightsError, match=message):
        import_checkpoint(open_published(directory), directory / "run", lambda line: None)
    assert not (directory / "run").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_act", "gelu"), ("sliding_window", 4), ("new", 1)]
)
def test_a_config_that_cannot_be_represented_is_refused_by_its_key(key, value, checkpoint):
    directory = checkpoint("llama_tied")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(WeightsError, match=f"config.json: {key}="):
        open_published(directory)


def test_tensors_are_believed_where_config_says_that_they_are_tied(checkpoint, tmp_path):
    """The case of huggingface/transformers#45005: tie_word_embeddings is true, and a head differs."""
    directory = checkpoint("llama_tied")
    _change(directory, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    _, theta = _import(directory, tmp_path / "run")
    assert_same(theta.softmax.table, theta.embedding.table + 1)


def test_the_command_goes_on_where_it_was_interrupted(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(streamed, "_AT_ONCE", 1)
    directory, run, tensors = checkpoint("llama_tied"), tmp_path / "run", []
    write = streamed.StreamedCheckpoint.Write

    def stop(self, name, values):
        if len(tensors) == 8:
            raise KeyboardInterrupt
        tensors.append(name)
        write(self, name, values)

    flags = [f"--from={directory}", f"--output={run}"]
    with monkeypatch.context() as patch:
        patch.setattr(streamed.StreamedCheckpoint, "Write", stop)
        assert import_checkpoint_command.main(flags) == 130
    monkeypatch.setattr(streamed.StreamedCheckpoint, "Write", _noted(tensors, write))
    assert import_checkpoint_command.main(flags) == 0
    assert len(tensors) == len(set(tensors)) == 29
    _, whole = _import(directory, tmp_path / "whole")
    opened = TextRunDir(run)
    assert_same(load_theta(opened, opened.Task())[0], whole)
    assert "import_checkpoint: run it again to go on" in capsys.readouterr().err
    assert import_checkpoint_command.main(flags) == 1  # the run is whole


def _noted(tensors, write):
    def noted(self, name, values):
        tensors.append(name)
        write(self, name, values)

    return noted
