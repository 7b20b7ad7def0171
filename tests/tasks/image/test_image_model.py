"""The image classifier: its size, its metrics, and ResNet with images sharded along their height."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import compare

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.core.engine.eager.testing import run_single
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.layers.classifier import Classifier
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.tasks.image.image_model import ImageClassifier
from lingvo_moe.tasks.image.networks import ConvNet, ResNet

SEED = make_seed(3, 4)


def _tiny(**kwargs):
    """A residual network of one bottleneck a stage, with weights of a run that has begun."""
    network = ResNet.Params().Set(base_channels=4, blocks=[1, 1, 1, 1], zero_init_last_scale=False)
    p = ImageClassifier.Params().Set(name="image", network=network, num_classes=8)
    return p.Set(**kwargs).Instantiate()


def _batch(rows, size=64, classes=8):
    rng = np.random.RandomState(0)
    images = rng.randint(0, 256, (rows, size, 32, 3)).astype(np.uint8)
    return NestedMap(images=images, labels=rng.randint(0, classes, rows).astype(np.int32))


def test_resnet_50_has_the_known_size():
    task = ImageClassifier.Params().Set(name="image").Instantiate()
    specs = task.VariableSpecs().Flatten()
    sizes = [(s.trainable, int(np.prod(s.shape))) for s in specs]
    assert sum(n for trainable, n in sizes if trainable) == 25_557_032
    assert sum(n for trainable, n in sizes if not trainable) == 53_120  # moving averages
    by_part = task.Costs().FlopsByPart(NestedMap(images=NestedMap(shape=(2, 224, 224, 3))))
    # 4.1e9 products and as many sums, and the rest
    assert sum(by_part.values()) / 2 == pytest.approx(8.3e9, rel=0.02)


def test_metrics_leave_padding_out():
    network = ConvNet.Params().Set(channels=[4])
    task = ImageClassifier.Params().Set(name="image", network=network, num_classes=8).Instantiate()
    theta, batch = task.InitTheta(SEED), _batch(6, size=8)
    padded = batch.Transform(lambda a: np.concatenate([a, a[:2]]))
    padded.labels[6:] = -1
    want, got = (run_single(task.EvalStep, [theta, b]) for b in (batch, padded))
    assert (want.images, got.images) == (6, 6)
    assert set(want) == {"loss", "nll", "top1", "top5", "images"}
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def _value_grads_updates(task):
    """A function (theta, batch) -> loss, gradients of trainable variables, next moving averages."""
    trainable = [s.trainable for s in task.VariableSpecs().Flatten()]

    def run(theta, batch):
        leaves = [w for w, t in zip(theta.Flatten(), trainable, strict=True) if t]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            loss, metrics = task.FProp(theta, batch, SEED)
        updates = metrics.pop("updates")
        return NestedMap(metrics=metrics, grads=tape.gradient(loss, leaves), updates=updates)

    return run


@pytest.mark.parametrize(
    "mesh, split, height",
    [("rows:4", {"Y": "rows"}, 128), ("data:2,rows:2", {"B": "data", "Y": "rows"}, 64)],
)
def test_sharded_along_height(mesh, split, height):
    """Values, gradients and moving averages equal one device's; only halos and sums are sent."""
    task, batch = _tiny(activation_split=split), _batch(4, height)
    theta = task.InitTheta(SEED)
    run = _value_grads_updates(task)
    place = ("data" if "B" in split else None, "rows", None, None)
    specs = batch.Transform(lambda a: TensorSpec(a.shape, a.dtype.name, place[: a.ndim]))
    splits = [task.VariableSpecs(), specs]
    _, found = compare(run, [theta, batch], splits, mesh, tol=2e-4, floor=1e-3)
    assert found["collective-permute"] > 10
    moved = [c for c in parse_collectives(found.hlo) if c.kind in ("all-gather", "all-to-all")]
    assert not moved


def test_classes_sharded_while_images_are():
    """Every device computes the logits of its classes for all images: features are gathered, logits never."""
    over_classes = {"activation_split": {"V": "data"}, "weight_split": {"V": "data"}}
    task = _tiny(
        network=ConvNet.Params().Set(channels=[4]),
        head=Classifier.Params().Set(**over_classes),
        activation_split={"B": "data"},
        num_classes=1024,
    )
    batch = _batch(8, size=8, classes=1024)
    theta, run = task.InitTheta(SEED), _value_grads_updates(task)
    place = ("data", None, None, None)
    specs = batch.Transform(lambda a: TensorSpec(a.shape, a.dtype.name, place[: a.ndim]))
    splits = [task.VariableSpecs(), specs]
    _, found = compare(run, [theta, batch], splits, "data:4", tol=1e-5)
    row_of_logits = 1024 * 4  # bytes
    assert max(c.num_bytes for c in parse_collectives(found.hlo)) < row_of_logits
    assert task.VariableSpecs().head.w.split == (None, "data")
