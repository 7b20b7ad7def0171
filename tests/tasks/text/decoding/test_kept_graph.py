"""A function whose graph was kept gives what it gave, with other values of its variables too."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.tasks.text.decoding import kept_graph
from lingvo_moe.tasks.text.decoding.kept_graph import KeptGraph, key_of


class Model(tf.Module):
    def __init__(self, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.w = tf.Variable(rng.normal(size=[3, 3]))
        self.b = tf.Variable(rng.normal(size=[3]))
        self.traces = 0

    def Steps(self, x_NM, steps):
        self.traces += 1

        def more(i, x):
            x = tf.cond(i % 2 == 0, lambda: tf.nn.relu(x), lambda: x)
            return i + 1, x @ self.w + self.b

        _, x = tf.while_loop(lambda i, _: i < steps, more, (0, x_NM))
        return {"x": x, "sum": tf.reduce_sum(x)}


SPECS = [tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec([], tf.int32)]


@pytest.fixture
def entries(monkeypatch):
    kept: dict[str, bytes] = {}
    monkeypatch.setattr(kept_graph, "find_bytes", kept.get)
    monkeypatch.setattr(kept_graph, "keep_bytes", lambda key, content: kept.update({key: content}))
    return kept


def test_a_kept_graph_is_not_traced_again_and_reads_the_variables_of_today(entries):
    first = Model(0)
    x = tf.constant(np.random.default_rng(2).normal(size=[4, 3]))
    want = KeptGraph(first.Steps, SPECS, first.variables, "k")(x, 5)
    assert [*entries] == ["k"] and first.traces == 1
    again = Model(0)
    program = KeptGraph(again.Steps, SPECS, again.variables, "k")
    for number in (5, 0, 3):
        got = program(x, number)
        for name, value in first.Steps(x, tf.constant(number)).items():
            np.testing.assert_array_equal(got[name], value)
    assert again.traces == 0
    again.b.assign_add(tf.ones([3], tf.float64))
    assert not np.allclose(program(x, 5)["x"], want["x"])


def test_what_reads_more_than_its_variables_is_not_kept(entries):
    model, other = Model(0), tf.Variable(1.0, dtype=tf.float64)
    program = KeptGraph(lambda x, n: {"x": x * other}, SPECS, model.variables, "k")
    x = tf.ones([1, 3], tf.float64)
    np.testing.assert_array_equal(program(x, 1)["x"], x)
    assert not entries


def test_the_key_says_how_weights_are_packed(monkeypatch):
    monkeypatch.setattr(kept_graph, "name_of", lambda *parts: str(parts))
    wide, narrow = Model(0), tf.Variable(tf.zeros([3, 2]))
    keys = [key_of("k", "text", v, 1) for v in (wide.variables, Model(1).variables, [narrow])]
    assert keys[0] == keys[1] != keys[2]
    assert key_of("k", "", wide.variables, 1) == ""
