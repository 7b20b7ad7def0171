"""Makes a run of published weights: its experiment, its tokenizer, and a checkpoint at step 0."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.weights.gguf_file import GgufFile
from lingvo_moe.core.weights.open_source import open_source
from lingvo_moe.core.weights.quantized import Dequantized
from lingvo_moe.core.weights.source import WeightsError, WeightSource
from lingvo_moe.tasks.families.family import Family
from lingvo_moe.tasks.families.llama import LlamaFamily, LlamaGguf, gguf_tokenizer
from lingvo_moe.tasks.families.mixtral import MixtralFamily
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import JsonVocabulary

FAMILIES: Mapping[str, Family] = {
    kind: f() for f in (LlamaFamily, MixtralFamily) for kind in f.TYPES
}
CONFIG = "config.json"
# Parameters of all imported models: embeddings as they are in the table, and no rounding of activations.
_AS_PUBLISHED = {"task.embedding_scale": 1.0, "task.fprop_dtype": "float32"}


@dataclass(frozen=True)
class Published:
    """A published checkpoint: its weights, and the model that they are of."""

    source: WeightSource
    family: Family
    override: str  # what the model's parameters are beside those of the family's experiment
    vocabulary: bytes  # for open_vocabulary

    def Params(self) -> Params:
        """The experiment's parameters."""
        return registry.GetParams(self.family.EXPERIMENT, self.override)


def open_published(path: str | os.PathLike) -> Published:
    """Opens a checkpoint: a directory with config.json and weights, or a GGUF.

    Raises WeightsError: there is none, it is damaged, or of a family or with parts that are not known.
    """
    path = Path(path)
    source = open_source(path)
    if isinstance(source, GgufFile):
        vocabulary = json.dumps(gguf_tokenizer(source), ensure_ascii=False).encode()
        source = LlamaGguf(source)
        config, where = source.config, source.where
    else:
        source, where = Dequantized(source), str(path / CONFIG)
        config = _config(path / CONFIG)
        vocabulary = JsonVocabulary.Load(path).model_bytes
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise WeightsError(
            f"{where}: model_type={kind!r}{did_you_mean(kind, list(FAMILIES))}; known are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    values = family.Overrides(config, where) | _AS_PUBLISHED
    if _has_a_head(source):
        values["task.tied_softmax"] = False
    override = ";".join(f"{name}={registry.escape(str(value))}" for name, value in values.items())
    return Published(source, family, override, vocabulary)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise WeightsError(f"{path}: {getattr(e, 'strerror', None) or e}") from None
    if not isinstance(config, dict):
        raise WeightsError(f"{path}: must be an object")
    return config


def _has_a_head(source: WeightSource) -> bool:
    """Whether the softmax has a table of its own, whatever config.json says."""
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if head not in source.entries or table not in source.entries:
        return head in source.entries
    return not np.array_equal(source.Read(head), source.Read(table))


def import_checkpoint(published: Published, output: Path, progress: Callable[[str], None]) -> None:
    """Makes a run at `output`, or goes on with one whose import was killed.

    Memory holds a tensor and its values in our layout, and what is being written. `progress` is called with a line.

    Raises WeightsError: a tensor is missing, left over, or of another shape; or there is a run at `output` already.
    """
    from lingvo_moe.core.engine.checkpoints.streamed import StreamedCheckpoint

    params, source = published.Params(), published.source
    task = params.task.Instantiate()
    mapping = published.family.Mapping(params.task, task.VariableSpecs())
    mapping.Check(source, published.family.LEFT_OUT)
    if RunDir(output).steps:
        raise WeightsError(f"{output}: there is a run already; name another directory")
    run, about = RunDir(output), {"imported": {"from": source.where}}
    artifacts = text_artifacts(dict.fromkeys(("source", "target"), published.vocabulary))
    run.Write(
        published.family.EXPERIMENT,
        published.override,
        RunArtifacts(artifacts.files, {**artifacts.about, **about}),
        params=params,
    )
    specs = NestedMap(theta=task.VariableSpecs())
    identity = f"{source.where} {published.override}"
    checkpoint = StreamedCheckpoint(output, specs, identity)
    pairs = [pair for pair in mapping.pairs if pair.tensor not in checkpoint.written]
    for number, pair in enumerate(pairs, 1 + len(checkpoint.written)):
        progress(f"tensor {number:,} of {len(mapping.pairs):,}: {pair.tensor}")
        values = pair.ToSlots(source.Read(pair.tensor), mapping.sizes)
        parts = ((f"theta.{slot.path}", slot.index, part) for slot, part in values.items())
        checkpoint.Write(pair.tensor, parts)
    checkpoint.Finish(0, {})
