"""The hashes that `make replay` compares say when a program changed, and only then."""

import tensorflow as tf
from replay import differences, graph_hash


def test_hash_of_a_graph_is_that_of_what_it_computes():
    """Tracing again changes the numbers in names, in loops and functions too; another constant changes the hash."""

    def traced(factor: float) -> str:
        inner = tf.function(lambda x: x * factor + captured, autograph=False)

        @tf.function(input_signature=[tf.TensorSpec([], tf.float32)], autograph=False)
        def f(x: tf.Tensor) -> tf.Tensor:
            return tf.while_loop(lambda x: x < 10.0, lambda x: [inner(x)], [x])[0]

        return graph_hash(f)

    captured = tf.constant([1.0, 2.0])[0]
    assert traced(2.0) == traced(2.0)
    assert traced(2.0) != traced(3.0)


def test_every_difference_is_a_line():
    before, after = {"a": "1" * 20, "b": "2", "c": "3"}, {"a": "4" * 20, "b": "2", "d": "5"}
    assert differences(before, after) == [
        f"a: {'1' * 16} became {'4' * 16}",
        "c: is gone",
        "d: is new",
    ]
    assert not differences(before, before)
