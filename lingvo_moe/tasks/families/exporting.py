"""Writes the weights of a run as others read them: safetensors, config.json, and the files of its tokenizer."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.config.stored_params import difference, stored_values
from lingvo_moe.core.engine.checkpoints.checkpoint_source import CheckpointSource
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.checkpoints.run_weights import Chosen, read_newest
from lingvo_moe.core.files.artifacts import IMPORTED, PUBLISHED
from lingvo_moe.core.files.files import open_to_write, replaced_directory, write_json
from lingvo_moe.core.task.adapters import added, scale_of
from lingvo_moe.core.weights.mapping import WeightMapping, WeightPair
from lingvo_moe.core.weights.safetensors_file import NAMES, write_safetensors
from lingvo_moe.core.weights.source import Entry, WeightsError
from lingvo_moe.tasks.families.adapter_files import adapter_of, peft_config, write_adapters
from lingvo_moe.tasks.families.family import FAMILIES, Family
from lingvo_moe.tasks.families.importing import CONFIG, params_of
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.vocabulary.language_codes import NAME, PIECES
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import (
    CONFIG as TOKENIZER_CONFIG,
    ENDS,
    GENERATION,
    JsonVocabulary,
)

_TYPE_KEYS = ("torch_dtype", "dtype")  # of config.json
# Parameters that change no logit once a model is trained, or whose effect goes into the weights.
_WITHOUT_EFFECT = re.compile(
    r"(.*\.)?(activation_split|weight_split|dtype|fprop_dtype|jitter|\w+_loss_weight|balance_bias"
    r"|balance_quantiles|load_balance_weight)|(optimizer|pipeline)\..*|moe\.(dispatcher|capacity_factor|min_capacity)"
    r"|num_groups|attention_block|remat|repeat"
    r"|dropout|attention_dropout|label_smoothing|clip_gradient_norm|ema_decay|multi_token_weight|seed|name"
    r"|embedding_scale|softmax_scale|position\.shared|adapter_\w+"
)
_SHOWN = 3  # parameters in a message


@dataclass(frozen=True)
class Description:
    """A model as its family describes it."""

    family: Family
    config: Mapping[str, Any]  # config.json
    params: Params  # those that the config says


@dataclass(frozen=True)
class ExportOptions:
    """The form of an export."""

    dtype: str | None = (
        None  # all tensors have it; None: as they were imported, else as variables are
    )
    max_shard_bytes: int = 5_000_000_000  # the most that the tensors of a file take
    adapters: bool = False  # whether they are written alone, and not added to their weights


def describe(run: TextRunDir, params: Params) -> Description:
    """Finds the family of a run's model, and its config.json: the imported one, where that still describes it.

    Raises WeightsError: no family describes it; names what differs from the nearest one.
    """
    imported = run.artifacts.about.get(IMPORTED, {}).get("config", {})
    vocabulary = run.OpenVocabularies().target
    usual: dict[str, Any] = {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "max_position_embeddings": params.input.target_length,
    }
    nearest: list[str] | None = None
    for family in dict.fromkeys(FAMILIES.values()):
        if not issubclass(params.task.cls, registry.GetParams(family.EXPERIMENT).task.cls):
            continue
        usual["architectures"] = [family.ARCHITECTURE]
        written = {**usual, **family.Config(params)}
        single = {key: x for key, x in imported.items() if key not in family.OTHER_KEYS}
        mine = imported.get("model_type") in family.TYPES
        for config in ([usual | imported, single | written] if mine else []) or [written]:
            try:
                said = params_of(family, config, str(run.path))
            except WeightsError as e:
                differing = [str(e)]
            else:
                differing = _differing(said, params)
                if not differing:
                    return Description(family, config, said)
            if nearest is None or len(differing) < len(nearest):
                nearest = differing
    raise WeightsError(
        f"{run.path}: no family of published models has this model's parts; the nearest one differs in "
        f"{', '.join((nearest or [f'task.cls={params.task.cls.__name__}'])[:_SHOWN])}"
    )


def _differing(said: Params, params: Params) -> list[str]:
    """The parameters that change results, with the values of both."""
    params = params.Copy()
    for name in ("num_kv_heads", "key_dim"):  # 0: as follows from others
        if not params.task.Get(name):
            params.task.Set(**{name: said.task.Get(name)})
    said, params = _with_gates(said), _with_gates(params)
    there, here = (stored_values(p.ToText()) for p in (said, params))
    return [
        f"{path}={here.get(path, 'nothing')} (there {there.get(path, 'nothing')})"
        for path in difference(there, params)
        if path.startswith("task.") and not _WITHOUT_EFFECT.fullmatch(path.removeprefix("task."))
    ]


def _with_gates(params: Params) -> Params:
    """The parameters, with the normalization of gates that the router chooses where they leave it open."""
    params = params.Copy()
    router = params.task.moe.router
    if params.task.num_experts and "normalize_gates" in router and router.normalize_gates is None:
        router.normalize_gates = "never" if router.k == 1 else "before_drops"
    return params


def export_checkpoint(
    run: TextRunDir,
    output: Path,
    chosen: Chosen,
    options: ExportOptions,
    progress: Callable[[str], None],
) -> str:
    """Writes a checkpoint of a run to a directory, which is complete or absent.

    Memory holds a tensor and its values in our layout; of a checkpoint that was trained, also up to 2 GiB of its
    chunks. `progress` is called with a line.

    Returns a line about what was written.

    Raises:
        WeightsError: no family describes the model; or values that the type cannot hold.
        CheckpointError: as Checkpointer.Restore; or the run keeps no moving average.
    """
    params = run.Params()
    about, task = describe(run, params), run.Task().Unpacked()
    # config.json does not say whether the tensors of a head for the token after the next are there.
    said = about.params.task.Copy().Set(multi_token_weight=params.task.multi_token_weight)
    mapping = about.family.Mapping(said, task.VariableSpecs())
    copies = about.family.Copies(said)
    entries = _entries(run, mapping, task, copies, options.dtype)
    shards = _shards(entries, options.max_shard_bytes)

    def write(checkpointer: Checkpointer, step: int) -> str:
        source = CheckpointSource(checkpointer, step, "ema" if chosen.use_ema else "theta")
        if options.adapters:
            base = run.artifacts.about.get(IMPORTED, {}).get("from", "")
            keys = peft_config(params.task, base)
            sizes = about.family.Sizes(said)
            with replaced_directory(output.absolute()) as directory:
                count = write_adapters(directory, source, mapping, sizes, keys)
            return f"{about.config['model_type']}, step {step}: {count:,} adapters"
        factors, scale = _factors(params, about.params), scale_of(params.task)
        tensors = _Tensors(source, mapping, entries, copies, factors, scale)
        with replaced_directory(output.absolute()) as directory:
            _write_weights(directory, entries, shards, tensors, progress)
            _write_rest(directory, run, about.config, entries)
        values = sum(int(np.prod(entry.shape)) for entry in entries.values())
        return f"{about.config['model_type']}, step {step}: {len(entries):,} tensors, {values:,} parameters"

    return read_newest(run.checkpoint_dir, write, chosen.step)


def _entries(
    run: TextRunDir, mapping: WeightMapping, task: Any, copies: Mapping[str, str], dtype: str | None
) -> dict[str, Entry]:
    """The shape and type of each tensor; those of one variable follow one another, and copies come last."""
    imported = run.artifacts.about.get(IMPORTED, {})
    types = dict(task.VariableSpecs().FlattenItems())
    entries = {}
    first = {name: (pairs[0].path, pairs[0].index) for name, pairs in mapping.tensors.items()}
    for name in sorted(first, key=lambda name: first[name]):
        came = imported.get("other_dtypes", {}).get(name, imported.get("dtype"))
        usual = came if came in NAMES else str(np.dtype(types[first[name][0]].dtype))
        entries[name] = Entry(mapping.Shape(name), dtype or usual)
    return entries | {copy: entries[name] for copy, name in copies.items()}


def _size(entry: Entry) -> int:
    return int(np.prod(entry.shape)) * np.dtype(entry.dtype).itemsize


def _shards(entries: Mapping[str, Entry], most: int) -> list[list[str]]:
    """The names of the tensors of each file, of `most` bytes, or of one larger tensor."""
    shards: list[list[str]] = [[]]
    left = most
    for name, entry in entries.items():
        if shards[-1] and _size(entry) > left:
            shards.append([])
            left = most
        shards[-1].append(name)
        left -= _size(entry)
    return shards


def _factors(params: Params, said: Params) -> dict[str, float]:
    """The factors of tables, since a family has other ones of embeddings and logits."""

    def scale(p: Params) -> float:
        return p.model_dim**0.5 if p.embedding_scale is None else p.embedding_scale

    ours, theirs = params.task, said.task
    embedding = scale(ours) / scale(theirs)
    softmax = ours.softmax_scale / theirs.softmax_scale
    if ours.tied_softmax and embedding != softmax:
        raise WeightsError(
            f"task.embedding_scale={ours.embedding_scale} with task.tied_softmax=True: published models multiply the "
            "one table by the same number for embeddings and logits"
        )
    return {"embedding.table": embedding, "softmax.table": softmax}


@dataclass(frozen=True)
class _Tensors:
    """The tensors of an export, by name."""

    source: CheckpointSource
    mapping: WeightMapping
    entries: Mapping[str, Entry]
    copies: Mapping[str, str]  # the names of further tensors, and those that they are copies of
    factors: Mapping[str, float]  # by the variable's path
    adapter_scale: float

    def Read(self, name: str) -> np.ndarray:
        def read(pair: WeightPair) -> np.ndarray:
            values = self.source.ReadAt(pair.path, pair.index)
            if (adapter := adapter_of(self.source, pair)) is not None:
                values = values + added(adapter, values.shape, self.adapter_scale)
            factor = self.factors.get(pair.path, 1.0)
            return values if factor == 1.0 else values * np.float32(factor)

        values = self.mapping.Tensor(self.copies.get(name, name), read)
        with np.errstate(over="ignore"):
            cast = values.astype(self.entries[name].dtype, copy=False)
        if cast.dtype == np.float16 and (np.isinf(cast) & np.isfinite(values)).any():
            raise WeightsError(f"{name}: has values too large for float16; give --dtype=float32")
        return cast


def _write_weights(
    directory: Path,
    entries: Mapping[str, Entry],
    shards: Sequence[Sequence[str]],
    tensors: _Tensors,
    progress: Callable[[str], None],
) -> None:
    """Writes the files of tensors, with an index where there are several."""
    number = {name: i for i, name in enumerate(entries, 1)}

    def read(names: Sequence[str]) -> Iterator[np.ndarray]:
        for name in names:
            progress(f"tensor {number[name]:,} of {len(entries):,}: {name}")
            yield tensors.Read(name)

    file_of: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        several = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        file = several if len(shards) > 1 else "model.safetensors"
        file_of |= dict.fromkeys(names, file)
        with open_to_write(directory / file) as out:
            write_safetensors(out, {name: entries[name] for name in names}, read(names))
    if len(shards) > 1:
        size = sum(map(_size, entries.values()))
        index = {"metadata": {"total_size": size}, "weight_map": file_of}
        write_json(directory / "model.safetensors.index.json", index)


def _write_rest(
    directory: Path, run: TextRunDir, config: Mapping[str, Any], entries: Mapping[str, Entry]
) -> None:
    """Writes config.json, the tokenizer, and what came with the weights that the run began from."""
    types = [entry.dtype for entry in entries.values()]
    key = next((key for key in _TYPE_KEYS if key in config), _TYPE_KEYS[-1])
    usual = max(dict.fromkeys(types), key=types.count)
    left = {name: x for name, x in config.items() if name != "quantization_config"}
    write_json(directory / CONFIG, {**left, key: usual})
    for name, content in run.artifacts.files.items():
        if name.startswith(PUBLISHED):
            (directory / Path(name).name).write_bytes(content)
    if any(f"{PUBLISHED}{name}" in run.artifacts.files for name in (PIECES, NAME)):
        return
    vocabulary = run.OpenVocabularies().target
    if not isinstance(vocabulary, JsonVocabulary):
        (directory / "tokenizer.model").write_bytes(vocabulary.model_bytes)
        return
    for name, about in json.loads(vocabulary.model_bytes).items():
        if name == TOKENIZER_CONFIG:
            about = {"tokenizer_class": "PreTrainedTokenizerFast", **about}
        if name == ENDS:
            name, about = GENERATION, {ENDS: about}
        write_json(directory / name, about)
