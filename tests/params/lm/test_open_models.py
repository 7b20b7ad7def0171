"""Published models have the parameters that follow from their published sizes, to the unit."""

import pytest

from lingvo_moe.core.config import registry
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.inspect import active_parameters, count_parameters
from lingvo_moe.core.task.meshes import meshes_for_inference

# Parameters; active ones with both embeddings; and without that of the input, where another source states them.
TABLE = {
    "Llama31_8B": (8_030_261_248, 8_030_261_248, None),
    "Llama31_70B": (70_553_706_496, 70_553_706_496, None),
    "Llama31_405B": (405_853_388_800, 405_853_388_800, None),
    "SmolLM2_135M": (134_515_008, 134_515_008, None),
    "Mistral7B": (7_241_732_096, 7_241_732_096, None),
    "Qwen3_8B": (8_190_735_360, 8_190_735_360, None),
    "Mixtral8x7B": (46_702_792_704, 12_879_925_248, None),
    "Mixtral8x22B": (140_630_071_296, 39_161_468_928, None),
    "OLMoE1B7B": (6_919_161_856, 1_282_017_280, None),
    "Qwen3_30B_A3B": (30_532_122_624, 3_353_032_704, 3_041_867_776),
    "Qwen3_235B_A22B": (235_093_634_560, 22_190_763_520, None),
    "DeepSeekV2Lite": (15_706_484_224, 2_661_150_208, 2_451_435_008),
    "DeepSeekV3": (671_026_419_200, 37_552_297_472, 36_625_618_432),
    "KimiK2": (1_026_408_232_448, 32_861_500_928, None),
    "GptOss20B": (20_914_757_184, 4_187_440_704, 3_608_307_264),
    "GptOss120B": (116_829_156_672, 5_711_982_912, 5_132_849_472),
    "Llama4Scout": (107_769_861_120, 17_172_894_720, None),
    "Llama4Maverick": (400_711_848_960, 17_184_691_200, None),
}


@pytest.mark.parametrize("name", TABLE)
def test_counts_are_exact(name):
    total, active, without = TABLE[name]
    task = registry.GetParams(f"lm.{name}").task.Instantiate()
    assert count_parameters(task.VariableSpecs().Flatten()) == total
    counts = list(active_parameters(task).values())
    table = task.p.vocab_size * task.p.model_dim
    tables = range(1 if task.p.tied_softmax else 2)
    assert counts == [active, *(active - (i + 1) * table for i in tables)]
    assert without in (None, active - table)
    assert f"{total:,} parameters" in registry.GetExperiment(f"lm.{name}").__doc__


def test_the_head_of_deepseek_v3_has_a_block_and_a_projection_more():
    task = registry.GetParams("lm.DeepSeekV3", "task.multi_token_weight=0.3").task.Instantiate()
    more = count_parameters(task.VariableSpecs().Flatten()) - TABLE["DeepSeekV3"][0]
    assert more == 11_610_068_224


# Parameters, and those of parts that we lack, with which Lingvo states the sum.
MEASURED = {
    "DenseLm128B8x8": (137_702_154_240, 32 * 128 * 64, 137_702_416_384),
    "DenseLm128B32x32": (137_702_154_240, 32 * 128 * 64, 137_702_416_384),
    "DenseLm175B32x32": (174_341_763_072, 2048 * 12288, 174_366_928_896),
    "DenseLm12kWide41BAdam16x16": (43_880_361_984, 2048 * 12288, 43_905_527_808),
    "MaxText16B": (15_831_666_688, 0, 15_831_666_688),
    "MaxText22B": (22_137_083_904, 0, 22_137_083_904),
    "MaxText32B": (31_663_333_376, 0, 31_663_333_376),
    "MaxText64B": (62_802_370_560, 0, 62_802_370_560),
    "MaxText128B": (125_079_396_352, 0, 125_079_396_352),
    "MaxText512B": (499_268_993_024, 0, 499_268_993_024),
}


@pytest.mark.parametrize("name", MEASURED)
def test_counts_of_measured_models_are_exact(name):
    total, lacking, published = MEASURED[name]
    params = registry.GetParams(f"lm.{name}")
    assert count_parameters(params.task.Instantiate().VariableSpecs().Flatten()) == total
    assert total + lacking == published
    text = registry.GetExperiment(f"lm.{name}").__doc__
    assert f"{total:,} parameters" in text and f"{published:,}" in text
    assert params.input.batch_size % Mesh.parse(params.train.mesh).axis_size("data") == 0


@pytest.mark.parametrize("name", ["Mixtral8x7B", "OLMoE1B7B", "Qwen3_30B_A3B", "Llama31_8B"])
@pytest.mark.parametrize("dispatcher", ["dropless", "einsum"])
def test_model_flops_are_those_of_mfu(name, dispatcher):
    """PaLM's appendix B: 6 for each active parameter and token but the table's, and 12 L N K T a token of attention."""
    slots = "task.moe.capacity_factor=16;" * (
        dispatcher == "einsum"
    )  # enough for all, most of them empty
    of_experts = f"{slots}task.moe.dispatcher={dispatcher}" * ("Llama" not in name)
    params = registry.GetParams(f"lm.{name}", of_experts)
    task, p, length = params.task.Instantiate(), params.task, params.input.target_length
    active = active_parameters(task)["without that of the input"]
    heads = p.num_heads * (p.key_dim or p.model_dim // p.num_heads)
    want = params.input.batch_size * length * (6 * active + 12 * p.num_layers * heads * length)
    assert task.Costs().StepFlops(params.input.Instantiate().BatchSpec()) == pytest.approx(
        want, rel=1e-3
    )


def test_devices_share_heads_in_inference_as_far_as_they_divide():
    def meshes(name, text, count):
        found = meshes_for_inference(registry.GetParams(f"lm.{name}"), text, count)
        return [str(mesh) for mesh in found]

    assert meshes("Llama31_8B", "", 16) == [
        "data:2,model:8",
        "data:4,model:4",
        "data:8,model:2",
        "data:16,model:1",
    ]
    assert meshes("Mixtral8x7B", "", 3) == ["expert:1,model:3", "expert:3,model:1"]
    assert meshes("Llama31_8B", "data:2,model:1", 2) == ["data:2,model:1"]
    assert meshes("Tiny", "", 8) == ["data:8"]
