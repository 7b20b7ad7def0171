"""Records small checkpoints as the `transformers` library writes them, and the logits that it computes, for tests.

Weights are random, sizes odd. Each directory in tests/tasks/families/testdata/ has config.json, the weights in
safetensors or torch.save's format, and expected.npz: ids [B,T], logits [B,T,V], and the 200 tokens of greedy search.
llama_tied.gguf is llama_tied as llama.cpp stores it; the library `transformers` has read it back. blocks.gguf, in
tests/core/weights/testdata/, has a tensor of each of GGML's types by the library `gguf`, and blocks.npz their values.
defaults.json has what each family's class of config.json has where keys are left out.
To record again, in an environment of its own (recorded with transformers 5.24.0 and torch 2.13.0):

    pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate
    python benchmarks/peers/record_published.py
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

TESTS = Path(__file__).parents[2] / "tests"
OUT = TESTS / "tasks/families/testdata"
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"]
SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "rope_theta": 100.0}
SQUARE = {"num_experts": 5, "intermediate_size": SIZES["hidden_size"], "rope_theta": 100.0}
LLAMA4 = {
    "hidden_size": 24,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 28,
    "num_local_experts": 3,
    "attention_chunk_size": 5,
    "floor_scale": 2,
}


def moe_configs() -> dict[str, PreTrainedConfig]:
    """Small models of other families, each option in two of its values; some with square experts."""
    sizes = {**SIZES, "head_dim": 8}
    return {
        "mistral": MistralConfig(**SIZES, sliding_window=3),
        "qwen3": Qwen3Config(**sizes, attention_bias=True, rope_theta=100.0),
        "qwen3_moe": Qwen3MoeConfig(
            **sizes,
            **EXPERTS,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            tie_word_embeddings=True,
        ),
        "qwen3_moe_sparse": Qwen3MoeConfig(
            **{**sizes, "num_hidden_layers": 4},
            **EXPERTS,
            moe_intermediate_size=12,
            decoder_sparse_step=2,
        ),
        "olmoe": OlmoeConfig(**{**SIZES, **SQUARE}, num_experts_per_tok=2),
        "olmoe_normalized": OlmoeConfig(
            **{**SIZES, **EXPERTS, "num_experts_per_tok": 3, "norm_topk_prob": True},
            tie_word_embeddings=True,
        ),
        "llama4": Llama4TextConfig(
            **{**SIZES, **LLAMA4, "intermediate_size": 24, "num_hidden_layers": 2},
            no_rope_layer_interval=2,
            rope_parameters=LLAMA3,
        ),
        "llama4_interleaved": Llama4TextConfig(
            **{**SIZES, **LLAMA4, "interleave_moe_layer_step": 2},
            use_qk_norm=False,
            attn_temperature_tuning=False,
        ),
    }


def record(name: str, model: torch.nn.Module, pickled: bool = False) -> None:
    """Draws the weights of a model, and writes its directory.

    The first two experts of olmoe have gates that are equal in bfloat16 alone.
    """
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1.0 + 0.3 * noise if "norm" in path else 0.3 * noise)
            if name == "olmoe" and path.endswith("mlp.gate.weight"):
                weight[0] = weight[0].bfloat16()
                weight[1] = weight[0] * (1 + 2**-10)
    out = OUT / name
    model.eval().save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    if pickled:
        (out / "model.safetensors").unlink()
        torch.save(model.state_dict(), out / "pytorch_model.bin")
    ids = torch.randint(3, SIZES["vocab_size"], (2, 7), generator=generator)
    with torch.no_grad():
        logits, tokens = model(ids).logits, ids
        for _ in range(200):
            best = model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], 1)
    greedy = tokens[:, ids.shape[1] :]
    arrays = {"ids": ids, "logits": logits, "greedy": greedy}
    np.savez_compressed(out / "expected.npz", **{n: x.numpy() for n, x in arrays.items()})


def record_defaults() -> None:
    """Writes the keys of each class, but for those that all have."""
    kinds = "llama mistral mixtral qwen3 qwen3_moe olmoe llama4_text deepseek_v2 deepseek_v3 gpt_oss m2m_100 nllb-moe"
    common = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    defaults = {kind: AutoConfig.for_model(kind).to_dict() for kind in kinds.split()}
    for config in defaults.values():
        for key in common & config.keys():
            del config[key]
    (OUT / "defaults.json").write_text(json.dumps(defaults, indent=0, sort_keys=True) + "\n")


def record_blocks() -> None:
    """Writes a tensor of random bytes, whose scales are small, of each type."""
    out, rng = TESTS / "core/weights/testdata", np.random.default_rng(0)
    out.mkdir(exist_ok=True)
    writer, values = gguf.GGUFWriter(out / "blocks.gguf", "llama"), {}
    writer.add_array("list", ["a", "\u00e9"])
    writer.add_float32("number", 0.5)
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        count, size = gguf.GGML_QUANT_SIZES[kind]
        if count == 1:
            data = rng.normal(size=(3, 4)).astype(np.float32)
            data = gguf.quants.quantize(data, kind)
        else:
            data = rng.integers(0, 256, (3, 2, size), np.uint8)
            scales = {"Q4_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2)}.get(name, (0,))
            for at in scales:
                scale = rng.normal(size=(3, 2, 1)).astype(np.float16)
                data[:, :, at : at + 2] = scale.view(np.uint8)
            data = data.reshape(3, -1)
        writer.add_tensor(name, data, raw_dtype=kind)
        values[name] = gguf.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.savez_compressed(out / "blocks.npz", **values)


def record_gguf(model: LlamaForCausalLM) -> None:
    """Writes a model with names and pairs of numbers as llama.cpp has them, and a tokenizer of bytes."""
    c, path = model.config, OUT / "llama_tied.gguf"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_vocab_size(c.vocab_size)
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(chr(ord("A") + i) for i in range(c.vocab_size - 5)),
        "AB",
        "ABA",
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (c.vocab_size - 3)
    )
    writer.add_token_merges(["A B", "AB A"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    weights = model.state_dict()
    del weights["lm_head.weight"]  # a copy
    for name, weight in weights.items():
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
        values = weight.numpy()
        if (kind := name.split(".")[-2]) in heads:
            halves = values.reshape(heads[kind], 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(values)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    back = AutoModelForCausalLM.from_pretrained(OUT, gguf_file=path.name, dtype=torch.float32)
    for name, weight in back.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


if __name__ == "__main__":
    record_blocks()
    record_defaults()
    torch.use_deterministic_algorithms(True)
    tied = LlamaConfig(**SIZES, tie_word_embeddings=True, rope_theta=100.0)
    model = LlamaForCausalLM(tied)
    record("llama_tied", model)
    record_gguf(model)
    scaled = LlamaConfig(**SIZES, head_dim=8, rope_parameters=LLAMA3, rms_norm_eps=1e-5)
    record("llama3", LlamaForCausalLM(scaled), pickled=True)
    experts = MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2, rope_theta=100.0)
    record("mixtral", MixtralForCausalLM(experts))
    for name, config in moe_configs().items():
        record(name, AutoModelForCausalLM.from_config(config))
