"""MtTask: what trainer and planner ask of every translation model; see BaseTask.

Letters: B batch, S source time, T target time, V vocabulary, U task (language).
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import tensorflow as tf

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.core.task.named_rows import NamedRows
from lingvo_moe.core.task.step import Step
from lingvo_moe.tasks import experts
from lingvo_moe.tasks.text.runs.artifacts import languages_of, vocabs_of
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary
from lingvo_moe.tasks.transformer_shrinking import parts, sample_rows, shrink_layers
from lingvo_moe.tasks.transformer_task import TransformerTask

_SOURCE, _TARGET, _LANGUAGES = "source pieces", "target pieces", "languages"


class MtTask(TransformerTask):
    """The base of translation models, which MtInput feeds."""

    SIZES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **TransformerTask.SIZES,
        "V": ("task.source_vocab_size", "task.target_vocab_size"),
    }
    KIND = "translation"
    STACKS: ClassVar[Mapping[str, str]] = {
        "encoder": "num_encoder_layers",
        "decoder": "num_decoder_layers",
    }
    NEXT = "python -m tools.evaluate --logdir={}"
    CHECKPOINT_SCORER = "type/lingvo_moe.tasks.mt.quality.checkpoint_scores/CheckpointScorer"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("source_vocab_size", 64000, "Source SentencePiece vocabulary.", checks.IDS)
        p.Define("target_vocab_size", 32000, "Target SentencePiece vocabulary, V.", checks.IDS)
        p.Define("num_encoder_layers", 18, "Layers of the encoder.", checks.LAYERS)
        p.Define("num_decoder_layers", 18, "Layers of the decoder.", checks.LAYERS)
        experts.define_experts(p, num_experts=2048, num_groups=2048)
        return p

    @classmethod
    def CheckInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """See BaseTask: the model has an embedding for each id, and batches fall into equal groups."""
        super().CheckInput(task, inputs)
        for side in ("source", "target"):
            path = f"{side}_vocab_size"
            if inputs.Get(path) > task.Get(path):
                raise TaskError(
                    f"input.{path}={inputs.Get(path)} is more than task.{path}={task.Get(path)}: "
                    "the model has no embedding for some of the ids; set both to the same"
                )
            name = f"{side}_length"
            experts.check_groups(task, inputs.batch_size, inputs.Get(name), name)

    @classmethod
    def LayersOfBlock(cls, task: HyperParams) -> int:
        """See TransformerTask: with experts, a dense layer and an MoE."""
        return 2 if task.num_experts else 1

    @classmethod
    def Shrink(cls, task: HyperParams, inputs: HyperParams, mesh: Mesh) -> None:
        """See BaseTask: one block of layers on each side, few tokens, heads and experts."""
        size = shrink_layers(task, mesh)
        groups = experts.shrink_experts(task, size)
        length = size("T", 8)
        task.Set(source_vocab_size=size("V", 24), target_vocab_size=size("V", 20))
        inputs.Set(
            batch_size=math.lcm(parts(task, "B", mesh), groups or 1),
            source_length=length,
            target_length=length + parts(task, "T", mesh),
            source_vocab_size=task.source_vocab_size,
            target_vocab_size=task.target_vocab_size,
        )

    def SampleBatch(self, inputs: BaseInput, rng: np.random.RandomState) -> NestedMap:
        """See BaseTask: random ids; two sentences a row, and padding at its end."""
        vocab_sizes = {"src": self.p.source_vocab_size, "tgt": self.p.target_vocab_size}
        return sample_rows(inputs.BatchSpec(), vocab_sizes, rng)

    def BatchCounts(self, batch: NestedMap) -> dict[str, int]:
        (b, s), (_, t) = batch.src.ids.shape, batch.tgt.ids.shape
        return {"source_tokens": b * s, "target_tokens": b * t}

    def NamedRows(self) -> dict[str, NamedRows]:
        """See BaseTask: rows of embeddings are pieces, rows of task embeddings languages."""
        found = {}
        for path, spec in self.VariableSpecs().FlattenItems():
            if "V" in spec.letters:
                kind = _SOURCE if path.startswith("source_embedding") else _TARGET
                found[path] = NamedRows(kind, spec.letters.index("V"), "vocab_size")
            elif "U" in spec.letters:
                found[path] = NamedRows(_LANGUAGES, spec.letters.index("U"), "num_tasks")
        return found

    def RowNames(self, kind: str, artifacts: RunArtifacts) -> list[str]:
        """See BaseTask. Raises DataError for artifacts without a vocabulary, or with a damaged one."""
        if kind == _LANGUAGES:
            languages = languages_of(artifacts)
            if languages is None:
                raise TaskError("the run that weights are taken from does not say its languages")
            return languages
        vocabs = vocabs_of(artifacts)
        vocabulary = Vocabulary(vocabs.source if kind == _SOURCE else vocabs.target)
        return vocabulary.Pieces(range(vocabulary.size))

    def Units(self, batch: NestedMap) -> NestedMap:
        """See BaseTask: tokens of the target, and by side, e.g. `source_tokens`, tokens and groups (experts.units)."""
        units = NestedMap()
        for side, row in (("source", batch.src), ("target", batch.tgt)):
            counts = experts.units(self.p, tf.cast(row.segment_ids > 0, tf.float32))
            units.update({f"{side}_{name}": count for name, count in counts.items()})
        units.tokens = units.target_tokens
        return units

    def DecodeStep(self, inputs: BaseInput) -> Step:
        """See BaseTask: one step of the beam search."""
        from lingvo_moe.tasks.mt.decode_step import decode_step  # which imports engines

        return decode_step(self, inputs.p.batch_size, inputs.p.source_length)

    def ProgressNote(self, metrics: NestedMap) -> str:
        """See BaseTask: the overflow rate of the worst MoE layer."""
        shares = [
            v.max() for path, v in metrics.FlattenItems() if path.endswith(".over_capacity_ratio")
        ]
        return f"{max(shares):.1%} dropped at worst" if shares else ""


def side_shares(shares: NestedMap | None, side: str) -> dict[str, NestedMap]:
    """`shares` for the layers of one side, 'source' or 'target', from those of Units; none for a whole batch, nor
    without experts."""
    if shares is None or f"{side}_groups" not in shares:
        return {}
    return {"shares": NestedMap({n: shares[f"{side}_{n}"] for n in ("tokens", "groups")})}
