"""Records what the `transformers` library computes from random weights: arrays for tests, which do without it.

A file of a module, in tests/core/testdata/, has its input, weights, output and the gradients of a weighted sum of its
output; one of a model, in tests/tasks/lm/testdata/, has ids, weights, logits and the 200 tokens that
greedy search continues with; that of a head for the token after the next, beside its model's, has ids, its weights, the
losses of both and gradients. Names and layouts of weights are ours.
To record again, in an environment of its own (recorded with transformers 5.24.0 and torch 2.13.0):

    pip install torch==2.13.0 transformers==5.24.0
    python benchmarks/peers/record_transformers.py

Letters: B batch, T time, M model, N head, A head of keys and values, K key dimension, E expert, H hidden.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

B, T, M, N, A, K, E, H = 2, 7, 8, 4, 2, 4, 8, 6
Arrays = dict[str, np.ndarray]
# From the parameters of a module (or their gradients) to our weights (or theirs).
Convert = Callable[[Arrays], Arrays]
Run = Callable[[torch.Tensor], torch.Tensor]


def draw(module: torch.nn.Module, name: str) -> torch.Generator:
    """Draws all weights of a module, by its name; returns the generator for more."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for path, weight in [*module.named_parameters(), *module.named_buffers()]:
            if "inv_freq" not in path:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(1.0 + 0.3 * noise if "norm" in path else 0.5 * noise)
    return generator


def weights_and_gradients(module: torch.nn.Module) -> tuple[Arrays, Arrays]:
    """All parameters and buffers of a module by path, and their gradients, 0 where there are none."""
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    grads = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in named.items()}
    weights, grads = ({n: x.detach().numpy() for n, x in of.items()} for of in (named, grads))
    return weights, grads


def record(path: Path, module: torch.nn.Module, run: Run, convert: Convert) -> None:
    """Draws weights and an input, differentiates sum(run(x) * weights), and writes a file."""
    generator = draw(module, path.stem)
    x = torch.randn(B, T, M, generator=generator).requires_grad_()
    y = run(x)
    upstream = torch.randn(y.shape, generator=generator)
    (y * upstream).sum().backward()
    arrays = {"x": x, "y": y, "upstream": upstream, "dx": x.grad}
    found = {name: value.detach().numpy() for name, value in arrays.items()}
    for prefix, values in zip(("theta", "grad"), weights_and_gradients(module)):
        ours = convert(values)
        found |= {f"{prefix}.{name}": np.ascontiguousarray(value) for name, value in ours.items()}
    np.savez_compressed(path, **found)


# --- attention


def even_first(w: np.ndarray) -> np.ndarray:
    """Weights of pairs side by side, along the last dimension, as those of pairs half of it apart."""
    return np.concatenate([w[..., ::2], w[..., 1::2]], -1)


def heads(interleaved: bool = False) -> Convert:
    """Converts modules with q_proj, k_proj, v_proj and o_proj."""
    place = even_first if interleaved else np.asarray

    def convert(w: Arrays) -> Arrays:
        out = {"o": w["o_proj.weight"].T.reshape(N, K, M)}
        for name in "qkv":
            flat = w[f"{name}_proj.weight"].T.reshape(M, -1, K)
            out[name] = flat if name == "v" else place(flat)
            if f"{name}_proj.bias" in w:
                out[f"{name}_bias"] = w[f"{name}_proj.bias"].reshape(-1, K)
            if f"{name}_norm.weight" in w:
                norm = w[f"{name}_norm.weight"]
                out[f"{name}_norm"] = norm if norm.size == K else norm.reshape(-1, K)
        if "o_proj.bias" in w:
            out["o_bias"] = w["o_proj.bias"]
        if "sinks" in w:
            out["sinks"] = w["sinks"]
        return out

    return convert


RANK, TURNED, VALUE = 6, 4, 5


def latent(w: Arrays) -> Arrays:
    """Converts DeepseekV3Attention and DeepseekV2Attention."""
    down = w["kv_a_proj_with_mqa.weight"].T
    both = w["kv_b_proj.weight"].T.reshape(RANK, N, K + VALUE)
    name = "q_b_proj.weight" if "q_b_proj.weight" in w else "q_proj.weight"
    q = w[name].T.reshape(-1, N, K + TURNED)
    out = {
        "down": np.concatenate([down[:, :RANK], even_first(down[:, RANK:])], -1),
        "norm": w["kv_a_layernorm.weight"],
        "k": both[..., :K],
        "v": both[..., K:],
        "q": np.concatenate([q[..., :K], even_first(q[..., K:])], -1),
        "o": w["o_proj.weight"].T.reshape(N, VALUE, M),
    }
    if "q_a_proj.weight" in w:
        out |= {"q_down": w["q_a_proj.weight"].T, "q_norm": w["q_a_layernorm.weight"]}
    return out


def attend(
    attention: torch.nn.Module, rotary: torch.nn.Module, sees: Callable = causal_mask_function
) -> Run:
    """Runs an attention module over positions 0 to T - 1 under a mask function."""
    at = torch.arange(T)
    allowed = torch.stack([sees(b, 0, at[:, None], at[None]) for b in range(B)])[:, None]
    mask = torch.where(allowed, 0.0, float("-inf"))

    def run(x: torch.Tensor) -> torch.Tensor:
        return attention(x, rotary(x, at[None].expand(B, T)), mask)[0]

    return run


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SIZES = {
    "hidden_size": M,
    "num_attention_heads": N,
    "num_key_value_heads": A,
    "head_dim": K,
    "attention_dropout": 0.0,
    "attn_implementation": "eager",
    "max_position_embeddings": 64,
}


def attentions(out: Path) -> None:
    """The files of attention."""
    llama3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    c = LlamaConfig(**SIZES, rope_parameters=llama3)
    module = llama.LlamaAttention(c, 0)
    record(out / "llama.npz", module, attend(module, llama.LlamaRotaryEmbedding(c)), heads())
    plain = {"rope_type": "default", "rope_theta": 100.0}
    c = Qwen3MoeConfig(**SIZES, rope_parameters=plain, rms_norm_eps=1e-6)
    module = qwen3.Qwen3MoeAttention(c, 0)
    record(out / "qwen3.npz", module, attend(module, qwen3.Qwen3MoeRotaryEmbedding(c)), heads())
    wide = SIZES | {"hidden_size": N * K}
    del wide["head_dim"]
    global M
    M = N * K  # OLMoE has no head size of its own
    c = OlmoeConfig(**wide, rope_parameters=plain, rms_norm_eps=1e-5)
    module = olmoe.OlmoeAttention(c, 0)
    record(out / "olmoe.npz", module, attend(module, olmoe.OlmoeRotaryEmbedding(c)), heads())
    M = SIZES["hidden_size"]
    c = GptOssConfig(
        **SIZES,
        rope_parameters=YARN | {"rope_theta": 100.0, "truncate": False},
        layer_types=["sliding_attention"],
        num_hidden_layers=1,
        sliding_window=3,
        attention_bias=True,
    )
    module = gpt_oss.GptOssAttention(c, 0)
    run = attend(module, gpt_oss.GptOssRotaryEmbedding(c), sliding_window_causal_mask_function(3))
    record(out / "gpt_oss.npz", module, run, heads())
    c = Llama4TextConfig(
        **SIZES,
        rope_parameters=plain,
        use_qk_norm=True,
        no_rope_layers=[1, 0],
        num_hidden_layers=2,
        attn_temperature_tuning=True,
        floor_scale=2,
        attn_scale=0.1,
        rms_norm_eps=1e-5,
        layer_types=["chunked_attention", "full_attention"],
    )
    rotary = llama4.Llama4TextRotaryEmbedding(c)
    module = llama4.Llama4TextAttention(c, 0)
    chunks = chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.int32))
    record(out / "llama4.npz", module, attend(module, rotary, chunks), heads(interleaved=True))
    module = llama4.Llama4TextAttention(c, 1)
    record(out / "llama4_nope.npz", module, attend(module, rotary), heads())
    for name, rank in (("deepseek_v3", 5), ("deepseek_v2_lite", None)):
        c = DeepseekV3Config(
            **SIZES | {"num_key_value_heads": N, "head_dim": TURNED},
            q_lora_rank=rank,
            kv_lora_rank=RANK,
            qk_nope_head_dim=K,
            qk_rope_head_dim=TURNED,
            v_head_dim=VALUE,
            rope_parameters=YARN | {"rope_theta": 100.0, "mscale": 1.0, "mscale_all_dim": 0.707},
            rope_interleave=True,
        )
        module = deepseek.DeepseekV3Attention(c, 0)
        run = attend(module, deepseek.DeepseekV3RotaryEmbedding(c))
        record(out / f"{name}.npz", module, run, latent)


# --- experts


def experts(gate: str, order: str) -> Convert:
    """Converts modules whose experts are in 3D tensors, `order` of which is 'EHM', 'EMH', or 'EMH interleaved'."""

    def convert(w: Arrays) -> Arrays:
        first, second = w["experts.gate_up_proj"], w["experts.down_proj"]
        if order == "EHM":
            first, second = first.swapaxes(1, 2), second.swapaxes(1, 2)
        if order == "EMH interleaved":
            first = even_first(first)
        out = {
            "router.wg": w[f"{gate}.weight"].T,
            "experts.wi_gate": first[..., :H],
            "experts.wi": first[..., H:],
            "experts.wo": second,
        }
        if "experts.gate_up_proj_bias" in w:
            bias = even_first(w["experts.gate_up_proj_bias"])
            out |= {"experts.wi_gate_bias": bias[:, :H], "experts.wi_bias": bias[:, H:]}
            out |= {
                "experts.wo_bias": w["experts.down_proj_bias"],
                "router.logit_bias": w["router.bias"],
            }
        if f"{gate}.e_score_correction_bias" in w:
            out["router.balance_bias"] = w[f"{gate}.e_score_correction_bias"]
        for shared in ("shared_experts", "shared_expert"):
            if f"{shared}.gate_proj.weight" in w:
                for ours, theirs in (("wi_gate", "gate"), ("wi", "up"), ("wo", "down")):
                    out[f"shared_experts.{ours}"] = w[f"{shared}.{theirs}_proj.weight"].T
        return out

    return convert


def mixtures(out: Path) -> None:
    """The files of mixtures of experts."""
    sizes = {"hidden_size": M, "num_experts_per_tok": 3, "hidden_act": "silu"}
    c = MixtralConfig(**sizes, intermediate_size=H, num_local_experts=E)
    module = mixtral.MixtralSparseMoeBlock(c)
    record(out / "moe_mixtral.npz", module, module, experts("gate", "EHM"))
    c = OlmoeConfig(**sizes, intermediate_size=H, num_experts=E, norm_topk_prob=False)
    module = olmoe.OlmoeSparseMoeBlock(c)
    record(out / "moe_olmoe.npz", module, module, experts("gate", "EHM"))
    c = GptOssConfig(**sizes, intermediate_size=H, num_local_experts=E)
    module = gpt_oss.GptOssMLP(c)
    run = lambda x: module(x)[0]  # noqa: E731
    record(out / "moe_gpt_oss.npz", module, run, experts("router", "EMH interleaved"))
    c = DeepseekV3Config(
        **sizes,
        moe_intermediate_size=H,
        n_routed_experts=E,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    module = deepseek.DeepseekV3MoE(c)
    record(out / "moe_deepseek_v3.npz", module, module, experts("gate", "EHM"))
    c = Llama4TextConfig(
        **sizes | {"num_experts_per_tok": 1}, intermediate_size=H, num_local_experts=E
    )
    module = llama4.Llama4TextMoe(c)
    run = lambda x: module(x)[0].reshape(B, T, M)  # noqa: E731
    record(out / "moe_llama4.npz", module, run, experts("router", "EMH"))


# --- models

VOCAB, GREEDY = 13, 200
MODEL_SIZES = SIZES | {"intermediate_size": H, "vocab_size": VOCAB}


def dense(w: Arrays) -> Arrays:
    """Converts a gated feed-forward layer."""
    names = {"wi_gate": "gate", "wi": "up", "wo": "down"}
    return {ours: w[f"{theirs}_proj.weight"].T for ours, theirs in names.items()}


def below(w: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}


def decoder_layer(w: Arrays, attention: Convert, mixture: Convert) -> Arrays:
    """Converts a layer of a decoder."""
    mlp = below(w, "mlp.") or below(w, "feed_forward.")
    parts = {
        "self_norm": {"scale": w["input_layernorm.weight"]},
        "self_atten": attention(below(w, "self_attn.")),
        "ffn_norm": {"scale": w["post_attention_layernorm.weight"]},
        "ffn": mixture(mlp) if "experts.down_proj" in mlp else dense(mlp),
    }
    return {f"{part}.{name}": x for part, values in parts.items() for name, x in values.items()}


def ends(w: Arrays) -> Arrays:
    """Converts the parts of a model before and after its layers."""
    table = w["model.embed_tokens.weight"]
    return {
        "embedding.table": table / np.sqrt(table.shape[1]),  # ours is scaled where it is used
        "softmax.table": w["lm_head.weight"],
        "final_norm.scale": w["model.norm.weight"],
    }


def save(path: Path, found: Arrays) -> None:
    """Writes a file, without numbers of 64 bits."""
    arrays = {name: np.ascontiguousarray(x) for name, x in found.items()}
    np.savez_compressed(
        path, **{n: x.astype("float32") if x.dtype == "float64" else x for n, x in arrays.items()}
    )


def record_model(path: Path, model: torch.nn.Module, attention: Convert, mixture: Convert) -> None:
    """Draws weights and ids, and writes a file. The weights of layer l are below layer_<l>."""
    generator = draw(model, path.stem)
    model.set_experts_implementation("eager")
    ids = torch.randint(0, VOCAB, (B, T), generator=generator)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        greedy = {"max_new_tokens": GREEDY, "do_sample": False, "eos_token_id": -1}
        seen = torch.ones_like(ids)  # no id is padding
        tokens = model.generate(ids, attention_mask=seen, **greedy)[:, T:]
    w, _ = weights_and_gradients(model)
    found = {
        "ids": ids.numpy(),
        "logits": logits.numpy(),
        "greedy": tokens.numpy().astype("int8"),
        **ends(w),
    }
    for number in range(model.config.num_hidden_layers):
        layer = decoder_layer(below(w, f"model.layers.{number}."), attention, mixture)
        found |= {f"layer_{number}.{name}": x for name, x in layer.items()}
    save(path, found)


def record_multi_token(path: Path, model: torch.nn.Module) -> None:
    """Draws the head for the token after the next of a model of DeepSeek-V3, which has its weights, and writes a file.

    The loss is the model's and 0.3 of the head's, each a sum over known tokens divided by B * T. Gradients
    are those of the head and, of the model, of its tables, its last normalization and its first layer.
    """
    head = MtpModel(model, 1)
    head.set_experts_implementation("eager")
    generator = draw(head.layers[0], path.stem)
    ids = torch.randint(0, VOCAB, (B, T + 1), generator=generator)
    x = model.model(input_ids=ids[:, :-1]).last_hidden_state
    at = torch.arange(1, T + 1).expand(B, T)
    y = head.forward_layer(0, x, at, None, input_ids=ids[:, 1:])
    nll = []
    for ahead, hidden in enumerate((x, y)):
        logits = model.lm_head(hidden)[:, : T - ahead].flatten(0, 1)
        labels = ids[:, 1 + ahead :].flatten()
        nll.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / (B * T))
    (nll[0] + 0.3 * nll[1]).backward()
    weights, grads = (multi_token(w) for w in weights_and_gradients(head.layers[0]))
    _, of_model = weights_and_gradients(model)
    first = decoder_layer(below(of_model, "model.layers.0."), latent, experts("gate", "EHM"))
    grads = {f"multi_token.{name}": x for name, x in grads.items()} | ends(of_model)
    grads |= {f"layer_0.{name}": x for name, x in first.items()}
    grads["embedding.table"] *= M  # of a table that `ends` divided by sqrt(M)
    found = {"ids": ids.numpy(), "nll": torch.stack(nll).detach().numpy()}
    found |= {f"multi_token.{name}": x for name, x in weights.items()}
    save(path, found | {f"grad.{name}": x for name, x in grads.items()})


def multi_token(w: Arrays) -> Arrays:
    """Converts MtpLayer of a model of DeepSeek-V3."""
    of_token, of_hidden = np.split(w["eh_proj.weight"].T, 2)
    layer = decoder_layer(below(w, "mtp_block."), latent, experts("gate", "EHM"))
    return {f"layer.{name}": x for name, x in layer.items()} | {
        "of_token": of_token,
        "of_hidden": of_hidden,
        "token_norm.scale": w["enorm.weight"],
        "hidden_norm.scale": w["hnorm.weight"],
        "final_norm.scale": w["post_norm.weight"],
    }


def models(out: Path) -> None:
    """The files of models. Settings that are not here have the library's defaults: those of a published model."""
    global M
    sizes = MODEL_SIZES
    few = {"num_local_experts": E, "num_experts_per_tok": 2}
    by_gate = experts("gate", "EHM")
    rotary = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rotary |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    c = LlamaConfig(**sizes, num_hidden_layers=1, rope_parameters=rotary, rms_norm_eps=1e-5)
    record_model(out / "Llama31_8B.npz", llama.LlamaForCausalLM(c), heads(), dense)
    c = MixtralConfig(**sizes | few, num_hidden_layers=1)
    record_model(out / "Mixtral8x7B.npz", mixtral.MixtralForCausalLM(c), heads(), by_gate)
    c = Qwen3MoeConfig(
        **sizes,
        num_experts=E,
        num_experts_per_tok=2,
        moe_intermediate_size=H,
        norm_topk_prob=True,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    record_model(out / "Qwen3_30B_A3B.npz", qwen3.Qwen3MoeForCausalLM(c), heads(), by_gate)
    c = GptOssConfig(**sizes | few, num_hidden_layers=2, sliding_window=3)
    interleaved = experts("router", "EMH interleaved")
    record_model(out / "GptOss20B.npz", gpt_oss.GptOssForCausalLM(c), heads(), interleaved)
    M = N * K
    c = OlmoeConfig(
        **sizes | {"hidden_size": M}, num_experts=E, num_experts_per_tok=2, num_hidden_layers=1
    )
    record_model(out / "OLMoE1B7B.npz", olmoe.OlmoeForCausalLM(c), heads(), by_gate)
    M = SIZES["hidden_size"]


def llama4_models(out: Path) -> None:
    """The files of models of Llama 4."""
    scaled = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0}
    scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    scaled |= {"original_max_position_embeddings": 16}
    maverick = {"num_hidden_layers": 4, "use_qk_norm": False, "interleave_moe_layer_step": 2}
    scout = {"num_hidden_layers": 2, "no_rope_layer_interval": 2, "rope_parameters": scaled}
    for name, kind in {"Llama4Maverick": maverick, "Llama4Scout": scout}.items():
        c = Llama4TextConfig(
            **MODEL_SIZES | kind,
            num_local_experts=E,
            intermediate_size_mlp=2 * H,
            attention_chunk_size=4,
            floor_scale=2,
        )
        model = llama4.Llama4ForCausalLM(c)
        place, by_router = heads(interleaved=True), experts("router", "EMH")
        record_model(out / f"{name}.npz", model, place, by_router)


def latent_models(out: Path) -> None:
    """The files of models of DeepSeek."""
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0}
    yarn |= {"original_max_position_embeddings": 4096}
    sizes = MODEL_SIZES | {"num_key_value_heads": N, "intermediate_size": 2 * H}
    sizes |= {"n_routed_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": H}
    sizes |= {"first_k_dense_replace": 1, "num_hidden_layers": 2, "v_head_dim": VALUE}
    sizes |= {"kv_lora_rank": RANK, "qk_nope_head_dim": K, "qk_rope_head_dim": TURNED}
    v3 = {"q_lora_rank": 5, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
    lite = {"q_lora_rank": None}
    kinds = {
        "DeepSeekV3": (deepseek.DeepseekV3ForCausalLM, DeepseekV3Config, 1.0, v3),
        "DeepSeekV2Lite": (deepseek2.DeepseekV2ForCausalLM, DeepseekV2Config, 0.707, lite),
    }
    for name, (cls, config, mscale, kind) in kinds.items():
        rotary = yarn | {"mscale": mscale, "mscale_all_dim": mscale}
        model = cls(config(**sizes | kind | {"head_dim": TURNED}, rope_parameters=rotary))
        record_model(out / f"{name}.npz", model, latent, experts("gate", "EHM"))
        if name == "DeepSeekV3":
            record_multi_token(out / f"{name}_multi_token.npz", model)


if __name__ == "__main__":
    root = Path(__file__).parents[2] / "tests"
    of_modules, of_models = root / "core" / "testdata", root / "tasks" / "lm" / "testdata"
    for directory in (of_modules, of_models):
        directory.mkdir(parents=True, exist_ok=True)
    attentions(of_modules)
    mixtures(of_modules)
    models(of_models)
    llama4_models(of_models)
    latent_models(of_models)
