"""Makes a run of published weights: its experiment, its tokenizer, and a checkpoint at step 0."""

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.files.artifacts import IMPORTED, PUBLISHED, RunArtifacts
from lingvo_moe.core.files.copies import LocalCopy
from lingvo_moe.core.files.files import read_object
from lingvo_moe.core.files.store import is_address
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pages.tables import Table, numbers, words
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.runs.run_lock import RunLock
from lingvo_moe.core.weights.gguf_file import GgufFile
from lingvo_moe.core.weights.mapping import WeightMapping
from lingvo_moe.core.weights.open_source import open_source, state_of
from lingvo_moe.core.weights.quantized import Dequantized
from lingvo_moe.core.weights.source import WeightsError, WeightSource, same_values
from lingvo_moe.tasks.families.family import FAMILIES, HEAD, Family
from lingvo_moe.tasks.families.llama_gguf import LlamaGguf, gguf_tokenizer
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.vocabulary.language_codes import LanguageCodes
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import JsonVocabulary
from lingvo_moe.tasks.text.vocabulary.vocabulary import open_vocabulary

if TYPE_CHECKING:
    from lingvo_moe.core.engine.checkpoints.streamed import StreamedCheckpoint

registry.AllNames()  # imports the families, which lie beside their experiments
CONFIG = "config.json"
_AT_ONCE = 8 << 20  # values of a tensor
_KEPT, _LARGEST = ("LICENSE*", "NOTICE*"), 64 << 20  # files beside weights, and their bytes
# The files of a directory in a bucket that are copied.
_BESIDE = re.compile(r"(?!.*\.index\.json)[^/]*(\.(json|model|txt|jinja)|LICENSE[^/]*|NOTICE[^/]*)")
# Parameters of all imported models: embeddings as they are in the table, and no rounding of activations.
_TIED = "task.tied_softmax"
_AS_PUBLISHED = {"task.embedding_scale": 1.0, "task.fprop_dtype": "float32"}


@dataclass(frozen=True)
class Published:
    """A published checkpoint: its weights, and the model that they are of."""

    source: WeightSource
    family: Family
    config: Mapping[str, Any]  # the content of config.json
    files: Mapping[str, bytes]  # what lies beside the weights and goes with them, e.g. LICENSE
    override: str  # what the model's parameters are beside those of the family's experiment
    params: Params  # those of the experiment with the override
    vocabulary: bytes  # for open_vocabulary
    codes: LanguageCodes | None = None  # those that a translator has


def open_published(path: str | os.PathLike) -> Published:
    """Opens a checkpoint: a directory with config.json and weights, or a GGUF; or a directory in a bucket, of which the
    weights are read where they are.

    Raises:
        WeightsError: there is none, it is damaged, or of a family or with parts that are not known.
        DataError: its tokenizer is missing or damaged.
    """
    source, path = open_source(path), _beside_weights(path)
    if isinstance(source, GgufFile):
        tokenizer = json.dumps(gguf_tokenizer(source), ensure_ascii=False).encode()
        vocabulary, codes = JsonVocabulary(tokenizer, path).model_bytes, None
        source = LlamaGguf(source)
        config, where = source.config, source.where
        family, values = _model(config, where)
    else:
        source, where = Dequantized(source), str(path / CONFIG)
        config = read_object(path / CONFIG, WeightsError)
        family, values = _model(config, where)
        vocabulary, codes = family.Vocabulary(path, config)
    source = family.Source(source)
    values |= family.FromTensors(config, source)
    if values[_TIED] and _has_a_head(source, family.TABLE):
        values[_TIED] = False
    size = open_vocabulary(vocabulary).size
    override = _override(values | dict.fromkeys(family.VOCAB_SIZES, size))
    params = _params(family, override, where)
    files = _files_beside(path if path.is_dir() else path.parent, family)
    return Published(source, family, config, files, override, params, vocabulary, codes)


def published_model(path: str | os.PathLike) -> tuple[str, str]:
    """The experiment and the override of a checkpoint, which need only have config.json, or be a GGUF.

    Raises as open_published.
    """
    file = _beside_weights(path) / CONFIG
    if not file.is_file():
        published = open_published(path)
        return published.family.EXPERIMENT, published.override
    family, values = _model(read_object(file, WeightsError), str(file))
    override = _override(values)
    _params(family, override, str(file))
    return family.EXPERIMENT, override


def _beside_weights(path: str | os.PathLike) -> Path:
    """The path; of a directory in a bucket a copy of the files that lie beside its weights. Raises WeightsError."""
    return _copied(os.fspath(path)) if is_address(path) else Path(path)


@functools.cache
def _copied(address: str) -> Path:
    try:
        return LocalCopy(address, lambda name: bool(_BESIDE.fullmatch(name))).path
    except OSError as e:
        raise WeightsError(str(e)) from e


def _model(config: Mapping[str, Any], where: str) -> tuple[Family, dict[str, Any]]:
    """The family of a config.json, and parameters by path. Raises WeightsError."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise WeightsError(
            f"{where}: model_type={kind!r}{did_you_mean(kind, list(FAMILIES))}; known are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    return family, _AS_PUBLISHED | family.Overrides(config, where)


def _override(values: Mapping[str, Any]) -> str:
    return ";".join(f"{name}={registry.escape(str(value))}" for name, value in values.items())


def params_of(family: Family, config: Mapping[str, Any], where: str) -> Params:
    """The parameters of the model that a config.json describes. Raises WeightsError: there can be none."""
    return _params(family, _override(_AS_PUBLISHED | family.Overrides(config, where)), where)


def _files_beside(directory: Path, family: Family) -> dict[str, bytes]:
    """The licences and notices of a checkpoint, and what its family keeps as it is, by name."""
    files = (path for form in (*_KEPT, *family.FILES) for path in directory.glob(form))
    return {f.name: f.read_bytes() for f in files if f.is_file() and f.stat().st_size < _LARGEST}


def _params(family: Family, override: str, where: str) -> Params:
    """The experiment's parameters. Raises WeightsError, which names the key, where a model cannot have a value."""
    try:
        return registry.GetParams(family.EXPERIMENT, override)
    except ValueError as e:
        reason = str(e).removeprefix("--model_params_override: ")
        for parameter, (key, _) in family.KEYS.items():
            reason = reason.replace(f"{parameter}=", f"{key}=")
        raise WeightsError(f"{where}: {reason}") from e


def _has_a_head(source: WeightSource, table: str) -> bool:
    """Whether there is a table of the softmax that is no copy of the embeddings'."""
    if not {HEAD, table} <= source.entries.keys():
        return HEAD in source.entries
    return not same_values(source, HEAD, table)


def import_checkpoint(
    published: Published, output: Path, progress: Callable[[str], None]
) -> list[str]:
    """Makes a run at `output`, or goes on with one whose import was killed.

    Memory holds a slice of a tensor and its values in our layout, and what is being written; of a tensor that cannot be
    cut, all. `progress` is called with a line.

    Returns the names of the tensors that are left out, since they are no weights of the model.

    Raises:
        WeightsError: a tensor is missing, left over, or of another shape; or there is a run at `output` already.
        RunLockError: another import, or a trainer, is at work there.
    """
    from lingvo_moe.core.engine.checkpoints.streamed import StreamedCheckpoint

    params, source = published.params, published.source
    specs = params.task.Instantiate().VariableSpecs()
    mapping = published.family.Mapping(params.task, specs)
    left_out = mapping.Check(source, published.family.LeftOut(params.task, source))
    run = RunDir(output, "--output")
    if run.steps or run.summaries_dir.exists():
        raise WeightsError(f"{output}: there is a run already; name another directory")
    with RunLock(output) as lock:
        lock.Acquire()
        _describe(published, run, _places(source, mapping, left_out))
        identity = f"{source.where} {state_of(source.where)} {published.override}"
        with StreamedCheckpoint(output, NestedMap(theta=specs), identity) as checkpoint:
            _write_tensors(source, mapping, checkpoint, progress)
            progress("completing the checkpoint")
            checkpoint.Finish(0)
    return left_out


def _write_tensors(
    source: WeightSource,
    mapping: WeightMapping,
    checkpoint: "StreamedCheckpoint",
    progress: Callable[[str], None],
) -> None:
    """Writes those that the checkpoint does not have yet, file by file."""
    needed = [name for name in source.entries if name in mapping.tensors]
    names = [name for name in needed if name not in checkpoint.written]
    for number, name in enumerate(names, 1 + len(checkpoint.written)):
        progress(f"tensor {number:,} of {len(mapping.tensors):,}: {name}")
        for part in mapping.Slices(name, _AT_ONCE):
            tensor = source.Read(name, part.rows)
            for pair in mapping.tensors[name]:
                values = mapping.Values(pair, tensor)
                checkpoint.Write(f"theta.{pair.path}", *mapping.Box(pair, part), values)
        checkpoint.Written(name)


def _places(
    source: WeightSource, mapping: WeightMapping, left_out: Sequence[str]
) -> list[list[str]]:
    """A row of `placement` for the tensors of each rule; those that are left out share one by names without numbers."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, pairs in mapping.tensors.items():
        variables = " and ".join(pair.rule.variable for pair in pairs)
        names.setdefault((pairs[0].rule.tensor, variables), []).append(name)
    for name in left_out:
        names.setdefault((re.sub(r"\d+", "*", name), "left out"), []).append(name)
    rows = []
    for (tensor, variable), alike in names.items():
        entries = [source.entries[name] for name in alike]
        shapes = dict.fromkeys(f"{[*entry.shape]}" for entry in entries)
        forms = dict.fromkeys(entry.form or entry.dtype for entry in entries)
        values = sum(math.prod(entry.shape) for entry in entries)
        about = [", ".join(shapes), ", ".join(forms), f"{values:,}", variable]
        rows.append([tensor, f"{len(alike):,}", *about])
    return rows


def placement(run: Path) -> Table:
    """The table of what became of the tensors of an imported run."""
    columns = [*words("tensor"), *numbers("number"), *words("shape", "stored as")]
    columns += [*numbers("values"), *words("variable")]
    return Table(columns, RunDir(run).artifacts.about[IMPORTED]["places"])


def _describe(published: Published, run: RunDir, places: list[list[str]]) -> None:
    """Writes all of a run but its checkpoint."""
    vocabs = dict.fromkeys(("source", "target"), published.vocabulary)
    artifacts = text_artifacts(vocabs, codes=published.codes)
    types = [entry.dtype for entry in published.source.entries.values()]
    usual = max(dict.fromkeys(types), key=types.count)
    others = {n: e.dtype for n, e in published.source.entries.items() if e.dtype != usual}
    about = repr((published.config, [*published.source.entries.items()]))
    imported = {
        "from": published.source.where,
        # Of the config, and of the names, shapes and types of tensors.
        "digest": hashlib.sha256(about.encode("utf-8", "replace")).hexdigest(),
        "config": published.config,
        "dtype": usual,
        "other_dtypes": others,
        "places": places,
    }
    files = {f"{PUBLISHED}{name}": content for name, content in published.files.items()}
    whole = RunArtifacts({**artifacts.files, **files}, {**artifacts.about, IMPORTED: imported})
    run.Write(published.family.EXPERIMENT, published.override, whole, params=published.params)
