"""The parts of language models whose weights are published; the files beside this have the models of each family.

From their reports and configurations: sizes, heads, experts, routers, positions and the numbers of parameters, which a
test counts to the unit. Ours: the optimizer and its learning rate, batches of 64 rows of 4096 tokens, no capacity
(`dropless`), the split maps, and no dropout. Nobody has trained these models with this code. Embeddings are scaled by
sqrt(M) where they are looked up; those of an import (docs/importing.md) are not.
"""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.layers import positions
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
