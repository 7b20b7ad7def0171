"""A network that two CPU cores train in seconds."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.optimizers.schedules import Cosine
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.tasks.image.image_model import ImageClassifier
from lingvo_moe.tasks.image.input.image_input import DigitsInput
from lingvo_moe.tasks.image.networks import ConvNet

_STEPS = 300


@registry.Register
class Digits(registry.Experiment):
    """Two convolutions with batch normalization on scikit-learn's handwritten digits."""

    def Task(self) -> InstantiableParams:
        rate = Cosine.Params().Set(value=0.1, warmup_steps=20, total_steps=_STEPS)
        return ImageClassifier.Params().Set(
            name="digits",
            num_classes=10,
            channels=1,
            network=ConvNet.Params().Set(channels=[16, 32]),
            label_smoothing=0.0,
            optimizer=Sgd.Params().Set(learning_rate=rate, weight_decay=1e-4),
            activation_split={"B": "data"},
        )

    def Input(self) -> InstantiableParams:
        return DigitsInput.Params().Set(batch_size=64)

    def Train(self) -> Params:
        return registry.TrainParams().Set(
            mesh="data:8",
            max_steps=_STEPS,
            save_interval_steps=100,
            summary_interval_steps=50,
            eval_interval_steps=100,
            eval_batches=6,  # all 360 images
        )
