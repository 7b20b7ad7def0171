"""Residual networks of 50 layers, on images in folders."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.optimizers.schedules import Cosine
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.tasks.image.image_model import ImageClassifier
from lingvo_moe.tasks.image.input.image_input import FolderInput

_BATCH = 1024
_STEPS_AN_EPOCH = 1_281_167 // _BATCH  # of ImageNet
_EPOCHS, _WARMUP_EPOCHS = 90, 5


@registry.Register
class ResNet50(registry.Experiment):
    """ResNet-50 v1.5 for 1000 classes; the batch is sharded. 90 epochs of ImageNet."""

    def Task(self) -> InstantiableParams:
        steps = {
            "warmup_steps": _WARMUP_EPOCHS * _STEPS_AN_EPOCH,
            "total_steps": _EPOCHS * _STEPS_AN_EPOCH,
        }
        # 0.1 for each 256 images (Goyal et al. 2017).
        rate = Cosine.Params().Set(value=0.1 * _BATCH / 256, **steps)
        return ImageClassifier.Params().Set(
            name="resnet",
            num_classes=1000,
            fprop_dtype="bfloat16",
            optimizer=Sgd.Params().Set(learning_rate=rate),
            activation_split={"B": "data"},
        )

    def Input(self) -> InstantiableParams:
        return FolderInput.Params().Set(batch_size=_BATCH, image_size=224)

    def Train(self) -> Params:
        return registry.TrainParams().Set(mesh="data:8", max_steps=_EPOCHS * _STEPS_AN_EPOCH)


@registry.Register
class ResNet50Classes130K(ResNet50):
    """ResNet-50 for 131,072 classes, whose weights are ten times those of the rest: the classes are sharded over
    the devices that the batch is sharded over everywhere else."""

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(num_classes=131_072)
        p.head.activation_split = {"V": "data"}
        p.head.weight_split = {"V": "data"}
        return p


@registry.Register
class ResNet50Pipe4(ResNet50):
    """ResNet-50 in four stages of similar FLOPs, each on its own devices, with 16 micro-batches; see docs/pipelines.md.

    BatchNorm's statistics are those of a micro-batch of 64 images.
    """

    def Task(self) -> InstantiableParams:
        p = super().Task().Set(weight_split={"Z": "stage"})
        p.pipeline.Set(stages=4, micro_batches=16, schedule="gpipe")
        return p

    def Train(self) -> Params:
        return super().Train().Set(mesh="data:8,stage:4")
