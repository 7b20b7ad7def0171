"""Shared parts of the tests of published weights."""

import json
import shutil
from pathlib import Path

import tensorflow as tf
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.weights.open_source import open_source

TESTDATA = Path(__file__).parent / "testdata"
TOKENS = [f"<{i}>" for i in range(37)]
LETTERS = "\u2581abcdefghijklmnopqrstuvwxy"  # ids 4 to 29 of translators; those of codes follow
CODES = [f"{letter * 3}_Latn" for letter in "abcdefghijk"]


def copied(name, directory):
    """Copies a recorded checkpoint of a name, and gives it a tokenizer: words, or a translator's letters and codes."""
    shutil.copytree(TESTDATA / name, directory)
    (directory / "expected.npz").unlink()
    if json.loads((directory / "config.json").read_text()).get("is_encoder_decoder"):
        _write_letters(directory)
    else:
        _write_words(directory)
    return directory


def _write_words(directory):
    model = {
        "type": "WordLevel",
        "vocab": {t: i for i, t in enumerate(TOKENS)},
        "unk_token": TOKENS[0],
    }
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    marks = {"bos_token": TOKENS[1], "eos_token": TOKENS[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(marks))


def _write_letters(directory):
    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = model.trainer_spec.BPE
    marks = (("<unk>", 2), ("<s>", 3), ("</s>", 3))
    for piece, kind in (*marks, *((letter, 1) for letter in LETTERS)):
        model.pieces.add(piece=piece, score=-1.0, type=kind)
    (directory / "sentencepiece.bpe.model").write_bytes(model.SerializeToString())
    codes = {"additional_special_tokens": CODES}
    (directory / "special_tokens_map.json").write_text(json.dumps(codes))


def tensors_of(directory):
    """All tensors of a checkpoint, by name."""
    source = open_source(directory)
    return {name: source.Read(name) for name in source.entries}


def assert_same_tensors(there, here):
    """Raises AssertionError unless the tensors have the same names, types, shapes and bytes."""
    assert there.keys() == here.keys()
    for name, tensor in there.items():
        assert (tensor.dtype, tensor.shape) == (here[name].dtype, here[name].shape), name
        assert tensor.tobytes() == here[name].tobytes(), name


def write_texts(directory):
    """Makes a directory with texts of the tokens of the checkpoints' tokenizer."""
    directory.mkdir()
    texts = (" ".join(f"<{i % 37}>" for i in range(n)) for n in range(3, 60))
    (directory / "a.txt").write_text("\n".join(texts))
    return directory


def logits_of(model, theta, ids):
    """The logits [B,T,V] of texts, int32 [B,T]."""
    ids = tf.constant(ids, tf.int32)
    at = tf.tile(tf.range(ids.shape[1])[tf.newaxis], [ids.shape[0], 1])
    batch = NestedMap(ids=ids, labels=ids, segment_ids=tf.ones_like(ids), segment_pos=at)
    theta = theta.Transform(tf.constant)
    with use_mesh(single_device()):
        carry, _, _ = model.Forward().Run(theta, Context(batch))
        y = model.decoder.Normalized(theta.decoder, carry.x)
        return model.softmax.FProp(theta[model.softmax_table], y).numpy()
