"""Small language models."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.core.optimizers.schedules import InverseSqrt
from lingvo_moe.tasks.lm.model import LmModel
from lingvo_moe.tasks.lm.text_input import LmInput


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
            source_vocab_size=400,
            target_vocab_size=self.Task().vocab_size,
            target_length=24,
            batch_size=8,
        )

    def Train(self) -> Params:
        return registry.TrainParams().Set(
            mesh="data:8", max_steps=20, save_interval_steps=5, summary_interval_steps=1
        )
