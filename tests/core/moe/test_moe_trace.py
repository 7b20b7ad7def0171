"""Lowering a layer at the paper's largest scale holds no large constant on the host.

[G,S,E] has 2048^3 elements here, and the tokens [G,S,M] 4 billion. One such constant would take 16 GB or more.
"""

import resource

import tensorflow as tf
from slots import init_slots

from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.sharding import Mesh

D = 2048
ROWS = ("expert", None, None)


def test_step_and_start_at_2048_devices_are_lowered_in_little_memory():
    splits = {"B": "expert", "G": "expert", "E": "expert"}
    p = MoELayer.Params().Set(
        name="moe", model_dim=1024, hidden_dim=8192, num_experts=D, num_groups=D
    )
    layer = p.Set(activation_split=splits, weight_split={"E": "expert"}).Instantiate()
    optimizer, specs = Adafactor.Params().Instantiate(), layer.VariableSpecs()

    def step(theta, slots, x, paddings, seed, step):
        weights = theta.Flatten()
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y, extras = layer.FProp(theta, x, paddings, seed=seed)
            # As every loss here: times a runtime scalar, or the first gradient would be a constant.
            loss = (tf.reduce_sum(y * x) + extras.aux_loss) * tf.cast(step + 1, tf.float32)
        grads = theta.Pack(tape.gradient(loss, weights))
        state = NestedMap(theta=theta, slots=slots, step=step)
        theta, slots, metrics = optimizer.Update(state, grads, specs)
        return theta, slots, NestedMap(metrics, **extras.metrics)

    # 32 such layers: their weights have 1.1 trillion elements, a single slot 512 million.
    stack = specs.Transform(lambda spec: spec.Stacked(32))

    def init(seed):
        theta = stack.Transform(lambda s: s.Init(seed))
        return theta, init_slots(optimizer, stack, seed, theta)

    tokens = TensorSpec((D * 16, 128, 1024), "float32", ROWS)
    paddings = TensorSpec((D * 16, 128), "float32", ROWS[:2])
    seed, number = TensorSpec((2,), "int32"), TensorSpec((), "int32")
    args = [specs, optimizer.SlotSpecs(specs), tokens, paddings, seed, number]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    program = lower(step, args, Mesh(("expert",), (D,)), donate=(0, 1))
    lower(init, [seed], Mesh(("expert",), (D,)), results=[stack, optimizer.SlotSpecs(stack)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**20  # KiB
    assert len(program.exported) < 1_000_000
