"""Transformer-L of GPipe's table 1 (Huang et al. 2019, arXiv:1811.06965): the deepest models that TPU v3 cores hold.

From the paper: M = 2048, H = 8192, 32 heads, a vocabulary of 32k, a batch of 32 rows of 1024 tokens, layers and cores,
and 12 bytes a parameter. Ours: heads of 64, with which a layer has the 12 M^2 weights of the paper's counts; a table of
its own for the softmax, which these counts include; Adam in float32, whose weights and two slots take 12 bytes; its
learning rate; micro-batches of one row; neither dropout nor label smoothing.

A docstring holds the parameters that the paper states, and those that `--mode=inspect_model` counts here: up to 0.06%
fewer, since these layers have no biases. Nobody has trained these models with this code.
"""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.lm.text_input import LmInput

ROWS, ROW_LENGTH = 32, 1024


class GPipeBase(registry.Experiment):
    """The sizes of all depths; one row in a micro-batch."""

    LAYERS = 0
    STAGES = 1

    def Task(self) -> InstantiableParams:
        p = LmModel.Params().Set(
            name="lm",
            vocab_size=32000,
            tied_softmax=False,
            model_dim=2048,
            hidden_dim=8192,
            num_heads=32,
            key_dim=64,
            num_layers=self.LAYERS,
            dropout=0.0,
            label_smoothing=0.0,
            optimizer=Adam.Params(),
        )
        if self.STAGES > 1:
            p.pipeline.Set(stages=self.STAGES, micro_batches=ROWS, schedule="gpipe")
        return p

    def Input(self) -> InstantiableParams:
        return LmInput.Params().Set(
            target_vocab_size=self.Task().vocab_size, target_length=ROW_LENGTH, batch_size=ROWS
        )

    def Train(self) -> Params:
        return registry.TrainParams().Set(mesh=f"stage:{self.STAGES}")


@registry.Register
class GPipe13L(GPipeBase):
    """Pipeline-1: 785.8M; 785,494,016 parameters here.

    One core. GPipe's gain over the 3 layers of Naive-1 is that micro-batches and layers are recomputed; here gradients
    of 32 micro-batches are added up (train.num_micro_batches), and task.repeat recomputes the layers.
    """

    LAYERS = 13

    def Train(self) -> Params:
        return super().Train().Set(num_micro_batches=ROWS)


@registry.Register
class GPipe103L(GPipeBase):
    """Pipeline-8: 5.3B; 5,316,079,616 parameters here. 8 cores."""

    LAYERS, STAGES = 103, 8


@registry.Register
class GPipe415L(GPipeBase):
    """Pipeline-32: 21.0B; 21,022,109,696 parameters here. 32 cores."""

    LAYERS, STAGES = 415, 32


@registry.Register
class GPipe1663L(GPipeBase):
    """Pipeline-128: 83.9B; 83,846,230,016 parameters here. 128 cores."""

    LAYERS, STAGES = 1663, 128
