"""Records small checkpoints of DeepSeek-V2, DeepSeek-V3, Kimi K2 and gpt-oss, as record_published.py does, for tests.

deepseek_v3 has the head for the token after the next, as it is published (`transformers` leaves it out when it saves).
Its expected.npz also has `nll`, the losses of the model and of the head, sums over known tokens divided by all; and
logits for other values of norm_topk_prob and routed_scaling_factor, as logits_<norm>_<scale>. The biases of its experts
are near -2, so all scores that choose are negative. gpt_oss_mxfp4 has random blocks; its logits are those of the
library's own values for them. In the environment of record_published.py:

    python benchmarks/peers/record_deepseek.py
"""

import json

import numpy as np
import torch
from record_published import OUT, SIZES, record
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Mxfp4Config,
)
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 40.0}
YARN |= {"original_max_position_embeddings": 16}
LATENT = SIZES | {
    "num_key_value_heads": SIZES["num_attention_heads"],
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
}
GPT_OSS = SIZES | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 6,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 3,
    "rope_parameters": YARN | {"factor": 4.0, "truncate": False},
}


def eager(model: torch.nn.Module) -> torch.nn.Module:
    """The model, whose experts are computed by products that take any size."""
    model.set_experts_implementation("eager")
    return model


def published(name: str, tensors: dict, **keys: object) -> None:
    """Adds tensors to a checkpoint, and keys to its config.json."""
    path, config = OUT / name / "model.safetensors", OUT / name / "config.json"
    contiguous = {n: x.detach().clone().contiguous() for n, x in tensors.items()}
    save_file(load_file(path) | contiguous, path, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | keys, indent=2))


def add_arrays(name: str, arrays: dict[str, torch.Tensor]) -> None:
    """Adds arrays to expected.npz of a checkpoint."""
    path = OUT / name / "expected.npz"
    with np.load(path) as there:
        whole = {**there, **{n: x.detach().numpy() for n, x in arrays.items()}}
    np.savez_compressed(path, **whole)


def set_biases(model: torch.nn.Module, mean: float) -> None:
    """Draws the biases of the experts."""
    generator = torch.Generator().manual_seed(0)
    for path, bias in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            bias.copy_(mean + 0.3 * torch.randn(bias.shape, generator=generator))


def record_v3() -> None:
    """Writes deepseek_v3, with its head."""
    yarn = YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}
    kind = {"q_lora_rank": 9, "n_shared_experts": 2, "n_group": 4, "topk_group": 2}
    config = DeepseekV3Config(
        **LATENT, **kind, first_k_dense_replace=1, rope_parameters=yarn, rope_theta=100.0
    )
    name, model = "deepseek_v3", eager(DeepseekV3ForCausalLM(config))
    set_biases(model, -2.0)
    record(name, model)
    head = eager(MtpModel(model, 1)).eval()
    set_biases(head.layers[0], -2.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, weight in head.layers[0].named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1.0 + 0.3 * noise if "norm" in path else 0.3 * noise)
    expected = np.load(OUT / name / "expected.npz")
    ids = torch.tensor(np.concatenate([expected["ids"], expected["greedy"]], 1)[:, :12])
    inputs, ahead = ids[:, :-1], torch.arange(1, ids.shape[1]).expand(len(ids), -1)
    with torch.no_grad():
        x = model.model(input_ids=inputs).last_hidden_state
        y = head.forward_layer(0, x, ahead, None, input_ids=ids[:, 1:])
        nll = []
        for skipped, hidden in enumerate((x, y)):
            logits = model.lm_head(hidden)[:, : inputs.shape[1] - skipped].flatten(0, 1)
            labels = ids[:, 1 + skipped :].flatten()
            nll.append(cross_entropy(logits, labels, reduction="sum") / inputs.numel())
    arrays = {"multi_token_ids": ids, "nll": torch.stack(nll)}
    routers = [m for m in model.modules() if isinstance(m, DeepseekV3TopkRouter)]
    for norm in (False, True):
        for scale in (1.0, 2.5):
            for router in routers:
                router.norm_topk_prob, router.routed_scaling_factor = norm, scale
            with torch.no_grad():
                logits = model(torch.tensor(expected["ids"])).logits
            arrays[f"logits_{norm}_{scale}"] = logits
    add_arrays(name, arrays)
    layer = f"model.layers.{config.num_hidden_layers}."
    new = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
    tensors = {}
    for path, values in head.layers[0].state_dict().items():
        for ours, theirs in new.items():
            path = path.replace(ours, theirs)
        merged = path.endswith(("gate_up_proj", "down_proj")) and "experts" in path
        if not merged or "shared" in path:
            tensors[layer + path] = values
            continue
        stem = path.rpartition(".")[0]
        for expert, one in enumerate(values):
            names = ("gate_proj", "up_proj") if path.endswith("gate_up_proj") else ("down_proj",)
            for part, matrix in zip(names, one.chunk(len(names)), strict=True):
                tensors[f"{layer}{stem}.{expert}.{part}.weight"] = matrix
    tensors[f"{layer}embed_tokens.weight"] = model.model.embed_tokens.weight
    tensors[f"{layer}shared_head.head.weight"] = model.lm_head.weight
    published(name, tensors, num_nextn_predict_layers=1)


def record_kimi() -> None:
    """Writes kimi_k2: V3 without groups, with other options."""
    kind = {"q_lora_rank": None, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    more = {"norm_topk_prob": False, "routed_scaling_factor": 1.5, "first_k_dense_replace": 2}
    config = DeepseekV3Config(**LATENT, **kind, **more, rope_theta=100.0)
    model = eager(DeepseekV3ForCausalLM(config))
    set_biases(model, 0.0)
    record("kimi_k2", model)
    published("kimi_k2", {}, model_type="kimi_k2", num_nextn_predict_layers=0)


def record_v2() -> None:
    """Writes deepseek_v2 and deepseek_v2_lite."""
    yarn = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
    shared = {"first_k_dense_replace": 1, "rope_parameters": yarn, "rope_theta": 100.0}
    shared |= LATENT | {"qk_nope_head_dim": 6, "kv_lora_rank": 8}  # even, as its positions need it
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    kinds = {
        "deepseek_v2": groups | {"q_lora_rank": 9, "routed_scaling_factor": 4.0},
        "deepseek_v2_lite": {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    }
    for name, kind in kinds.items():
        record(name, eager(DeepseekV2ForCausalLM(DeepseekV2Config(**shared, **kind))))


def record_gpt_oss() -> None:
    """Writes gpt_oss and gpt_oss_mxfp4."""
    model = eager(GptOssForCausalLM(GptOssConfig(**GPT_OSS)))
    record("gpt_oss", model)
    name, generator = "gpt_oss_mxfp4", torch.Generator().manual_seed(0)
    record(name, model)
    path = OUT / name / "model.safetensors"
    tensors = load_file(path)
    for tensor in [t for t in tensors if t.endswith(("gate_up_proj", "down_proj"))]:
        experts, size, rows = tensors.pop(tensor).shape
        shape = (experts, rows, size // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(123, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{tensor}_blocks": blocks, f"{tensor}_scales": scales}
    save_file(tensors, path, {"format": "pt"})
    published(name, {}, quantization_config={"quant_method": "mxfp4"})
    kind = Mxfp4Config(dequantize=True)
    read = GptOssForCausalLM.from_pretrained(OUT / name, quantization_config=kind, dtype="float32")
    eager(read).eval()
    expected = np.load(OUT / name / "expected.npz")
    with torch.no_grad():
        tokens = torch.tensor(expected["ids"])
        logits = read(tokens).logits
        for _ in range(200):
            best = read(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], 1)
    greedy = tokens[:, expected["ids"].shape[1] :]
    add_arrays(name, {"logits": logits, "greedy": greedy})


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    record_v3()
    record_kimi()
    record_v2()
    record_gpt_oss()
