"""ResNet-50 with a wide head: the strategy that auto_shard finds beside data parallelism, estimated and measured.

    python -m benchmarks.auto_parallel

The estimate is for the full network, images of 224 pixels, over eight devices. What is measured is a whole step
(forward, backward, update) of a narrower network on smaller images over eight virtual CPU devices, which share the
cores of this machine, one strategy after the other; the figures are medians.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.compile_time import host
from lingvo_moe import xla_sharding as xs
from lingvo_moe.analysis.plans.network.mesh_machine import CPU
from lingvo_moe.analysis.search.auto_shard.strategy import Strategy, mapping_text
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.engine.devices import request_cpu_devices
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import CompiledProgram, PjrtEngine
from lingvo_moe.core.nested_map import NestedMap, flatten, map_structure, pack_as
from lingvo_moe.core.pages.tables import Table, markdown, words
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.tasks.image.image_model import ImageClassifier
from tools import _cli

_MESH = Mesh(("data",), (8,))
_LEARNING_RATE = 1e-3
_FOUND, _BY_HAND, _DATA_PARALLEL = "found", "head by classes", "data parallel"


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.auto_parallel", __doc__)
    flags.DEFINE_integer("classes", 130_000, "classes of the head", checks.SIZE)
    flags.DEFINE_integer("batch", 256, "images of the estimate", checks.SIZE)
    flags.DEFINE_list("topologies", ("v3:2x2", "v5e:2x4", "h100:1x8"), "machines of the estimate")
    flags.DEFINE_integer("small_channels", 8, "of the measured network's stem", checks.SIZE)
    flags.DEFINE_integer("small_batch", 64, "images of the measured steps", checks.SIZE)
    flags.DEFINE_integer("small_pixels", 64, "of their rows and columns", checks.SIZE)
    flags.DEFINE_integer("steps", 5, "measured steps of each strategy; 0: none", checks.COUNT)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("auto_parallel", lambda: _run(args), "interrupted")


def _run(args: Flags) -> int:
    request_cpu_devices(_MESH.size)
    rows = []
    for topology in args.topologies:
        sizes = args.classes, args.batch, 224, 64, "bfloat16"
        found, plain = (estimate(by, *sizes, topology) for by in (_FOUND, _DATA_PARALLEL))
        searched = found.search["costs_seconds"] + found.search["solving_seconds"]
        times = [f"{strategy.seconds * 1e3:.1f} ms" for strategy in (plain, found)]
        ratio = f"{plain.seconds / found.seconds:.1f}"
        search = found.machine, f"{found.search['operations']}", f"{searched:.2f} s"
        rows.append([*search, *times, ratio, *_sharded(found)])
    heads = "machine, operations, search, data parallel, found, ratio, head, convolutions by batch"
    print(markdown(Table(words(*heads.split(", ")), rows)), end="")
    if args.steps:
        sizes = args.classes, args.small_batch, args.small_pixels, args.small_channels, "float32"
        measured = measure(sizes, args.steps)
        print(f"\nMeasured on {host()}, {args.steps} steps each:")
        for by, seconds in measured.items():
            print(f"{by}: {seconds * 1e3:.0f} ms")
        print(f"ratio: {measured[_DATA_PARALLEL] / measured[_FOUND]:.2f}")
    return 0


def _sharded(found: Strategy) -> tuple[str, str]:
    """The head's weights, and how many convolutions have their batch sharded."""
    head = next(t for t in found.arguments if t.name == "theta.head.w")
    convolutions = [t.mapping for t in found.operators if t.type == "Conv2D"]
    by_batch = sum(mapping == ("data", None, None, None) for mapping in convolutions)
    return mapping_text(head.mapping), f"{by_batch} of {len(convolutions)}"


class Loss:
    """The loss of a ResNet as a function of weights and a batch."""

    def __init__(
        self, by: str, classes: int, batch: int, pixels: int, channels: int, dtype: str
    ) -> None:
        """Args: `by` is `_FOUND` (no annotations), `_DATA_PARALLEL` (the batch is sharded in every layer), or
        `_BY_HAND` (as `image.ResNet50Classes130K`: the same, but for the head, whose classes are)."""
        task = ImageClassifier.Params().Set(name="resnet", num_classes=classes, fprop_dtype=dtype)
        task.network.base_channels = channels
        if by != _FOUND:
            task.activation_split = {"B": "data"}
        if by == _BY_HAND:
            task.head.activation_split = {"V": "data"}
            task.head.weight_split = {"V": "data"}
        self._task = task.Instantiate()
        self.theta = map_structure(
            lambda v: TensorSpec(v.shape, v.dtype, v.split), self._task.VariableSpecs()
        )
        self.images = TensorSpec((batch, pixels, pixels, 3), "uint8", ("data", None, None, None))
        self.labels = TensorSpec((batch,), "int32", ("data",))

    def __call__(self, theta: NestedMap, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        batch = NestedMap(images=images, labels=labels)
        return self._task.FProp(theta, batch, seed=tf.constant([0, 1]))[0]


def estimate(
    by: str, classes: int, batch: int, pixels: int, channels: int, dtype: str, topology: str
) -> Strategy:
    """The strategy found for a loss; that for data parallelism is fixed by annotations."""
    loss = Loss(by, classes, batch, pixels, channels, dtype)
    sharded = xs.auto_shard(
        loss.__call__,
        _MESH,
        differentiate=["theta"],
        topology=topology,
        in_shardings=_given(loss, by),
    )
    return sharded.Strategy(loss.theta, loss.images, loss.labels)


def _given(loss: Loss, by: str) -> Any:
    if by == _FOUND:
        return None
    whole = map_structure(
        lambda spec: TensorSpec(spec.shape, spec.dtype, (None,) * len(spec.shape)), loss.theta
    )
    return [whole, loss.images.split, loss.labels.split]


def measure(sizes: tuple[int, int, int, int, str], steps: int) -> dict[str, float]:
    """Seconds of a step by each strategy, medians."""
    engine = PjrtEngine(_MESH)
    times: dict[str, list[float]] = {by: [] for by in (_FOUND, _BY_HAND, _DATA_PARALLEL)}
    for by, taken in times.items():
        compiled, theta, images, labels = _compiled(by, engine, sizes)
        kinds = Counter(sorted(c.kind for c in compiled.Collectives()))
        print(f"{by}: {dict(kinds)}", file=sys.stderr)
        for step in range(steps + 1):
            start = time.perf_counter()
            theta, _ = compiled(theta, images, labels)
            if step:
                taken.append(time.perf_counter() - start)
        del compiled, theta  # gigabytes
    return {by: statistics.median(taken) for by, taken in times.items()}


def _compiled(
    by: str, engine: PjrtEngine, sizes: tuple[int, int, int, int, str]
) -> tuple[CompiledProgram, Any, np.ndarray, np.ndarray]:
    """A compiled step and its first arguments."""
    loss = Loss(by, *sizes)
    call: Any = loss
    theta_specs = loss.theta
    if by == _FOUND:
        call = xs.auto_shard(loss.__call__, _MESH, differentiate=["theta"], topology=CPU)
        strategy = call.Strategy(loss.theta, loss.images, loss.labels)
        print("found: head, convolutions by batch:", *_sharded(strategy), file=sys.stderr)
        by_path = {t.name: t for t in strategy.arguments}
        leaves = [
            TensorSpec(t.shape, "float32", t.mapping)
            for name, t in by_path.items()
            if name.startswith("theta.")
        ]
        theta_specs = pack_as(loss.theta, leaves)

    def step(theta: NestedMap, images: tf.Tensor, labels: tf.Tensor) -> tuple[NestedMap, tf.Tensor]:
        flat = flatten(theta)
        with tf.GradientTape() as tape:
            tape.watch(flat)
            value = call(theta, images, labels)
        gradients = tape.gradient(value, flat, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        new = [w - _LEARNING_RATE * g for w, g in zip(flat, gradients, strict=True)]
        return pack_as(theta, new), value

    compiled = engine.Build(step, [theta_specs, loss.images, loss.labels], donate=[0], name="step")
    assert isinstance(compiled, CompiledProgram)
    rng = np.random.RandomState(0)
    theta = map_structure(
        lambda s: (rng.standard_normal(s.shape) * 0.01).astype(np.float32), loss.theta
    )
    images = rng.randint(0, 256, loss.images.shape).astype(np.uint8)
    labels = rng.randint(0, sizes[0], loss.labels.shape).astype(np.int32)
    placed = engine.Put(theta, theta_specs)
    return compiled, placed, images, labels


if __name__ == "__main__":
    _cli.run(main)
