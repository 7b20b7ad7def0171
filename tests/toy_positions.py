"""A bias of scores from outside the package: a learned slope of each head times the logarithm of the distance."""

import tensorflow as tf

from lingvo_moe.api import ScoreBias, WeightParams


class LogPenalty(ScoreBias):
    def __init__(self, params):
        super().__init__(params)
        self.CreateVariable("slope", WeightParams.Vector((self.p.num_heads,), "N", 1.0))

    def Bias(self, theta, query_at, key_at):
        distance = tf.abs(query_at[:, :, tf.newaxis] - key_at[:, tf.newaxis])
        logarithm = tf.math.log1p(tf.cast(distance, tf.float32))
        return -tf.nn.relu(theta.slope)[:, tf.newaxis, tf.newaxis] * logarithm[:, tf.newaxis]
