"""The dense models' two-axis mesh: almost only sums between devices; and their pipeline."""

import re
from collections import Counter

import pytest
import tensorflow as tf

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.pipeline.params import schedule_on, settings_of
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, dims_mapping
from lingvo_moe.core.task.step import Step

TOY = (
    "task.source_vocab_size=48;task.target_vocab_size=40;task.model_dim=16;task.hidden_dim=24;"
    "task.num_heads=2;task.key_dim=4;task.num_encoder_layers=2;task.num_decoder_layers=2;"
    "input.source_vocab_size=48;input.target_vocab_size=40;input.batch_size=4;"
    "input.source_length=6;input.target_length=5"
)
PARAMS = registry.GetParams("mt.T96L", TOY)


def _gradients():
    """(theta, batch) -> gradients and metrics, with dropout."""
    task, specs = PARAMS.task.Instantiate(), PARAMS.input.Instantiate().BatchSpec()
    specs = specs.Transform(
        lambda s: TensorSpec(s.shape, s.dtype, dims_mapping(s.letters, task.p.activation_split))
    )

    def gradients(theta, batch):
        leaves = theta.Flatten()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            loss, metrics = task.FProp(theta, batch, seed=make_seed(2, 0))
        return theta.Pack(tape.gradient(loss, leaves)), metrics

    theta_specs = task.VariableSpecs()
    whole = dict.fromkeys(("accuracy", "loss", "nll", "tokens"), TensorSpec((), "float32"))
    return Step("gradients", gradients, [theta_specs, specs], results=(theta_specs, whole))


@pytest.mark.slow
def test_a_layer_sums_over_model_once_for_each_of_its_parts():
    """Sums are Megatron's: forward, recomputed (but for the last part, which nothing needs) and backward."""
    sums, others = Counter(), set()
    program = PjrtEngine(Mesh.parse("data:4,model:2")).BuildStep(_gradients())
    for line in program.HloText().splitlines():
        match = re.search(r"= .*? (all-\w+|collective-\w+|reduce-scatter)\(", line)
        if not match:
            continue
        name = re.search(r'op_name="([^"]*)"', line)[1]
        if match[1] != "all-reduce":
            others.add((match[1], name.rpartition("/")[2]))
        elif part := re.search(r"(en|de)coder/blocks/body/layers_0/(\w+)/einsum_\d/Einsum$", name):
            sums[f"{part[1]}coder {part[2]}"] += "gradient_tape" not in name
    assert sums == {
        "encoder self_atten": 2,
        "encoder ffn": 1,
        "decoder self_atten": 2,
        "decoder cross_atten": 2,
        "decoder ffn": 1,
    }
    # For the accuracy: the best score and id of each part of the vocabulary, for each token.
    assert others == {("all-gather", "ArgMax")}


def test_the_pipeline_has_the_model_of_t96l_and_32_micro_batches_on_each_core():
    """Weights and batch are the same, in 8 stages of 6 layers of each stack, and with 4 rows in a micro-batch."""
    whole, pipe = registry.GetParams("mt.T96L"), registry.GetParams("mt.T96LPipe8")
    specs, ours = (p.task.Instantiate().VariableSpecs() for p in (whole, pipe))
    assert [(path, s.shape) for path, s in specs.FlattenItems()] == [
        (path, s.shape) for path, s in ours.FlattenItems()
    ]
    assert pipe.input.ToText() == whole.input.ToText()
    mesh = Mesh.parse(pipe.train.mesh)
    settings, split = settings_of(pipe.task), pipe.task.activation_split
    replicas = settings.Replicas(split, mesh)
    stacks = [("encoder", pipe.task.num_encoder_layers), ("decoder", pipe.task.num_decoder_layers)]
    schedule = schedule_on(settings, stacks, split, mesh)
    assert (schedule.stages, schedule.micro_batches, replicas) == (8, 32, 256)
    assert pipe.input.batch_size // pipe.task.pipeline.micro_batches == 4
    assert [schedule.InputsKept(stack) for stack in (0, 1)] == [39, 39]
