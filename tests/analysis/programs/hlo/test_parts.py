"""The part of the model that an operation's name belongs to."""

import pytest

from lingvo_moe.analysis.programs.hlo import parts
from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.config import registry
from tests.tiny_layers import tiny_layers

WRAPPER = "jit(call)/call_exported/jit(<unnamed function>)/call_tensorflow/"
PAIR = "m4/encoder/blocks/body/layers_1/"
DENSE = "m4/decoder/blocks/body/layers_0/"
LAYERS = tiny_layers("m4")


@pytest.mark.parametrize(("op_name", "part", "layer", "phase"), [
    (PAIR + "ffn/router/Softmax", "gating", "encoder.moe", "forward"),
    (PAIR + "ffn/experts/einsum/Einsum", "experts", "encoder.moe", "forward"),
    (PAIR + "ffn/Reshape", "dispatch_combine", "encoder.moe", "forward"),
    (PAIR + "self_atten/Softmax", "attention", "encoder.moe", "forward"),
    (PAIR + "ffn_norm/mul_1", "normalization", "encoder.moe", "forward"),
    (PAIR + "add_3", "residual", "encoder.moe", "forward"),
    (DENSE + "ffn/Relu", "dense_ffn", "decoder.dense", "forward"),
    ("m4/decoder/final_norm/Rsqrt", "normalization", "decoder", "forward"),
    ("m4/source_embedding/GatherV2", "embedding", "source_embedding", "forward"),
    ("m4/softmax/einsum/Einsum", "softmax", "softmax", "forward"),
    ("m4/Loss/ReduceLogSumExp/Max", "loss", "", "forward"),
    ("m4/Masks/LogicalAnd_2", "attention", "", "forward"),
    ("m4/Inputs/SelectV2", "embedding", "", "forward"),
    ("m4/LogicalAnd", "other", "", "forward"),
    ("m4/encoder/blocks/while/Write/TensorListSetItem", "loop", "encoder", "forward"),
    (f"gradient_tape/{PAIR}ffn/experts/Einsum", "experts", "encoder.moe", "backward"),
    ("PartitionedCall/gradient_tape/m4/source_embedding/UnsortedSegmentSum",
        "embedding", "source_embedding", "backward"),
    ("PartitionedCall/backward/IsInf", "loop", "", "backward"),
    ("backward/while_1/GatherV2_3", "loop", "", "backward"),
    ("optimizer/" + PAIR + "ffn/experts/wi/mul", "optimizer", "encoder.moe", "optimizer"),
    ("PartitionedCall/optimizer/Sum_4", "optimizer", "", "optimizer"),
    ("BitwiseXor", "other", "", "forward"),
    ("", "other", "", "forward"),
])  # fmt: skip
def test_places(op_name, part, layer, phase):
    for name in (op_name, WRAPPER + op_name):
        found = LAYERS.place(name, False)
        assert (found.part, found.layer, found.phase) == (part, layer, phase)
        assert found.phase in parts.PHASES
        assert found.phase == parts.phase(name, False)


def test_a_forward_name_in_a_backward_loop_is_a_recomputation():
    found = LAYERS.place(PAIR + "ffn/experts/Relu", True)
    assert found.phase == "recompute"
    assert found.path == "m4.encoder.blocks.body.layers_1.ffn.experts"
    assert LAYERS.place("gradient_tape/" + PAIR + "mul/Mul", True).phase == "backward"
    assert LAYERS.place("optimizer/m4/softmax/mul", True).phase == "optimizer"


def test_of_joined_names_the_first_clear_one_counts():
    joined = (
        f"{WRAPPER}backward/while/Mul;PartitionedCall/gradient_tape/{PAIR}self_atten/einsum/Einsum"
    )
    assert LAYERS.place(joined, True).part == "attention"


def test_names_of_what_was_combined():
    inner = f"PartitionedCall/backward/while;gradient_tape/{PAIR}ffn/experts/Einsum:m4/Sum_3"
    found = LAYERS.place(f"{WRAPPER}({inner})", False)
    assert (found.part, found.phase) == ("experts", "backward")


def test_stages_of_images_declare_their_parts():
    task = registry.GetParams("image.Digits").task.Instantiate()
    found = {k.removeprefix(task.path): v for k, v in task.DeclaredParts().items()}
    assert found[".network.stage_0.conv.norm"] == ("normalization", "stage_0")
    assert found[".network.stage_0.conv.conv"] == ("convolution", "stage_0")
    assert found[".network.stage_0.pool"] == ("pooling", "stage_0")
    assert found[".head"] == ("classifier", "")


def test_a_layer_of_ones_own_is_a_part_of_plans():
    class Recurrence(BaseLayer):
        PART = "recurrence"

    layers = parts.Layers(Recurrence.Params().Set(name="mine").Instantiate().DeclaredParts())
    assert layers.place(f"{WRAPPER}gradient_tape/mine/scan/while/Mul", False).part == "recurrence"


@pytest.mark.parametrize("op_name, operations", [
    ("jit(f)/call_tensorflow/m4/ffn/einsum/Einsum", ("m4/ffn/einsum/Einsum",)),
    ("jit(f)/call_tensorflow/big/Einsum;PartitionedCall/big/Einsum", ("big/Einsum",)),
    ("jit(f)/call_tensorflow/a/Mul;PartitionedCall/a/Add", ("a/Mul", "a/Add")),
    ("jit(call)/call_exported/jit(<unnamed function>)/call_tensorflow", ()),
    ("args[2]", ("args[2]",)),
    ("", ()),
])  # fmt: skip
def test_operations_that_an_instruction_stands_for(op_name, operations):
    assert parts.operations(op_name) == operations
