"""Custom gradients have the names that TensorFlow gives to its own."""

import tensorflow as tf

from lingvo_moe.core.gradients import custom_gradient


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
