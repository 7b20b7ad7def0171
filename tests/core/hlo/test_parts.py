"""The part of the model that an operation's name belongs to."""

import pytest

from lingvo_moe.core.hlo import parts

WRAPPER = "jit(call)/call_exported/jit(<unnamed function>)/call_tensorflow/"
PAIR = "m4/encoder/blocks/body/layers_1/"
RESNET = "resnet/network/"
MOE = frozenset({"m4.encoder.blocks.body.layers_1"})


@pytest.mark.parametrize(
    ("op_name", "part", "layer", "phase"),
    [
        (PAIR + "ffn/router/Softmax", "gating", "encoder.moe", "forward"),
        (PAIR + "ffn/dispatcher/einsum_1/Einsum", "dispatch_combine", "encoder.moe", "forward"),
        (PAIR + "ffn/experts/einsum/Einsum", "experts", "encoder.moe", "forward"),
        (PAIR + "ffn/Reshape", "dispatch_combine", "encoder.moe", "forward"),
        (PAIR + "self_atten/Softmax", "attention", "encoder.moe", "forward"),
        (PAIR + "ffn_norm/mul_1", "normalization", "encoder.moe", "forward"),
        (PAIR + "add_3", "residual", "encoder.moe", "forward"),
        ("m4/decoder/blocks/body/layers_0/ffn/Relu", "dense_ffn", "decoder.dense", "forward"),
        (
            "m4/decoder/blocks/body/layers_0/cross_atten/x/Y",
            "attention",
            "decoder.dense",
            "forward",
        ),
        ("m4/decoder/final_norm/Rsqrt", "normalization", "decoder", "forward"),
        ("m4/source_embedding/GatherV2", "embedding", "source_embedding", "forward"),
        ("m4/softmax/einsum/Einsum", "softmax", "softmax", "forward"),
        (RESNET + "stage_0/stages_0/reduce/conv/Conv2D", "convolution", "reduce", "forward"),
        (RESNET + "stage_0/stages_0/reduce/norm/Sum", "normalization", "reduce", "forward"),
        (RESNET + "stem/pool/Maximum_1", "pooling", "stem", "forward"),
        ("resnet/head/einsum/Einsum", "classifier", "", "forward"),
        ("m4/ReduceLogSumExp/Max", "loss", "", "forward"),
        ("PartitionedCall/m4/Sum_3", "loss", "", "forward"),
        ("m4/LogicalAnd_2", "attention", "", "forward"),
        (
            "m4/encoder/blocks/while/TensorArrayV2Write/TensorListSetItem",
            "loop",
            "encoder",
            "forward",
        ),
        ("call.2/m4/decoder/blocks/while/Less", "loop", "decoder", "forward"),
        ("gradient_tape/m4/softmax/einsum/Einsum", "softmax", "softmax", "backward"),
        (
            "gradient_tape/" + PAIR + "ffn/experts/einsum/Einsum",
            "experts",
            "encoder.moe",
            "backward",
        ),
        ("PartitionedCall/UnsortedSegmentSum_1", "embedding", "", "backward"),
        ("PartitionedCall/backward/IsInf", "loss", "", "backward"),
        ("backward/while_1/GatherV2_3", "loop", "", "backward"),
        ("optimizer/" + PAIR + "ffn/experts/wi/mul", "optimizer", "encoder.moe", "optimizer"),
        ("PartitionedCall/optimizer/Sum_4", "optimizer", "", "optimizer"),
        ("optimizer/m4/target_embedding/table/Mean", "optimizer", "target_embedding", "optimizer"),
        ("BitwiseXor", "other", "", "forward"),
        ("", "other", "", "forward"),
    ],
)
def test_places(op_name, part, layer, phase):
    for name in (op_name, WRAPPER + op_name):
        found = parts.place(name, False, MOE)
        assert (found.part, found.layer, found.phase) == (part, layer, phase)
        assert found.part in parts.PARTS and found.phase in parts.PHASES


def test_a_forward_name_in_a_backward_loop_is_a_recomputation():
    found = parts.place(PAIR + "ffn/experts/Relu", True, MOE)
    assert found.phase == "recompute"
    assert found.path == "m4.encoder.blocks.body.layers_1.ffn.experts"
    assert parts.place("gradient_tape/" + PAIR + "mul/Mul", True).phase == "backward"
    assert parts.place("optimizer/m4/softmax/mul", True).phase == "optimizer"


def test_of_joined_names_the_first_clear_one_counts():
    joined = (
        f"{WRAPPER}backward/while/Mul;PartitionedCall/gradient_tape/{PAIR}self_atten/einsum/Einsum"
    )
    assert parts.place(joined, True).part == "attention"


def test_names_of_what_was_combined():
    inner = f"PartitionedCall/backward/while;gradient_tape/{PAIR}ffn/experts/Einsum:m4/Sum_3"
    found = parts.place(f"{WRAPPER}({inner})", False)
    assert (found.part, found.phase) == ("experts", "backward")


def test_names_do_not_depend_on_the_models():
    mine = parts.place("other_model/stack/blocks/body/layers_3/self_atten/MatMul", False)
    assert (mine.part, mine.layer) == ("attention", "stack.dense")


def test_a_layer_with_a_router_is_a_mixture_of_experts():
    names = [
        f"optimizer/{PAIR}ffn/router/wg/mul",
        f"{WRAPPER}gradient_tape/{PAIR}ffn/experts/Einsum",
        "m4/encoder/blocks/body/layers_0/ffn/Relu",
        "m4/encoder/blocks/body/layers_0/self_norm/scale",
    ]
    assert parts.moe_layers(names) == MOE
    assert parts.place(PAIR + "self_atten/Softmax", False).layer == "encoder.dense"


@pytest.mark.parametrize(
    "op_name, operations",
    [
        ("jit(f)/call_tensorflow/m4/ffn/einsum/Einsum", ("m4/ffn/einsum/Einsum",)),
        ("jit(f)/call_tensorflow/big/Einsum;PartitionedCall/big/Einsum", ("big/Einsum",)),
        ("jit(f)/call_tensorflow/a/Mul;PartitionedCall/a/Add", ("a/Mul", "a/Add")),
        ("jit(call)/call_exported/jit(<unnamed function>)/call_tensorflow", ()),
        ("args[2]", ("args[2]",)),
        ("", ()),
    ],
)
def test_operations_that_an_instruction_stands_for(op_name, operations):
    assert parts.operations(op_name) == operations
