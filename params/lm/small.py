"""Small language models."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers.extended_attention import ExtendedAttention
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.core.optimizers.schedules import InverseSqrt
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.lm.text_input import LmInput

from .open_models import OpenModel, with_experts


@registry.Register
class Tiny(registry.Experiment):
    """Seconds: for tests and for trying things out. The rows of a batch are sharded along `data`."""

    def Task(self) -> InstantiableParams:
        rate = InverseSqrt.Params().Set(value=0.01, warmup_steps=10, decay_start=100)
        return LmModel.Params().Set(
            name="lm",
            vocab_size=300,
            model_dim=16,
            hidden_dim=32,
            num_heads=2,
            key_dim=8,
            num_layers=4,
            dropout=0.1,
            optimizer=Adam.Params().Set(learning_rate=rate),
            activation_split={"B": "data"},
        )

    def Input(self) -> InstantiableParams:
        return LmInput.Params().Set(
            target_vocab_size=self.Task().vocab_size,
            target_length=24,
            batch_size=8,
        )

    def Train(self) -> Params:
        return registry.TrainParams().Set(
            mesh="data:8", max_steps=20, save_interval_steps=5, summary_interval_steps=1
        )


@registry.Register
class MoEDemo(OpenModel):
    """Minutes on two CPU cores: the parts of recent models, together, at a small size.

    A dense layer and then three of 8 experts, two a token, by sigmoid scores with a selecting bias, and a shared one;
    rotary positions, RMS normalization, of queries and keys too, grouped heads, SwiGLU.
    """

    EPSILON = 1e-6

    def Task(self) -> InstantiableParams:
        p = super().Task()
        rate = InverseSqrt.Params().Set(value=0.003, warmup_steps=50, decay_start=300)
        p.Set(
            vocab_size=4000,
            model_dim=128,
            hidden_dim=512,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            key_dim=32,
            dense_first_layers=1,
            attention=ExtendedAttention.Params().Set(qk_norm="head"),
            tied_softmax=True,
            fprop_dtype="float32",
            optimizer=Adam.Params().Set(learning_rate=rate),
        )
        with_experts(p, 8, 192, 2, gate="sigmoid", balance_bias=0.01)
        p.moe.num_shared_experts = 1
        return p

    def Input(self) -> InstantiableParams:
        p = super().Input()
        return p.Set(target_length=128, batch_size=16, vocab_sentences=60_000)

    def Train(self) -> Params:
        return super().Train().Set(max_steps=1000, save_interval_steps=250)
