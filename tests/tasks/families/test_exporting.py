"""Weights that were imported come out byte for byte; those that were trained, with all of their experts."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from equivalence import assert_same
from published import assert_same_tensors, tensors_of, write_texts

from lingvo_moe import trainer
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST
from lingvo_moe.core.weights.safetensors_file import write_safetensors
from lingvo_moe.core.weights.source import Entry, WeightsError
from lingvo_moe.tasks.families import exporting
from lingvo_moe.tasks.families.exporting import ExportOptions, export_checkpoint
from lingvo_moe.tasks.families.importing import (
    FAMILIES,
    import_checkpoint,
    open_published,
    params_of,
)
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from tools import export_checkpoint as command

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="needs tokenizers: pip install --no-deps -r requirements-tokenizers.txt",
)
TESTDATA = Path(__file__).parent / "testdata"
# MXFP4 comes out as bfloat16.
NAMES = sorted({path.parent.name for path in TESTDATA.glob("*/config.json")} - {"gpt_oss_mxfp4"})
SMALL = (
    "task.vocab_size=38;input.target_vocab_size=37;task.model_dim=16;task.hidden_dim=8;task.expert_hidden_dim=8;"
    "task.num_layers=1;task.num_heads=4;task.num_kv_heads=2;task.key_dim=4;task.moe.router.k=2;"
    "input.batch_size=8;input.target_length=16;task.fprop_dtype=float32"
)


def _quiet(line):
    pass


def _import(directory, run):
    import_checkpoint(open_published(directory), run, _quiet)
    return TextRunDir(run)


def _export(run, output, **options):
    return export_checkpoint(run, output, NEWEST, ExportOptions(**options), _quiet)


def _theta(run):
    return load_theta(run, run.Task())[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_import_comes_out_byte_for_byte(name, checkpoint, tmp_path):
    directory = checkpoint(name)
    left_out = import_checkpoint(open_published(directory), tmp_path / "run", _quiet)
    _export(TextRunDir(tmp_path / "run"), tmp_path / "out")
    config, before = (
        json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", directory)
    )
    assert config == before
    there = tensors_of(directory)
    if name == "m2m100":  # an old file, with copies of the table, and sinusoids
        for tensor in left_out:
            del there[tensor]
    assert_same_tensors(there, tensors_of(tmp_path / "out"))
    for path in directory.iterdir():
        if path.name in FAMILIES[config["model_type"]].FILES:
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert not (tmp_path / "out" / "tokenizer.model").exists()


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("Llama31_8B", "llama"), ("SmolLM2_135M", "llama"), ("Mistral7B", "mistral")),
        *(("Mixtral8x7B", "mixtral"), ("Qwen3_8B", "qwen3"), ("Qwen3_30B_A3B", "qwen3_moe")),
        *(("OLMoE1B7B", "olmoe"), ("Llama4Scout", "llama4_text")),
        ("Llama4Maverick", "llama4_text"),
    ],
)
def test_a_config_says_a_published_model_and_back(model, kind):
    params, family = registry.GetParams(f"lm.{model}"), FAMILIES[kind]
    said = params_of(family, family.Config(params), "config.json")
    assert exporting._differing(said, params) == []


# Keys as files of the models have them, beside those of sizes.
SAID = {
    ("Qwen3_30B_A3B", "qwen3_moe"): {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    ("Llama4Scout", "llama4_text"): {
        "_attn_implementation_autoset": True,
        "attn_temperature_tuning": 4,
        "cache_implementation": "hybrid",
        "eos_token_id": [200001, 200007, 200008],
        "for_llm_compressor": False,
        "moe_layers": list(range(48)),
        "no_rope_layers": [1, 1, 1, 0] * 12,
    },
}


@pytest.mark.parametrize(("model", "kind"), SAID)
def test_keys_of_published_files_say_the_model(model, kind):
    params, family = registry.GetParams(f"lm.{model}"), FAMILIES[kind]
    config = {**family.Config(params), **SAID[model, kind]}
    said = params_of(family, config, "config.json")
    assert exporting._differing(said, params) == []


def test_types_of_tensors_a_licence_and_several_files(checkpoint, tmp_path):
    directory = checkpoint("mixtral")
    tensors = tensors_of(directory)
    types = dict.fromkeys(tensors, "bfloat16") | {"model.norm.weight": "float32"}
    types["model.layers.1.self_attn.q_proj.weight"] = "float16"
    tensors = {name: x.astype(types[name]) for name, x in tensors.items()}
    with open(directory / "model.safetensors", "wb") as file:
        entries = {name: Entry(x.shape, types[name]) for name, x in tensors.items()}
        write_safetensors(file, entries, tensors.values())
    (directory / "LICENSE").write_text("free")
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    _import(directory, tmp_path / "run")
    flags = [f"--logdir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}"]
    assert command.main([*flags, "--max_shard_bytes=9000"]) == 0
    assert_same_tensors(tensors, tensors_of(tmp_path / "out"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    others = {name for name in names if not name.startswith("model")}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert "model-00001-of-00007.safetensors" in names
    assert others == {"LICENSE", "config.json", *tokenizer}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    again = _import(tmp_path / "out", tmp_path / "again")
    assert again.OpenVocabularies().target.Encode("<3>") == [3]
    assert again.OpenVocabularies().target.other_ends == (5,)


def test_all_experts_come_out_of_a_step_over_eight_devices(checkpoint, tmp_path):
    """The case of NVIDIA-NeMo/Megatron-Bridge#1716: experts that lie on other devices were lost.

    The model is no import: its embeddings are multiplied by a number that Mixtral's are not.
    """
    texts, run = write_texts(tmp_path / "texts"), tmp_path / "run"
    override = f"{SMALL};task.num_experts=8;input.vocab_dir={checkpoint('mixtral')}"
    flags = [
        "--model=lm.ImportedMixtral",
        f"--data_dir={texts}",
        f"--logdir={run}",
        "--max_steps=1",
    ]
    flags += ["--num_devices=8", "--mesh=expert:8,model:1", f"--model_params_override={override}"]
    assert trainer.main(flags) == 0
    run = TextRunDir(run)
    _export(run, tmp_path / "out")
    assert tensors_of(tmp_path / "out")["model.layers.0.block_sparse_moe.experts.7.w1.weight"].any()
    theta = _theta(_import(tmp_path / "out", tmp_path / "again"))
    expected = _theta(run)
    expected.embedding.table = expected.embedding.table * np.float32(4)
    assert_same(theta, expected)


def test_a_model_of_no_family_is_refused_by_what_differs(checkpoint, tmp_path):
    run = _import(checkpoint("llama_tied"), tmp_path / "run")
    params = run.Params()
    params.task.activation = "gelu"
    run.Params = lambda: params
    with pytest.raises(WeightsError, match=r"task.activation='gelu' \(there 'swiglu'\)$"):
        _export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(WeightsError, match=r"no family .* differs in .*decoder_ffn_dim=32"):
        exporting.describe(run, registry.GetParams("mt.M4Tiny"))
