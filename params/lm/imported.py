"""Families of published models of any size: an imported checkpoint (docs/importing.md) says which.

The defaults of sizes are those of the family's first model.
"""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams

from .open_models import Mixtral8x7B, OpenModel


@registry.Register
class ImportedLlama(OpenModel):
    """Llama, SmolLM2 and Mistral without a window. Llama's first model has 6,738,415,616 parameters."""

    def Task(self) -> InstantiableParams:
        sizes = {"model_dim": 4096, "hidden_dim": 11008, "num_layers": 32, "num_heads": 32}
        return super().Task().Set(vocab_size=32000, **sizes)


@registry.Register
class ImportedMixtral(Mixtral8x7B):
    """Mixtral of experts: each token visits those with the highest gates."""
