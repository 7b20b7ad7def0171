"""Lowering a layer at the paper's largest scale holds no large constant on the host.

[G,S,E] has 2048^3 elements here, and the tokens [G,S,M] 4 billion. One such constant would take 16 GB or more, while
the whole process stays under 2 GB.
"""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import tensorflow as tf
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.sharding import Mesh

D = 2048
layer = MoELayer.Params().Set(
    name="moe", model_dim=1024, hidden_dim=8192, num_experts=D, num_groups=D,
    activation_split={"B": "expert", "G": "expert", "E": "expert"}, weight_split={"E": "expert"},
).Instantiate()
optimizer = Adafactor.Params().Instantiate()
specs = layer.VariableSpecs()

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
    metrics.update(extras.metrics)
    return theta, slots, metrics

rows = ("expert", None, None)
args = [
    specs,
    optimizer.SlotSpecs(specs),
    TensorSpec((D * 16, 128, 1024), "float32", rows),
    TensorSpec((D * 16, 128), "float32", rows[:2]),
    TensorSpec((2,), "int32"),
    TensorSpec((), "int32"),
]
mesh = Mesh.parse(f"expert:{D}")
program = lower(step, args, mesh, donate=(0, 1))

# 32 such layers: their weights have 1.1 trillion elements, a single slot 512 million.
stack = specs.Transform(lambda spec: spec.Stacked(32))
slots = optimizer.SlotSpecs(stack)

def init(seed):
    theta = stack.Transform(lambda s: s.Init(seed))
    return theta, optimizer.InitSlots(stack, seed, theta)

lower(init, [TensorSpec((2,), "int32")], mesh, results=[stack, slots])
# Not getrusage: what the process was forked from counts in it.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("GB", int(status["VmHWM"].split()[0]) / 2**20, len(program.exported))
"""


def test_step_and_start_at_2048_devices_are_lowered_in_little_memory():
    root = str(Path(__file__).resolve().parents[3])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    _, gigabytes, exported_bytes = run.stdout.split()
    assert float(gigabytes) < 2
    assert int(exported_bytes) < 1_000_000
