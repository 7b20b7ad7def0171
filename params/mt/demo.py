"""Small experiments: the demo, a model of a useful size, and two for tests and comparisons.

Their recipes are the best of docs/expert_comparison.md.
"""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.moe.routers.hash import HashRouter
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.optimizers.schedules import InverseSqrt, Linear, SqrtDecay
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.mt.mt_model import MtModel

from .m4 import SplitOverExperts


def _as_in_the_paper(p: InstantiableParams) -> InstantiableParams:
    """Sets the balance and the capacity of the paper's models."""
    p.moe.router.reading = "paper"
    p.moe.capacity_factor = 2.0
    return p.Set(aux_loss_weight=0.01)


@registry.Register
class M4Demo(registry.Experiment):
    """The family's shape at a size that two CPU cores train in minutes: 4 layers, 8 experts."""

    STEPS = 3000
    # After so little training short translations are too likely: with 0.6 the mean chrF of 12 languages was 1.7 lower.
    LENGTH_ALPHA = 1.5

    def LearningRate(self) -> InstantiableParams:
        """The schedule, of a short run with a known end: Adafactor's rate is relative to a weight's size."""
        return Linear.Params().Set(value=0.06, warmup_steps=30, total_steps=self.STEPS)

    def Task(self) -> InstantiableParams:
        p = MtModel.Params().Set(
            name="m4",
            source_vocab_size=8000,
            target_vocab_size=4000,
            model_dim=128,
            hidden_dim=512,
            num_heads=4,
            key_dim=32,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_experts=8,
            num_groups=8,
            repeat="auto",
            # The demo sees less than one epoch: there is nothing to regularise.
            dropout=0.0,
            length_alpha=self.LENGTH_ALPHA,
            optimizer=Adafactor.Params().Set(learning_rate=self.LearningRate()),
        )
        # The paper's balance loss is 1/640 of this at 8 experts: too weak for a router's first steps.
        p.moe.router.reading = "lingvo"
        p.aux_loss_weight = 0.1
        p.moe.capacity_factor = 2.5  # a router of 50 steps is not balanced yet
        return SplitOverExperts(p)

    def Input(self) -> InstantiableParams:
        p = self.Task()
        return MtInput.Params().Set(
            source_vocab_size=p.source_vocab_size,
            target_vocab_size=p.target_vocab_size,
            vocab_sentences=60_000,
            source_length=64,
            target_length=40,
            batch_size=16,
        )

    def Train(self) -> Params:
        return registry.TrainParams().Set(
            mesh="expert:8", max_steps=self.STEPS, save_interval_steps=200, eval_interval_steps=200
        )


@registry.Register
class M4Small(M4Demo):
    """A useful size: 22.5M parameters, 8 layers, 24 experts.

    A hash of each token chooses its expert. That pays from the first steps on: no router has to learn before the
    experts can. A token costs what it does in the dense model of the same sizes. All tokens share three quarters of an
    MoE layer's width, which learn from each of them; experts have the last quarter, so that they cost little to update.
    """

    STEPS = 20_000
    LENGTH_ALPHA = 0.6

    def LearningRate(self) -> InstantiableParams:
        return InverseSqrt.Params().Set(value=0.06, warmup_steps=100, decay_start=300)

    def Task(self) -> InstantiableParams:
        p = super().Task()
        # The shared experts of a layer are as wide as three of the others: together one dense layer.
        p.moe.Set(router=HashRouter.Params(), dispatcher="dropless", num_shared_experts=3)
        return p.Set(
            model_dim=256,
            hidden_dim=1024,
            expert_hidden_dim=256,
            num_heads=4,
            key_dim=64,
            num_encoder_layers=4,
            num_decoder_layers=4,
            num_experts=24,
            dropout=0.1,  # its runs are of several epochs
        )

    def Input(self) -> InstantiableParams:
        return super().Input().Set(batch_size=32)

    def Train(self) -> Params:
        return super().Train().Set(save_interval_steps=500, eval_interval_steps=500)


@registry.Register
class M4Tiny(M4Demo):
    """Seconds, not minutes: for tests and for trying things out."""

    STEPS = 20
    LENGTH_ALPHA = 0.6

    def LearningRate(self) -> InstantiableParams:
        return SqrtDecay.Params().Set(multiplier=1.0, constant_steps=1000)

    def Task(self) -> InstantiableParams:
        # As in the paper's models, which it stands for.
        p = _as_in_the_paper(super().Task())
        p.moe.dispatcher = "einsum"
        return p.Set(
            repeat=True,  # as there
            source_vocab_size=400,
            target_vocab_size=300,
            model_dim=16,
            hidden_dim=32,
            num_heads=2,
            key_dim=8,
        )

    def Input(self) -> InstantiableParams:
        return super().Input().Set(source_length=24, target_length=24, batch_size=8)

    def Train(self) -> Params:
        # Its runs are shorter than compiling an evaluation.
        never = {"eval_interval_steps": 0}
        return super().Train().Set(save_interval_steps=5, summary_interval_steps=1, **never)


@registry.Register
class M4Experts(M4Demo):
    """A model to compare experts and routers on the demo's data, in minutes each: 16 experts, of which a token's
    two cost as much as one dense layer."""

    STEPS = 1000

    def LearningRate(self) -> InstantiableParams:
        return SqrtDecay.Params().Set(multiplier=1.0, constant_steps=1000)

    def Task(self) -> InstantiableParams:
        return _as_in_the_paper(super().Task()).Set(
            source_vocab_size=4000,
            target_vocab_size=2000,
            model_dim=64,
            hidden_dim=256,
            expert_hidden_dim=128,
            num_heads=4,
            key_dim=16,
            num_experts=16,
            # Large groups: with small ones chance alone overflows 64 experts.
            num_groups=2,
            repeat=False,
        )

    def Input(self) -> InstantiableParams:
        return super().Input().Set(batch_size=32)

    def Train(self) -> Params:
        every = {"save_interval_steps": 500, "eval_interval_steps": 500}
        return super().Train().Set(mesh="expert:1", **every)
