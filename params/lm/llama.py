"""Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024) and SmolLM2 (Allal et al. 2025)."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.layers import positions

from .open_models import OpenModel


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


@registry.Register
class SmolLM2_135M(OpenModel):
    """134,515,008 parameters."""

    BASE = 100000.0

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(vocab_size=49152, tied_softmax=True)
        p.Set(model_dim=576, hidden_dim=1536, num_layers=30)
        return p.Set(num_heads=9, num_kv_heads=3, key_dim=64)


@registry.Register
class ImportedLlama(OpenModel):
    """Llama and SmolLM2 of any size, which a checkpoint says. The first has 6,738,415,616 parameters."""

    def Task(self) -> InstantiableParams:
        sizes = {"model_dim": 4096, "hidden_dim": 11008, "num_layers": 32, "num_heads": 32}
        return super().Task().Set(vocab_size=32000, **sizes)
