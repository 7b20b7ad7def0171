"""The MoE Transformer that translates (paper section 2): encoder, decoder, and an MoE in every second feed-forward
layer.

Letters: B batch, T target time, S source time, V vocabulary, U task (language).
"""

import functools
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.base_layer import scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params as HyperParams
from lingvo_moe.core.decode.ranges import LENGTH_ALPHA
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.layers import masks
from lingvo_moe.core.moe.layer import ROUTERS
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.core.task.step import Step
from lingvo_moe.core.task.task_growth import NamedRows
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.text.runs.artifacts import languages_of, vocabs_of
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary
from lingvo_moe.tasks.transformer import experts
from lingvo_moe.tasks.transformer.growth import TransformerGrowth
from lingvo_moe.tasks.transformer.stacks import TaskStack, sizes_of
from lingvo_moe.tasks.transformer.task import TransformerTask

ENCODER = TaskStack(
    "encoder",
    "num_encoder_layers",
    side="source",
    causal=False,
    row="src",
    prefix="source_",
    seed="encoder",
)
DECODER = TaskStack(
    "decoder",
    "num_decoder_layers",
    side="target",
    causal=True,
    row="tgt",
    prefix="target_",
    memory="encoder",
    router="decoder_router",
)


class MtModel(TransformerTask):
    """An encoder-decoder Transformer from packed source rows to packed target rows.

    `FProp(theta, batch, seed)` takes int32 `batch.src.{ids,segment_ids,segment_pos}` [B,S] and
    `batch.tgt.{ids,labels,segment_ids,segment_pos}` [B,T], where segment 0 is padding, and returns
    the training loss and float32 metrics. Where a router needs them (`Needs`), both sides also have
    `task_ids`, the number of each token's source language.
    """

    KIND = "translation"
    STACKS = (ENCODER, DECODER)
    SIZES = {**TransformerTask.SIZES, **sizes_of(STACKS)}
    EXPERTS = (2048, 2048, 2)
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        *TransformerTask.MAY_CHANGE,
        "length_alpha",  # which searches alone read
    )
    NEXT = "python -m tools.evaluate --logdir={}"
    CHECKPOINT_SCORER = "type/lingvo_moe.tasks.mt.quality.checkpoint_scores/CheckpointScorer"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("source_vocab_size", 64000, "Source SentencePiece vocabulary.", checks.IDS)
        p.Define("target_vocab_size", 32000, "Target SentencePiece vocabulary, V.", checks.IDS)
        p.Define(
            "shared_embedding",
            False,
            "Whether source and target, whose vocabularies are the same then, have one table of embeddings.",
        )
        p.Define("num_encoder_layers", 18, "Layers of the encoder.", checks.LAYERS)
        p.Define("num_decoder_layers", 18, "Layers of the decoder.", checks.LAYERS)
        p.Define(
            "decoder_router",
            None,
            "The router of the decoder's MoE layers; None: moe.router, as in the encoder.",
            choices=ROUTERS,
        )
        p.OnlyWith("decoder_router", experts.without_experts)
        p.Define(
            "length_alpha",
            0.6,
            "The exponent by which translations' scores are normalised by length; 0 for none.",
            LENGTH_ALPHA,
        )
        for name in ("model_dim", "num_experts"):
            p.Derive(f"decoder_router.{name}", name)
        return p

    def __init__(self, params: InstantiableParams):
        source, target = params.source_vocab_size, params.target_vocab_size
        if params.shared_embedding and source != target:
            why = f"needs vocabularies of one size; task.source_vocab_size={source}, task.target_vocab_size={target}"
            raise ParamError("task.shared_embedding", "True", why)
        super().__init__(params)

    def Table(self, stack: TaskStack) -> str:
        return "embedding" if self.p.shared_embedding else super().Table(stack)

    @classmethod
    def RoutesByTask(cls, params: HyperParams) -> bool:
        return any("task_ids" in cls.Needs(params, stack) for stack in cls.STACKS)

    @classmethod
    def NumTasks(cls, params: HyperParams) -> int:
        """The largest number of source languages that every router which chooses by language supports."""
        return min(
            stack.Router(params)[1].num_tasks
            for stack in cls.STACKS
            if "task_ids" in cls.Needs(params, stack)
        )

    # --- the contract of BaseTask

    @classmethod
    def ConfigureInput(cls, task: HyperParams, inputs: HyperParams) -> None:
        """See BaseTask: batches hold task ids where a router asks for them."""
        if cls.RoutesByTask(task):
            inputs.task_ids = True

    def CheckData(self, inputs: BaseInput) -> None:
        """See BaseTask: a router that chooses by language has a place for each; a shared table is of one vocabulary."""
        if self.p.shared_embedding:
            vocabs = vocabs_of(inputs.Artifacts())
            if vocabs.source != vocabs.target:
                raise TaskError(
                    "task.shared_embedding=True: the vocabularies of source and target differ; have one file twice in "
                    "input.vocab_dir, or set this to False"
                )
        if not self.RoutesByTask(self.p):
            return
        languages = inputs.Artifacts().about["languages"]
        most = self.NumTasks(self.p)
        if len(languages) > most:
            raise TaskError(
                f"the model routes by language and has num_tasks={most}, but the data has {len(languages)} languages "
                f"({', '.join(languages)}); set the router's num_tasks to {len(languages)}, or input.languages to "
                "some of them"
            )

    @classmethod
    def Growth(cls, task: InstantiableParams) -> "_Growth":
        return _Growth(task)

    def DecodePrograms(
        self, inputs: BaseInput, prompt_length: int = 0, reply_length: int = 0
    ) -> tuple[Step, Step]:
        """See BaseTask: the encoder, and one step of a beam search over translations."""
        from lingvo_moe.tasks.mt.decode_step import decode_programs  # which imports engines

        length = prompt_length or inputs.p.source_length
        return decode_programs(self, inputs.p.batch_size, length, max_length=reply_length)

    # --- decoding

    @scoped
    def Encode(self, theta: NestedMap, src: NestedMap) -> NestedMap:
        """The encoder's output for unpacked rows: memory [B,S,M], segment_ids int32 [B,S], and task_ids int32 [B],
        where the decoder needs them."""
        context = Context(NestedMap(src=src))
        x = self._Embedded(ENCODER, theta, context)
        memory, _ = self.encoder.FProp(theta.encoder, x, self.Aux(ENCODER, context))
        encoded = NestedMap(memory=memory, segment_ids=src.segment_ids)
        if "task_ids" in self.Needs(self.p, DECODER):
            encoded.task_ids = src.task_ids[:, 0]  # a row holds one sentence
        return encoded

    @scoped
    def InitCache(
        self, theta: NestedMap, encoded: NestedMap, beam_size: int, max_length: int
    ) -> NestedMap:
        """The decoder's keys and values: empty ones for `beam_size * max_length` positions, and the memory's."""
        batch = dim(encoded.memory, 0)
        first = tf.fill([batch, 1], 1)
        tasks = {"task_ids": encoded.task_ids} if "task_ids" in encoded else {}
        return NestedMap(
            **tasks,
            decoder=self.decoder.InitCache(batch, max_length, beam_size),
            memory=self.decoder.PrecomputeMemory(theta.decoder, encoded.memory),
            cross_mask=masks.segment_mask(first, encoded.segment_ids),
        )

    def CacheLetters(self) -> NestedMap:
        """The letters of InitCache's tensors, in its structure (see attention.py; T is 1)."""
        tasks = {"task_ids": "B"} if "task_ids" in self.Needs(self.p, DECODER) else {}
        return NestedMap(
            **tasks,
            decoder=self.decoder.CacheLetters(),
            memory=self.decoder.MemoryLetters(),
            cross_mask="BTS",
        )


class _Growth(TransformerGrowth):
    """Rows of embeddings are pieces, rows of task embeddings languages."""

    def NamedRows(self, specs: NestedMap) -> dict[str, NamedRows]:
        rows = {}
        for path, spec in specs.FlattenItems():
            if "V" in spec.letters:
                of_source = path.startswith(("source_embedding", "encoder."))
                side = "source" if of_source else "target"
                names = functools.partial(_pieces, side)
                rows[path] = NamedRows(
                    f"{side} pieces", spec.letters.index("V"), "vocab_size", names
                )
            elif "U" in spec.letters:
                where = spec.letters.index("U")
                rows[path] = NamedRows("languages", where, "num_tasks", _languages)
        return rows


def _pieces(side: str, artifacts: RunArtifacts) -> list[str]:
    """See NamedRows.names. Raises DataError for artifacts without a vocabulary, or with a damaged one."""
    vocabulary = Vocabulary(getattr(vocabs_of(artifacts), side))
    return vocabulary.Pieces(range(vocabulary.size))


def _languages(artifacts: RunArtifacts) -> list[str]:
    """See NamedRows.names."""
    languages = languages_of(artifacts)
    if languages is None:
        raise TaskError("the run that weights are taken from does not say its languages")
    return languages
