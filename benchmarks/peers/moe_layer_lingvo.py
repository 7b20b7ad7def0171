"""Lingvo's contenders of benchmarks/moe_layer.py, in an interpreter of its own.

    LINGVO/bin/python benchmarks/peers/moe_layer_lingvo.py lingvo '{"num_experts": 8, ...}'

Lingvo 0.14.2's own gating and experts, compiled by XLA, or as `lingvo_graph` without. Its native
operations, which have no part in them, want a newer C library than Debian 12 has; a stub takes their
place.

Letters: G group, S token in group, E expert, C capacity slot, M model.
"""

import json
import sys
from unittest import mock

from stepping import arrays, keep_memory, serve

sys.modules["lingvo.core.ops.gen_x_ops"] = mock.MagicMock(unsafe=True)


def main():
    size = json.loads(sys.argv[2])
    keep_memory()
    from lingvo import compat as tf
    from lingvo.core import gshard_layers

    tf.config.threading.set_intra_op_parallelism_threads(size["threads"])
    tf.config.threading.set_inter_op_parallelism_threads(1)
    groups, num, m = size["groups"], size["num_experts"], size["model_dim"]
    x, dy, *weights = (tf.constant(a) for a in arrays(size))
    shape = [groups, size["group_size"], m]
    x, dy = tf.reshape(x, shape), tf.reshape(dy, shape)

    @tf.function(jit_compile=sys.argv[1] == "lingvo", autograph=False)
    def run(x, dy, wg, wi, wo):
        paddings = tf.zeros(shape[:2])
        gating = gshard_layers.Top2Gating(
            w=wg,
            inputs=x,
            paddings=paddings,
            num_devices=1,
            experts_dim=num,
            expert_capacity_dim=0,
            local_dispatch=True,
            fprop_dtype=tf.float32,
            capacity_factor=2.0,
        )
        y, loss = gshard_layers.FeedForwardNetworksApplyGating(
            gating, x, x, wi, wo, num_devices=1, num_groups=groups
        )
        total = tf.reduce_sum(y * dy) + loss
        return y, tf.gradients(total, [x, wg, wi, wo])

    def step():
        y, gradients = run(x, dy, *weights)
        y.numpy()
        del gradients

    serve(step, version="0.14.2")


if __name__ == "__main__":
    main()
