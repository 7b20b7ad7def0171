"""The paper's dense baselines (section 4, table 3): one deep multilingual Transformer, and the
bilingual ones.

As in m4.py, a docstring holds the paper's row and the exact count here. Both counts of the paper
come out with heads of 64, M / N, and not of the MoE models' 128: 2.31 billion parameters against
2.92, and 0.38 against 0.45.
"""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params

from .m4 import M4Base


class DenseBase(M4Base):
    """The family's sizes, data and recipe without experts, on a mesh of two axes.

    Rows are sharded along `data`; heads, hidden units and vocabulary, with their weights, along `model`.
    """

    EXPERTS = 0
    MESH = ""

    def Task(self) -> InstantiableParams:
        inside = {"N": "model", "H": "model", "V": "model"}
        p = super().Task()
        return p.Set(
            name="dense",
            key_dim=64,
            activation_split={"B": "data", **inside},
            weight_split=inside,
        )

    def Train(self) -> Params:
        return registry.TrainParams().Set(mesh=self.MESH)


@registry.Register
class T96L(DenseBase):
    """T(96L): 2.3B; 2,313,392,128 parameters here.

    2048 cores, 4M tokens, 235.5 core-years, 42 days, BLEU 36.9 (+6.1). The paper trained it with
    GPipe. Here heads, hidden units and vocabulary are sharded over 8 cores, since float32 weights and
    gradients together would leave too little of one core's 16 GiB.
    """

    LAYERS = 96
    MESH = "data:256,model:8"


@registry.Register
class T96LPipe8(T96L):
    """T(96L): 2.3B; 2,313,392,128 parameters here, in 8 stages.

    2048 cores, 4M tokens. As the paper, it trains T(96L) with GPipe; the paper states neither stages nor
    micro-batches. Here rows are sharded over 256 cores, each of which works on 32 micro-batches of 4 rows.
    Stages hold 6 layers of each stack, and the vocabulary is sharded over the stages' cores.
    """

    MESH = "stage:8,data:256"

    def Task(self) -> InstantiableParams:
        p = super().Task()
        p.pipeline.Set(stages=8, micro_batches=256 * 32, schedule="gpipe")
        return p.Set(
            activation_split={"B": "data", "V": "stage"},
            weight_split={"V": "stage"},
        )


@registry.Register
class Bilingual(DenseBase):
    """T(12L): 0.4B; 375,193,600 parameters here.

    One of the paper's 100 bilingual baselines, which together took 29 core-years, BLEU 30.8. The
    paper tuned each and gives no cores and no batch: 8 cores and 64k tokens are our choice.
    """

    LAYERS, CORES, BATCH_TOKENS = 12, 8, 2**16
    MESH = "data:8,model:1"
