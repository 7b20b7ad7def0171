"""A TPU's kernels as plans see them, in programs of the real compiler."""

import pytest
import tensorflow as tf

from lingvo_moe.analysis.plans.work.costs import costs
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.checking import find_faults
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.hlo.parts import Layers
from lingvo_moe.core import kernels
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.devices import has_fused_kernels
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.kernels.blockwise import FROM_LENGTH
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.sharding.manual import manual_region
from lingvo_moe.core.task.step import Step

B, T, M, N, A, K = 4, FROM_LENGTH, 128, 8, 2, 64
KEYS = T * 10 // 16  # of four blocks a query looks at 1, 2, 3 or 4


def _step(layer):
    """The gradients of an attention layer's weights."""

    def gradients(theta, x, ids):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(theta.Flatten())
            y = layer.FProp(theta, x, x, NestedMap(segments=ids, positions=ids))
            loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
        return tape.gradient(loss, theta.Flatten())

    ids = TensorSpec((B, T), "int32", ("data", None))
    x = TensorSpec((B, T, M), "bfloat16", ("data", None, None))
    return Step("gradients", gradients, [layer.VariableSpecs(), x, ids])


def test_the_kernels_of_a_layer_on_four_chips():
    """Forward and backward: the FLOPs of a device's rows and heads, and no logits in its memory."""
    split = {"N": "model", "A": "model"}
    p = MultiHeadAttention.Params().Set(
        name="atten", model_dim=M, num_heads=N, num_kv_heads=A, dim_per_head=K
    )
    p.Set(fprop_dtype="bfloat16", activation_split={"B": "data", **split}, weight_split=split)
    layer = p.Instantiate()
    program = lower_step(_step(layer), Mesh.parse("data:2,model:2"), fused=True)
    compiled = aot.compile_for_topology(program, "v5e:2x2")
    layers = Layers(layer.DeclaredParts())
    found = costs(parse_module(compiled.hlo_text), layers, tile=128)
    kernels = {c.name.split("_")[2]: c for c in found if c.opcode == "custom-call" and c.flops}
    product = 2 * KEYS * (B // 2) * (N // 2) * T * K
    assert {name: c.flops // product for name, c in kernels.items()} == {
        "fwd": 2,
        "dq": 3,
        "dkv": 4,
    }
    for cost in kernels.values():
        assert cost.formats == {"bfloat16": cost.flops}
        assert cost.tiled == {"bfloat16": 2 * cost.flops}  # a tile is twice as wide as a head
    places = {name: (c.place.part, c.place.phase) for name, c in kernels.items()}
    backward = "attention", "backward"
    assert places == {"fwd": ("attention", "forward"), "dq": backward, "dkv": backward}
    assert compiled.memory["temporaries"] < T * T * 2 * (B // 2) * (N // 2)  # bytes of all logits


def test_the_kernels_of_experts():
    """Each chip multiplies its own rows, forward and backward, without a loop over tiles."""
    rows, experts, m, h, expected = 1024, 4, 256, 320, 600

    def local(x, w, sizes):
        return kernels.current().grouped_matmul(x[0], w, sizes[0], expected)[tf.newaxis]

    def gradients(x, w, sizes):
        by_chip = ("data", None, None)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([x, w])
            ins = [by_chip, (None, None, None), ("data", None)]
            y = manual_region(local, ins, by_chip)(x, w, sizes)
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, [x, w])

    specs = [
        TensorSpec((4, rows, m), "float32", ("data", None, None)),
        TensorSpec((experts, m, h), "float32", (None, None, None)),
        TensorSpec((4, experts), "int32", ("data", None)),
    ]
    program = lower_step(Step("gradients", gradients, specs), Mesh.parse("data:4"), fused=True)
    compiled = aot.compile_for_topology(program, "v5e:2x2")
    found = costs(parse_module(compiled.hlo_text), tile=128)
    half_tiles = experts * 512 // 2
    assert [c.flops for c in found if c.flops] == [2 * (expected + half_tiles) * m * h] * 3
    assert all(c.tiled == {"tf32": c.flops * 384 // h} for c in found if c.flops)
    assert not [c for c in found if c.flops and c.loops]
    assert find_faults(compiled.partitioner_input, program) == []


@pytest.mark.parametrize(("length", "block", "fused", "has"), [
    (FROM_LENGTH, "auto", True, True),
    (FROM_LENGTH, "auto", False, False),
    (FROM_LENGTH, "512", True, False),
    (FROM_LENGTH // 2, "auto", True, False),
])  # fmt: skip
def test_which_programs_of_a_language_model_have_the_kernel(length, block, fused, has, monkeypatch):
    """The forward pass chooses, so the backward pass is not traced."""
    monkeypatch.setattr(tf.GradientTape, "gradient", lambda _, y, xs: [*map(tf.zeros_like, xs)])
    sizes = f"input.target_length={length};input.batch_size=1;task.num_layers=1;task.optimizer=sgd"
    changes = f"{sizes};task.attention_block={block}"
    params = registry.GetParams("lm.Tiny", changes)
    step = train_step(params.task.Instantiate(), params.input.Instantiate())
    program = lower_step(step, Mesh.parse("data:1"), fused)
    assert ("tpu_custom_call" in program.Text()) == has


@pytest.mark.parametrize(
    ("topology", "has"), [("v5e:2x2", True), ("v4:2x2x1", True), ("v3:2x2", False)]
)
def test_which_tpus_have_the_kernels(topology, has):
    assert has_fused_kernels(aot.devices_of(topology)[0]) == has
