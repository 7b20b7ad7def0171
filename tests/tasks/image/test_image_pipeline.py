"""ResNet in stages: training steps are those of the model in micro-batches, on any mesh."""

import math
import re

import numpy as np
import pytest
from equivalence import assert_same

from lingvo_moe.core.config.checks import ParamError
from lingvo_moe.core.engine.eager.testing import run_sharded, run_single
from lingvo_moe.core.input.base_input import ArraySpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.core.pipeline.stage_vectors import by_path, from_paths
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.micro_batches import accumulating_step
from lingvo_moe.core.task.pipelined_step import pipelined_step
from lingvo_moe.params.image.resnet import ResNet50, ResNet50Pipe4
from lingvo_moe.tasks.image.image_model import ImageClassifier
from lingvo_moe.tasks.image.networks import ResNet

ROWS, NUM, SIZE = 8, 2, 32
# Bottlenecks with and without stride and shortcut.
RESNET = ResNet.Params().Set(base_channels=4, blocks=[2, 1], zero_init_last_scale=False)


def _task(stages, mesh="", schedule="1f1b"):
    p = ImageClassifier.Params().Set(name="image", network=RESNET, num_classes=8)
    p.Set(optimizer=Sgd.Params())
    if stages > 1:
        p.pipeline.Set(stages=stages, micro_batches=NUM, image_size=SIZE, schedule=schedule)
    if "stage" in mesh:
        p.weight_split = {"Z": "stage"}
    if "data" in mesh:
        p.activation_split = {"B": "data"}
    return p.Instantiate()


def _specs(split=None):
    images = ArraySpec((ROWS, SIZE, SIZE, 3), "uint8", "BYXI", (split, None, None, None))
    return NestedMap(images=images, labels=ArraySpec((ROWS,), "int32", "B", (split,)))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.RandomState(0)
    images = rng.randint(0, 256, (ROWS, SIZE, SIZE, 3)).astype(np.uint8)
    labels = rng.randint(0, 8, ROWS).astype(np.int32)
    labels[-1] = -1  # A row of padding.
    return NestedMap(images=images, labels=labels)


@pytest.fixture(scope="module")
def plain(batch):
    task = _task(1)
    state = run_single(task.InitState, [np.int32(3)], jit_compile=False)
    step = accumulating_step(task, NUM, _specs())
    return task, state, run_single(step, [state, batch], jit_compile=False)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_is_that_of_micro_batches(schedule, plain, batch):
    task, state, (new, metrics) = plain
    mesh = "stage:2,data:2"
    pipelined = _task(2, mesh, schedule)
    specs = pipelined.StateSpecs()
    packed = from_paths(specs, by_path(task.StateSpecs(), state))
    (found, got), collectives = run_sharded(
        pipelined_step(pipelined, _specs("data")),
        [packed, batch],
        Mesh.parse(mesh),
        [specs, _specs("data")],
    )
    # No weights and no images leave their devices, but the 64 features of a row, for the loss.
    moved = re.findall(r"= \(?\w+\[([\d,]+)\].* all-(?:gather|to-all)\(", collectives.hlo)
    assert len(moved) == collectives["all-gather"] + collectives["all-to-all"]
    assert max((math.prod(map(int, shape.split(","))) for shape in moved), default=0) <= 64
    assert_same(got, metrics, floor=0.0)
    # The first velocity is the gradient with the decay of weights.
    assert_same(by_path(specs, found), by_path(task.StateSpecs(), new), floor=0.0)


@pytest.mark.slow
def test_inference_is_the_same(plain, batch):
    task, state, _ = plain
    pipelined = _task(3)
    theta = from_paths(pipelined.VariableSpecs(), by_path(task.VariableSpecs(), state.theta))
    want = run_single(task.EvalStep, [state.theta, batch], jit_compile=False)
    found = run_single(pipelined.EvalStep, [theta, batch], jit_compile=False)
    assert_same(found, want, floor=0.0)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_resnet_50_is_divided_by_flops(stages):
    network = ResNet.Params()
    network.pipeline.stages = stages
    parts = ResNet.Partition(network)
    assert len(parts.costs) == stages and parts.imbalance < 1.17
    assert sum(parts.costs) == ResNet.FPropMeta(network, (1, 224, 224, 3)).flops


def test_the_experiment_has_the_weights_of_resnet_50():
    plain = ResNet50().Task().Instantiate()
    task = ResNet50Pipe4().Task().Instantiate()
    packed = task.VariableSpecs().Flatten()
    parts = [part for spec in packed for row in spec.packs for part in row]
    own = [spec for spec in packed if not spec.packs]
    assert sorted(s.path for s in [*parts, *own]) == sorted(
        s.path for s in plain.VariableSpecs().Flatten()
    )
    flops = task.Costs().StageFlops(ResNet50Pipe4().Input().Instantiate().BatchSpec())
    assert len(flops) == 4
    mesh = Mesh.parse(ResNet50Pipe4().Train().mesh)
    assert mesh.axis_size("stage") == 4


def test_what_cannot_be():
    with pytest.raises(
        ParamError, match=r"task.pipeline.stages=2: .*Adafactor.* adam, adamw or sgd"
    ):
        _task(2).p.Copy().Set(optimizer=Adafactor.Params()).Instantiate()
    inputs = ResNet50().Input()
    for change, message in (
        ({"stages": 99}, r"task.pipeline.stages=99: .* only 18 layers"),
        (
            {"stages": 2, "micro_batches": 3},
            r"micro_batches=3 does not divide input.batch_size=1024",
        ),
    ):
        task = ResNet50().Task()
        task.pipeline.Set(**change)
        with pytest.raises(ValueError, match=message):
            ImageClassifier.CheckInput(task, inputs)
