"""Language models whose weights are published, with their sizes: dense ones, and mixtures of experts.

From their reports and configurations: sizes, heads, experts, routers, positions and the numbers of parameters, which a
test counts to the unit. Ours: the optimizer and its learning rate, batches of 64 rows of 4096 tokens, no capacity
(`dropless`), the split maps, and no dropout. Nobody has trained these models with this code. Embeddings are scaled by
sqrt(M) where they are looked up, so a published table is to be divided by it.
"""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers import positions
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.layers.latent_attention import LatentAttention
from lingvo_moe.core.layers.normalization import RmsNorm
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.lm.text_input import LmInput

ROWS, ROW_LENGTH = 64, 4096


class OpenModel(registry.Experiment):
    """The parts of nearly all of these models: RMS normalization, SwiGLU, rotary positions, a softmax of its own."""

    EPSILON = 1e-5
    BASE = 10000.0  # the base of rotary positions

    def Task(self) -> InstantiableParams:
        inside = {"N": "model", "H": "model", "V": "model"}
        return LmModel.Params().Set(
            name="lm",
            tied_softmax=False,
            activation="swiglu",
            norm=RmsNorm.Params().Set(epsilon=self.EPSILON),
            position=positions.Rotary.Params().Set(max_timescale=self.BASE),
            dropout=0.0,
            label_smoothing=0.0,
            optimizer=Adam.Params(),
            fprop_dtype="bfloat16",
            activation_split={"B": "data", **inside},
            weight_split=inside,
        )

    def Input(self) -> InstantiableParams:
        return LmInput.Params().Set(
            target_vocab_size=self.Task().vocab_size, target_length=ROW_LENGTH, batch_size=ROWS
        )

    def Train(self) -> Params:
        rows = "expert" if self.Task().num_experts else "data"
        return registry.TrainParams().Set(mesh=f"{rows}:8,model:1", shard_state="weights")


def with_experts(p: InstantiableParams, num: int, width: int, k: int, **router: object) -> None:
    """Gives a task experts, sharded as rows are, by top-k routing without drops and a loss by row."""
    p.Set(num_experts=num, expert_hidden_dim=width)
    p.activation_split = {**p.activation_split, **dict.fromkeys("BGE", "expert")}
    p.weight_split = {**p.weight_split, "E": "expert"}
    p.moe.Set(router=TopKRouter.Params().Set(k=k, **router), dispatcher="dropless")


# --- dense


class Llama31(OpenModel):
    """Llama 3.1 (Grattafiori et al. 2024)."""

    BASE = 500000.0

    def Task(self) -> InstantiableParams:
        position = positions.Llama3Rotary.Params().Set(max_timescale=self.BASE)
        return super().Task().Set(vocab_size=128256, num_kv_heads=8, position=position)


@registry.Register
class Llama31_8B(Llama31):
    """8,030,261,248 parameters."""

    def Task(self) -> InstantiableParams:
        return super().Task().Set(model_dim=4096, hidden_dim=14336, num_layers=32, num_heads=32)


@registry.Register
class Llama31_70B(Llama31):
    """70,553,706,496 parameters."""

    def Task(self) -> InstantiableParams:
        return super().Task().Set(model_dim=8192, hidden_dim=28672, num_layers=80, num_heads=64)


@registry.Register
class Llama31_405B(Llama31):
    """405,853,388,800 parameters."""

    def Task(self) -> InstantiableParams:
        return super().Task().Set(model_dim=16384, hidden_dim=53248, num_layers=126, num_heads=128)


class Qwen3(OpenModel):
    """Qwen3 (Yang et al. 2025): normalized queries and keys."""

    BASE, EPSILON = 1000000.0, 1e-6

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=151936, num_kv_heads=4)
        p.attention = ExtendedAttention.Params().Set(qk_norm="head")
        return p


@registry.Register
class Qwen3_8B(Qwen3):
    """8,190,735,360 parameters."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(model_dim=4096, hidden_dim=12288, num_layers=36, num_heads=32)
        return p.Set(num_kv_heads=8)


# --- experts, by softmax


class Mixtral(OpenModel):
    """Mixtral of experts (Jiang et al. 2024): two of 8 experts, gates that sum to one."""

    BASE = 1000000.0


@registry.Register
class Mixtral8x7B(Mixtral):
    """46,702,792,704 parameters, 12,879,925,248 of them active."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=32000, model_dim=4096, hidden_dim=14336, num_layers=32)
        with_experts(p, 8, 14336, k=2)
        return p.Set(num_heads=32, num_kv_heads=8)


@registry.Register
class Mixtral8x22B(Mixtral):
    """140,630,071,296 parameters, 39,161,468,928 of them active."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=32768, model_dim=6144, hidden_dim=16384, num_layers=56)
        with_experts(p, 8, 16384, k=2)
        return p.Set(num_heads=48, num_kv_heads=8)


@registry.Register
class OLMoE1B7B(OpenModel):
    """OLMoE (Muennighoff et al. 2024): 6,919,161,856 parameters, 1,282,017,280 of them active.

    Gates need not sum to one.
    """

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=50304, model_dim=2048, hidden_dim=1024, num_layers=16)
        with_experts(p, 64, 1024, k=8, normalize_gates="never", z_loss_weight=0.1)
        p.attention = ExtendedAttention.Params().Set(qk_norm="projection")
        return p.Set(num_heads=16)


@registry.Register
class Qwen3_30B_A3B(Qwen3):
    """8 of 128 experts: 30,532,122,624 parameters, 3,353,032,704 of them active."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(model_dim=2048, hidden_dim=6144, num_layers=48, num_heads=32)
        with_experts(p, 128, 768, k=8)
        return p


@registry.Register
class Qwen3_235B_A22B(Qwen3):
    """8 of 128 experts: 235,093,634,560 parameters, 22,190,763,520 of them active."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(model_dim=4096, hidden_dim=12288, num_layers=94, num_heads=64)
        with_experts(p, 128, 1536, k=8)
        return p


class GptOss(OpenModel):
    """gpt-oss (OpenAI 2025): 4 experts a token, biases, sinks, and a window of 128 tokens in every second layer."""

    BASE = 150000.0

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=201088, model_dim=2880, hidden_dim=2880, key_dim=64)
        every = ExtendedAttention.Params().Set(biases=True, sinks=True)
        p.Set(num_heads=64, num_kv_heads=8, activation="clamped_swiglu", nth_attention=every)
        p.attention = every.Copy().Set(window=128)
        p.position = positions.YarnRotary.Params().Set(
            max_timescale=self.BASE, factor=32.0, original_length=4096, whole_pairs=False
        )
        return p

    def Experts(self, p: InstantiableParams, num: int) -> InstantiableParams:
        """The task with so many experts."""
        with_experts(p, num, 2880, k=4, logit_bias=True)
        p.moe.experts.biases = True
        return p


@registry.Register
class GptOss20B(GptOss):
    """20,914,757,184 parameters, 4,187,440,704 of them active."""

    def Task(self) -> InstantiableParams:
        return self.Experts(super().Task().Set(num_layers=24), 32)


@registry.Register
class GptOss120B(GptOss):
    """116,829,156,672 parameters, 5,711,982,912 of them active."""

    def Task(self) -> InstantiableParams:
        return self.Experts(super().Task().Set(num_layers=36), 128)


# --- latent attention


class DeepSeek(OpenModel):
    """The parts of DeepSeek-V2 and V3, and Kimi K2: latent attention, shared experts, dense first layers."""

    EPSILON = 1e-6
    HEADS = 128
    QUERY_RANK = 1536
    MSCALE = 1.0

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(num_heads=self.HEADS, key_dim=128)
        p.attention = LatentAttention.Params().Set(rank=512, query_rank=self.QUERY_RANK)
        p.position = positions.YarnRotary.Params().Set(
            max_timescale=self.BASE,
            factor=40.0,
            original_length=4096,
            mscale=self.MSCALE,
            mscale_all=self.MSCALE,
        )
        return p


@registry.Register
class DeepSeekV2Lite(DeepSeek):
    """DeepSeek-V2-Lite (2024): 15,706,484,224 parameters, 2,661,150,208 of them active."""

    HEADS, QUERY_RANK, MSCALE = 16, 0, 0.707

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=102400, model_dim=2048, hidden_dim=10944, num_layers=27)
        with_experts(p, 64, 1408, k=6, normalize_gates="never")
        p.moe.num_shared_experts = 2
        return p.Set(dense_first_layers=1)


class SigmoidRouted(DeepSeek):
    """Experts chosen by sigmoid scores and a bias that balances them; a loss by row of weight 0.0001 (V3's report)."""

    def Task(self) -> InstantiableParams:
        return super().Task().Set(model_dim=7168, hidden_dim=18432, num_layers=61)

    def Experts(self, p: InstantiableParams, num: int, **router: object) -> InstantiableParams:
        """The task with so many experts of 2048, 8 of which a token visits, and a shared one."""
        with_experts(p, num, 2048, k=8, gate="sigmoid", balance_bias=0.001, **router)
        p.moe.num_shared_experts = 1
        return p.Set(aux_loss_weight=1e-4)


@registry.Register
class DeepSeekV3(SigmoidRouted):
    """DeepSeek-V3 (2024): 671,026,419,200 parameters, 37,552,297,472 of them active, balance biases included.

    Its head for the token after the next, `task.multi_token_weight=0.3`, has 11,610,068,224 more.
    """

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=129280)
        groups = {"expert_groups": 8, "groups_per_token": 4}
        return self.Experts(p, 256, gate_scale=2.5, **groups).Set(dense_first_layers=3)


@registry.Register
class KimiK2(SigmoidRouted):
    """Kimi K2 (2025): 1,026,408,232,448 parameters, 32,861,500,928 of them active."""

    HEADS, BASE = 64, 50000.0

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=163840)
        p.position.Set(factor=32.0, fast_turns=1.0)
        return self.Experts(p, 384, gate_scale=2.827).Set(dense_first_layers=1)


# --- gates on inputs


class Llama4(OpenModel):
    """The text models of Llama 4 (Meta 2025): one expert a token, whose input the gate multiplies, and a shared one.

    Attention is in chunks of 8192 tokens, and in every fourth layer over all, without positions.
    """

    BASE = 500000.0
    QK_NORM = "none"

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=202048, model_dim=5120, hidden_dim=16384, num_layers=48)
        p.attention = ExtendedAttention.Params().Set(chunk=8192, qk_norm=self.QK_NORM)
        p.nth_attention = ExtendedAttention.Params().Set(
            use_positions=False, temperature_length=8192
        )
        return p.Set(num_heads=40, num_kv_heads=8, nth_attention_every=4)

    def Experts(self, p: InstantiableParams, num: int) -> InstantiableParams:
        """The task with so many experts."""
        with_experts(p, num, 8192, k=1, gate="sigmoid")
        p.moe.Set(num_shared_experts=1, gate_inputs=True)
        return p


@registry.Register
class Llama4Scout(Llama4):
    """107,769,861,120 parameters, 17,172,894,720 of them active."""

    QK_NORM = "unit"

    def Task(self) -> InstantiableParams:
        p = self.Experts(super().Task(), 16)
        p.position = positions.Llama3Rotary.Params().Set(
            max_timescale=self.BASE, factor=16.0, high_turns=1.0
        )
        return p


@registry.Register
class Llama4Maverick(Llama4):
    """400,711,848,960 parameters, 17,184,691,200 of them active. Every second layer has experts."""

    def Task(self) -> InstantiableParams:
        return self.Experts(super().Task(), 128).Set(moe_every=2)
