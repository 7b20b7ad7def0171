"""Writes the adapters of a run alone, in the files of the library `peft`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.engine.checkpoints.checkpoint_source import CheckpointSource
from lingvo_moe.core.files.files import open_to_write, write_json
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.adapters import ADAPTERS, name_of
from lingvo_moe.core.weights.layout import rearranged
from lingvo_moe.core.weights.mapping import WeightMapping, WeightPair
from lingvo_moe.core.weights.safetensors_file import write_safetensors
from lingvo_moe.core.weights.source import Entry, WeightsError

_PREFIX = "base_model.model."
_DIM = re.compile(r"\((?:[^()]|\([^()]*\))*\)|\w+")
_EMBEDDINGS = "embedding.table"  # whose adapters have other names and shapes in peft


def adapter_of(source: CheckpointSource, pair: WeightPair) -> NestedMap | None:
    """A [I, r] and B [r, O] of a pair's part of its variable, with dimensions before that count more; or None."""
    name = f"{ADAPTERS}.{name_of(pair.path)}"
    if f"{name}.a" not in source.entries:
        return None
    return NestedMap({part: source.ReadAt(f"{name}.{part}", pair.index) for part in "ab"})


def write_adapters(
    directory: Path,
    source: CheckpointSource,
    mapping: WeightMapping,
    sizes: Mapping[str, int],
    about: Mapping[str, Any],
) -> int:
    """Writes adapter_model.safetensors, and adapter_config.json with the keys of `about`; returns how many there are.

    Raises WeightsError: there are none; or one is of a tensor that peft has no adapter for.
    """
    tensors: dict[str, np.ndarray] = {}
    modules = []
    for name, pairs in mapping.tensors.items():
        adapters = [(pair, adapter) for pair in pairs if (adapter := adapter_of(source, pair))]
        if not adapters:
            continue
        modules.append(module := name.removesuffix(".weight"))
        parts = _matrices(*adapters[0], sizes) if len(pairs) == 1 else {}
        if not parts:
            raise WeightsError(
                f"{name}: is no matrix of one product, so peft has no adapter for it"
            )
        tensors |= {f"{_PREFIX}{module}.lora_{part}.weight": x for part, x in parts.items()}
    if not tensors:
        raise WeightsError(f"{source.where}: has no adapters: train some with task.adapter_rank")
    entries = {name: Entry(x.shape, str(x.dtype)) for name, x in tensors.items()}
    with open_to_write(directory / "adapter_model.safetensors") as file:
        write_safetensors(file, entries, tensors.values())
    write_json(directory / "adapter_config.json", {**about, "target_modules": modules})
    return len(modules)


def _matrices(
    pair: WeightPair, adapter: NestedMap, sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """A [r, I] and B [O, r], in the order of the tensor's rows and columns; {}: it is no matrix of one product."""
    ours, theirs = (_DIM.findall(x) for x in (pair.rule.variable_layout, pair.rule.layout))
    if len(theirs) != 2 or adapter.a.ndim != 2 or pair.path == _EMBEDDINGS:
        return {}
    inputs = len(ours) - 1 if ours[-1] == "m" else 1
    flat = [dim if "+" in dim else dim.strip("()") for dim in ours]
    before, after = (" ".join(dims) for dims in (flat[:inputs], flat[inputs:]))
    first, second = (adapter.a, f"({before}) rank"), (adapter.b, f"rank ({after})")
    if not {*re.findall(r"\w+", before)} <= {*re.findall(r"\w+", theirs[1])}:
        first, second = (
            second,
            first,
        )  # of the softmax, whose table's first dimension is that of outputs
    sizes = {**sizes, "rank": adapter.a.shape[1]}
    a = rearranged(*first, f"rank {theirs[1]}", sizes)
    b = rearranged(*second, f"{theirs[0]} rank", sizes)
    return {"A": np.ascontiguousarray(a), "B": np.ascontiguousarray(b)}


def peft_config(task: Params, base: str) -> dict[str, Any]:
    """The keys of adapter_config.json, but for the modules; `base` names the model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": task.adapter_rank,
        "lora_alpha": task.adapter_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
