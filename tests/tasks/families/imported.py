"""Imports recorded checkpoints, and compares what they compute with what was recorded. Letters: B row, T token."""

import json
from pathlib import Path

import numpy as np
import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.weights.safetensors_file import open_safetensors, write_safetensors
from lingvo_moe.core.weights.source import Entry
from lingvo_moe.tasks.families.importing import import_checkpoint, open_published
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta

TESTDATA, _WEIGHTS = Path(__file__).parent / "testdata", "model.safetensors"


def change(directory, new):
    """Writes the weights again with other tensors: `new` takes and gives arrays by name."""
    source = open_safetensors(directory / _WEIGHTS)
    tensors = new({name: source.Read(name) for name in source.entries})
    entries = {name: Entry(x.shape, str(x.dtype)) for name, x in tensors.items()}
    with open(directory / _WEIGHTS, "wb") as file:
        write_safetensors(file, entries, tensors.values())


def set_config(directory, **keys):
    """Sets keys of config.json."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | keys))


def load_imported(directory, run):
    """Imports a checkpoint: its model, and the weights in the run that was made."""
    import_checkpoint(open_published(directory), run, lambda line: None)
    opened = TextRunDir(run)
    model = opened.Task()
    return model, load_theta(opened, model)[0]


def logits_of(model, theta, ids):
    """[B, T, V], in NumPy."""
    theta, ids = theta.Transform(tf.constant), tf.constant(ids, tf.int32)
    at = tf.tile(tf.range(ids.shape[1])[tf.newaxis], [ids.shape[0], 1])
    batch = NestedMap(ids=ids, labels=ids, segment_ids=tf.ones_like(ids), segment_pos=at)
    with use_mesh(single_device()):
        carry, _, _ = model.Forward().Run(theta, Context(batch))
        y = model.decoder.Normalized(theta.decoder, carry.x)
        return model.softmax.FProp(theta[model.softmax_table], y).numpy()


def assert_as_recorded(model, theta, name):
    """The logits are those of the recorded checkpoint, and the greedy tokens too."""
    expected = np.load(TESTDATA / name / "expected.npz")
    whole = np.concatenate([expected["ids"], expected["greedy"]], 1)
    logits = logits_of(model, theta, whole[:, :-1])
    length = expected["ids"].shape[1]
    np.testing.assert_allclose(logits[:, :length], expected["logits"], atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(logits[:, length - 1 :].argmax(-1), expected["greedy"])
