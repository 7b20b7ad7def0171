"""Shared parts of the tests of published weights."""

import tensorflow as tf

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.weights.open_source import open_source


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
