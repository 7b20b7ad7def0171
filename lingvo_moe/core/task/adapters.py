"""Low-rank adapters (Hu et al. 2021): weights stay as they are, and products A·B that are added to them are trained.

A variable W of a product has the dimensions of its inputs before those of its outputs, and those that count layers and
experts before both. Its adapter is A [..., I, r] and B [..., r, O], for I inputs and O outputs: the weights in use are
W + scale * A·B. A begins random and B with zeros, so that nothing changes at first. Adapters are variables of the task,
theta.adapters.NAME.{a,b}.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config.hyperparams import ParamError, Params
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import current_mesh
from lingvo_moe.core.sharding.annotate import mesh_split

ADAPTERS = "adapters"
_COUNTS = "LE"  # letters of dimensions that count products
_MODEL = "M"


def scale_of(task: Params) -> float:
    """The factor of the products; 0 without adapters."""
    rank = task.adapter_rank if "adapter_rank" in task else 0
    return task.adapter_alpha / rank if rank else 0.0


def with_adapters(specs: NestedMap, rank: int, pattern: str) -> NestedMap:
    """VariableSpecs, not trainable, with those of the adapters of all products whose paths have the pattern.

    Raises ParamError: no product has it, or it is no regular expression.
    """
    try:
        chosen = [(path, spec) for path, spec in _products(specs) if re.search(pattern, path)]
    except re.error as e:
        raise ParamError(
            "task.adapter_weights", pattern, f"is no regular expression: {e}"
        ) from None
    if not chosen:
        paths = ", ".join(path for path, _ in _products(specs))
        raise ParamError("task.adapter_weights", pattern, f"matches none of {paths}")
    new = specs.Transform(lambda spec: replace(spec, trainable=False))
    new[ADAPTERS] = NestedMap({name_of(path): _adapter(path, s, rank) for path, s in chosen})
    return new


def name_of(path: str) -> str:
    """The name of a variable's adapter."""
    return re.sub(r"\W+", "_", path)


def inputs_of(spec: VariableSpec) -> tuple[int, int]:
    """The first dimension of a product's inputs, and that of its outputs."""
    begin = len(spec.letters) - len(spec.letters.lstrip(_COUNTS))
    letters = spec.letters[begin:]
    return begin, len(spec.letters) - 1 if letters.endswith(_MODEL) else begin + 1


def _products(specs: NestedMap) -> Iterator[tuple[str, VariableSpec]]:
    """The variables that are products' weights, by path."""
    for path, spec in specs.FlattenItems():
        if spec.trainable and not spec.is_vector and not spec.packs:
            begin, _ = inputs_of(spec)
            if len(spec.shape) - begin >= 2:
                yield path, spec


def _adapter(path: str, spec: VariableSpec, rank: int) -> NestedMap:
    begin, middle = inputs_of(spec)
    counts, inputs = spec.shape[:begin], math.prod(spec.shape[begin:middle])
    outputs = math.prod(spec.shape[middle:])

    def part(name: str, shape: tuple[int, ...], letters: str, init: WeightInit) -> VariableSpec:
        split = (*spec.split[:begin], None, None)
        where = f"{ADAPTERS}.{name_of(path)}.{name}"
        whole = replace(spec, path=where, shape=(*counts, *shape), init=init, split=split)
        return replace(whole, letters=spec.letters[:begin] + letters, free_dims=())

    random = WeightInit.Gaussian(1 / math.sqrt(inputs))
    return NestedMap(
        a=part("a", (inputs, rank), "IR", random),
        b=part("b", (rank, outputs), "RO", WeightInit.Constant(0)),
    )


def adapted(theta: NestedMap, specs: NestedMap, scale: float) -> NestedMap:
    """The weights in use, without adapters; `theta` and `specs` are with them."""
    new, mesh = NestedMap(theta), current_mesh()
    adapters = new.pop(ADAPTERS)
    base = NestedMap({name: spec for name, spec in specs.items() if name != ADAPTERS})
    out = []
    for (path, weight), spec in zip(new.FlattenItems(), base.Flatten(), strict=True):
        if (adapter := adapters.get(name_of(path))) is not None:
            product = tf.reshape(tf.matmul(adapter.a, adapter.b), weight.shape)
            weight = tf.stop_gradient(weight) + tf.cast(scale, weight.dtype) * product
            if mesh is not None and mesh.size > 1:
                split = spec.StoredSplit(mesh) if spec.stack_dims else spec.split
                weight = mesh_split(weight, mesh, split)
        out.append(weight)
    return new.Pack(out)


def added(adapter: Any, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """The array that an adapter adds to a variable of that shape, or to a part of it."""
    return (np.matmul(adapter.a, adapter.b) * np.float32(scale)).reshape(shape)


def merged(theta: NestedMap, scale: float) -> NestedMap:
    """Arrays in use, without adapters; as they are where there are none."""
    if ADAPTERS not in theta:
        return theta
    new = NestedMap(theta)
    adapters = new.pop(ADAPTERS)
    out = []
    for path, weight in new.FlattenItems():
        if (adapter := adapters.get(name_of(path))) is not None:
            weight = (weight + added(adapter, weight.shape, scale)).astype(weight.dtype)
        out.append(weight)
    return new.Pack(out)
