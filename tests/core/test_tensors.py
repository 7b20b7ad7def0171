"""Sizes of open dimensions; custom gradients have the names that TensorFlow gives to its own; rows are written."""

import functools

import numpy as np
import tensorflow as tf

from lingvo_moe.core.tensors import custom_gradient, dim, shape_of, with_row


def test_operations_of_the_gradient_stand_in_the_scope_of_the_call():
    @custom_gradient
    def cube(x):
        return x * x * x, lambda dy: 3.0 * tf.square(x) * dy

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.name_scope("model/layer/"):
                y = cube(x)
        return tape.gradient(y, x)

    x = tf.constant(2.0)
    assert run(x) == 12.0
    squares = [op.name for op in run.get_concrete_function(x).graph.get_operations()]
    squares = [name for name in squares if name.endswith("Square")]
    assert squares == ["gradient_tape/model/layer/Square"]
    with tf.GradientTape() as tape:  # eagerly too
        tape.watch(x)
        y = cube(x)
    assert tape.gradient(y, x) == 12.0


def test_sizes_are_ints_where_they_are_known():
    found = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 3])])
    def run(x):
        found.append((shape_of(x)[1], dim(x, 1), dim(x[:2, :1], 1)))
        return tf.stack([shape_of(x)[0], dim(x, 0)])

    assert run(tf.zeros([5, 3])).numpy().tolist() == [5, 5]
    assert found == [(3, 3, 1)]
    assert shape_of(tf.zeros([5, 3])) == [5, 3]


def test_a_row_is_written_with_xla_and_without():
    x = tf.reshape(tf.range(24.0), [3, 2, 4])
    for axis, shape in ((0, [2, 4]), (1, [3, 4])):
        want = x.numpy()
        want[(slice(None),) * axis + (1,)] = 7.0
        write = functools.partial(with_row, axis=axis)
        for run in (write, tf.function(write, jit_compile=True)):
            np.testing.assert_array_equal(run(x, tf.constant(1), tf.fill(shape, 7.0)), want)
