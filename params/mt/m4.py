"""The paper's multilingual Mixture-of-Experts models (section 4, tables 1 and 3).

A row each: parameters as the paper rounds them and as `--mode=inspect_model` counts them here; TPU
v3 cores; steps a second; tokens a batch; core-years and days for a trillion tokens; average BLEU
(and its gain over 100 bilingual models). The speeds and scores are the paper's: nobody has run
these models with this code.
"""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.optimizers.adafactor import GShardAdafactor
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.mt.mt_model import MtModel

# Sequences are packed into rows of this many tokens. The paper gives tokens a batch, not the length
# of its rows.
ROW_LENGTH = 128


class M4Base(registry.Experiment):
    """The common sizes, data, Adafactor recipe and one-axis mesh of the paper's models."""

    LAYERS = 36
    EXPERTS = 2048
    CORES = 2048
    BATCH_TOKENS = 4 * 2**20

    def Task(self) -> InstantiableParams:
        p = MtModel.Params().Set(
            name="m4",
            source_vocab_size=64000,
            target_vocab_size=32000,
            model_dim=1024,
            hidden_dim=8192,
            num_heads=16,
            key_dim=128,
            num_encoder_layers=self.LAYERS // 2,
            num_decoder_layers=self.LAYERS // 2,
            num_experts=self.EXPERTS,
            num_groups=self.CORES,
            dropout=0.1,
            aux_loss_weight=0.01,
            optimizer=GShardAdafactor.Params(),
        )
        p.moe.dispatcher = "einsum"  # Algorithm 2's, of which the recorded plans are
        return SplitOverExperts(p)

    def Input(self) -> InstantiableParams:
        p = self.Task()
        return MtInput.Params().Set(
            source_vocab_size=p.source_vocab_size,
            target_vocab_size=p.target_vocab_size,
            source_length=ROW_LENGTH,
            target_length=ROW_LENGTH,
            batch_size=self.BATCH_TOKENS // ROW_LENGTH,
        )

    def Train(self) -> Params:
        return registry.TrainParams().Set(mesh=f"expert:{self.CORES}")


def SplitOverExperts(p: InstantiableParams) -> InstantiableParams:
    """Algorithm 2's partitioning: batch, groups and experts are sharded along the one mesh axis; other
    weights are replicated."""
    return p.Set(
        activation_split={"B": "expert", "G": "expert", "E": "expert"},
        weight_split={"E": "expert"},
    )


@registry.Register
class M4MoE2048E36L(M4Base):
    """MoE(2048E, 36L): 600B; 619,366,506,496 parameters here.

    2048 cores, 0.72 steps/s, 4M tokens, 22.4 core-years, 4.0 days, BLEU 44.3 (+13.5).
    """


@registry.Register
class M4MoE2048E36LPipe2(M4MoE2048E36L):
    """MoE(2048E, 36L): 600B; 619,366,506,496 parameters here, in 2 stages.

    2048 cores, 4M tokens. Its stacks have 9 blocks of a dense and an MoE layer each: the first stage has 5, the second
    4. The groups are those of the model without stages, so there are as many micro-batches as stages.
    """

    STAGES = 2

    def Task(self) -> InstantiableParams:
        p = super().Task()
        p.pipeline.Set(stages=self.STAGES, micro_batches=self.STAGES)
        return p

    def Train(self) -> Params:
        return registry.TrainParams().Set(
            mesh=f"stage:{self.STAGES},expert:{self.CORES // self.STAGES}"
        )


@registry.Register
class M4MoE2048E36LPipe4(M4MoE2048E36LPipe2):
    """MoE(2048E, 36L): 600B; 619,366,506,496 parameters here, in 4 stages.

    2048 cores, 4M tokens. The first stage has 3 blocks of each stack, the others 2.
    """

    STAGES = 4


@registry.Register
class M4MoE2048E12L(M4Base):
    """MoE(2048E, 12L): 200B; 206,521,040,896 parameters here.

    2048 cores, 2.15 steps/s, 4M tokens, 7.5 core-years, 1.4 days, BLEU 41.3 (+10.5).
    """

    LAYERS = 12


@registry.Register
class M4MoE512E36L(M4Base):
    """MoE(512E, 36L): 150B; 155,481,726,976 parameters here.

    512 cores, 1.05 steps/s, 1M tokens, 15.5 core-years, 11.0 days, BLEU 43.7 (+12.9).
    """

    EXPERTS, CORES, BATCH_TOKENS = 512, 512, 2**20


@registry.Register
class M4MoE512E12L(M4Base):
    """MoE(512E, 12L): 50B; 51,892,781,056 parameters here.

    512 cores, 3.28 steps/s, 1M tokens, 4.9 core-years, 3.5 days, BLEU 40.0 (+9.2).
    """

    LAYERS, EXPERTS, CORES, BATCH_TOKENS = 12, 512, 512, 2**20


@registry.Register
class M4MoE128E36L(M4Base):
    """MoE(128E, 36L): 37B; 39,510,532,096 parameters here.

    128 cores, 0.67 steps/s, 1M tokens, 6.1 core-years, 17.3 days, BLEU 39.0 (+8.2).
    """

    EXPERTS, CORES, BATCH_TOKENS = 128, 128, 2**20


@registry.Register
class M4MoE128E12L(M4Base):
    """MoE(128E, 12L): 12.5B; 13,235,716,096 parameters here.

    128 cores, 2.16 steps/s, 1M tokens, 1.9 core-years, 5.4 days, BLEU 36.7 (+5.9).
    """

    LAYERS, EXPERTS, CORES, BATCH_TOKENS = 12, 128, 128, 2**20


@registry.Register
class M4MoE2048E60L(M4Base):
    """MoE(2048E, 60L): 1T; 1,032,211,972,096 parameters here.

    2048 cores, 4M tokens; numerically unstable in the paper, which reports no result.
    """

    LAYERS = 60


@registry.Register
class M4MoE2048E60LSharded(M4MoE2048E60L):
    """MoE(2048E, 60L): 1T; 1,032,211,972,096 parameters here, all of them sharded over all cores.

    2048 cores, 4M tokens. M4MoE2048E60L has a copy of attention and dense layers on each core, and does not fit with
    float32 activations. Here each core holds a part of these too, and gathers those of a layer when it needs them.
    The mesh has two axes, since no dimension of attention's weights divides by 2048.
    """

    def Task(self) -> InstantiableParams:
        both = ("expert", "core")
        p = super().Task()
        return p.Set(activation_split=dict.fromkeys("BGE", both), weight_split={"E": both})

    def Train(self) -> Params:
        return super().Train().Set(mesh="expert:1024,core:2", shard_state="weights")


@registry.Register
class M4MoE512E60L(M4Base):
    """MoE(512E, 60L): 260B; 259,070,672,896 parameters here.

    512 cores, 1M tokens; the paper reports no result.
    """

    LAYERS, EXPERTS, CORES, BATCH_TOKENS = 60, 512, 512, 2**20


@registry.Register
class M4MoE128E60L(M4Base):
    """MoE(128E, 60L): 66B; 65,785,348,096 parameters here.

    128 cores, 1M tokens; the paper reports no result.
    """

    LAYERS, EXPERTS, CORES, BATCH_TOKENS = 60, 128, 128, 2**20
