"""Finds the values of a state in a checkpoint with other number formats, after `task.dtype` has changed.

A weight in bfloat16 has its float32 value in the slot `master` (optimizers/base_optimizer.py). A float32 weight is
restored from it, and both from a float32 weight.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.lowering.specs import TensorSpec, numpy_dtype

_MASTER = ".master"  # MASTER of optimizers/base_optimizer.py, which imports TensorFlow
_FLOATS = ("float32", "bfloat16", "float16")

# The shape and type of each variable of a checkpoint, by name.
Types = Mapping[str, tuple[tuple[int, ...], str]]


def is_master(name: str) -> bool:
    """Whether a tensor of a state is the float32 value of a weight."""
    return name.startswith("slots.") and name.endswith(_MASTER)


def sources(specs: Iterable[TensorSpec], types: Types) -> list[TensorSpec]:
    """Returns, for each tensor of a state, the checkpoint's tensor that has its value, to be put where the state's is.

    A name that `types`, those of the checkpoint, lack stays as it is.
    """
    return [_source(spec, types) for spec in specs]


def _source(spec: TensorSpec, types: Types) -> TensorSpec:
    name = spec.name
    path = name.partition(".")[2]
    if is_master(name) and name not in types:
        name = f"theta.{path.removesuffix(_MASTER)}"
    elif name == f"theta.{path}" and spec.dtype == "float32" and f"slots.{path}{_MASTER}" in types:
        name = f"slots.{path}{_MASTER}"
    shape, dtype = types.get(name, (spec.shape, spec.dtype))
    if shape != spec.shape or {dtype, spec.dtype} - {*_FLOATS}:
        return spec
    return replace(spec, dtype=dtype, name=name)


def converted(values: Sequence[Any], specs: Sequence[TensorSpec], engine: Engine) -> list[Any]:
    """An engine's tensors in the types of the specs, sharded as these say."""
    return engine.Put([_cast(x, spec, engine) for x, spec in zip(values, specs)], list(specs))


def _cast(value: Any, spec: TensorSpec, engine: Engine) -> Any:
    dtype = numpy_dtype(spec.dtype)
    if isinstance(value, jax.Array):
        return value if value.dtype == dtype else value.astype(dtype)
    array = np.asarray(engine.Get(value))
    return value if array.dtype == dtype else array.astype(dtype)
