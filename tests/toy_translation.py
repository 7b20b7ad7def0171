"""A translation model of a few thousand parameters with vocabularies, for tests of the code around a model.

Letters: B row, J hypothesis, S source token, T target time, M model, V vocabulary, F flat position (t * J + j), L step,
X = J M.
"""

import io
import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import sentencepiece
import tensorflow as tf

from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, Translator
from lingvo_moe.tasks.text.decoding.export import export
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from params.mt.demo import M4Tiny

M = 12
# Overrides of mt.M4Tiny for tests that need no experts: the smallest model, which is traced the fastest.
SMALL = "task.num_experts=0;task.num_encoder_layers=1;task.num_decoder_layers=1"


class Smallest(M4Tiny):
    """An experiment, `toy_translation.Smallest`: mt.M4Tiny with SMALL."""

    def Task(self) -> InstantiableParams:
        p = super().Task()
        return p.Set(num_experts=0, num_encoder_layers=1, num_decoder_layers=1, repeat=False)


_WORDS = ["red", "green", "house", "tree", "stone", "open", "close", "save", "file", "edit", "view"]


def sentences(number: int, seed: int = 0, longest: int = 20) -> list[str]:
    """Returns lines of 1 to `longest` random words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(_WORDS, rng.integers(1, longest + 1))) for _ in range(number)]


def batch(specs: NestedMap, vocab_size: int) -> NestedMap:
    """Returns a batch of these specs: rows without padding, of random pieces."""
    rng = np.random.RandomState(0)

    def array(path: str, spec: TensorSpec) -> np.ndarray:
        if "segment_pos" in path:
            return np.tile(np.arange(spec.shape[1], dtype=np.int32), (spec.shape[0], 1))
        if "segment_ids" in path:
            return np.ones(spec.shape, np.int32)
        return rng.randint(4, vocab_size, spec.shape).astype(np.int32)

    return specs.Pack([array(path, spec) for path, spec in specs.FlattenItems()])


def train_vocab(lines: Iterable[str], vocab_size: int = 320, bytes_too: bool = True) -> bytes:
    """Returns a serialised SentencePiece model with ids 0 PAD, 1 BOS, 2 EOS, 3 UNK, and a piece for each byte."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        byte_fallback=bytes_too,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


def save_run(
    path: str | os.PathLike,
    vocab: bytes,
    step: int = 7,
    target_vocab: bytes | None = None,
    more: str = "",
    languages: Sequence[str] = (),
    planted: Callable[[str, np.ndarray], np.ndarray] = lambda name, value: value,
) -> None:
    """A run of mt.M4Tiny with one checkpoint, of random weights that translate variedly.

    Args:
        path: its directory.
        vocab: of both sides, or of the source.
        step: of the checkpoint.
        target_vocab: of the target.
        more: overrides.
        languages: as the run was trained on.
        planted: gives the value of a variable from its name and what it would be.
    """
    vocabs = {"source": vocab, "target": target_vocab or vocab}
    override = ";".join(
        f"task.{side}_vocab_size="
        f"{sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()}"
        for side, model in vocabs.items()
    )
    run = TextRunDir(path)
    run.Write(
        "mt.M4Tiny", f"{override};{more}" if more else override, text_artifacts(vocabs, languages)
    )
    rng = np.random.default_rng(0)

    def init(name, spec):
        if spec.init.method == "constant":
            return planted(name, np.full(spec.shape, spec.init.scale, np.float32))
        scale = 2.0 if "cross_atten" in name else 1.0 if "embedding" in name else 0.3
        return planted(name, rng.normal(size=spec.shape, scale=scale).astype(np.float32))

    specs = run.Task().VariableSpecs()
    theta = specs.Pack([init(path, spec) for path, spec in specs.FlattenItems()])
    with Checkpointer(str(run.checkpoint_dir)) as checkpointer:
        checkpointer.Save(step, NestedMap(theta=theta, step=np.int32(step)))


def save_export(path: str | os.PathLike) -> Translator:
    """Exports a ToyModel whose lines are cut at 8 tokens, with a beam of 2 and rows of 4; gives what was exported."""
    vocab = train_vocab(sentences(200))
    size = sentencepiece.SentencePieceProcessor(model_proto=vocab).vocab_size()
    model = ToyModel(size, size)
    options = TranslateOptions(beam_size=2, max_source_length=8, max_length=10, rows=4)
    translator = Translator(
        model, model.InitTheta(), NestedMap(source=vocab, target=vocab), options
    )
    export(translator, path, {"model": "mt.Toy"})
    return translator


class ToyModel:
    """Attention without projections over embeddings: random, but depends on every token."""

    def __init__(self, source_vocab_size: int, target_vocab_size: int):
        self.p = NestedMap(source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size)

    def InitTheta(self, seed: int = 0) -> NestedMap:
        rng = np.random.default_rng(seed)

        def table(*shape):
            return rng.normal(size=shape).astype(np.float32)

        return NestedMap(
            source_VM=table(self.p.source_vocab_size, M),
            target_VM=table(self.p.target_vocab_size, M),
            mix=NestedMap(out_MV=table(M, self.p.target_vocab_size)),
        )

    def Encode(self, theta: NestedMap, src: NestedMap) -> NestedMap:
        x_BSM = tf.gather(theta.source_VM, src.ids) + _positions(src.segment_pos)
        return NestedMap(memory=x_BSM, segment_ids=src.segment_ids)

    def InitCache(
        self, theta: NestedMap, encoded: NestedMap, beam_size: int, max_length: int
    ) -> NestedMap:
        shape = [dim(encoded.memory, 0), max_length, beam_size * M]
        return NestedMap(own_BLX=tf.zeros(shape), **encoded)

    def CacheLetters(self) -> NestedMap:
        return NestedMap(own_BLX="BLX", memory="BSM", segment_ids="BS")

    def ExtendStep(self, theta, ids_BJ, cache, time, mask_BJF):
        x_BJM = tf.gather(theta.target_VM, ids_BJ) + _positions(tf.fill(tf.shape(ids_BJ), time))
        rows, steps, width = (dim(cache.own_BLX, axis) for axis in range(3))
        now_1L1 = tf.reshape(tf.range(steps) == time, [1, steps, 1])
        own_BLX = tf.where(now_1L1, tf.reshape(x_BJM, [rows, 1, width]), cache.own_BLX)
        y_BJM = _attend(x_BJM, tf.reshape(own_BLX, [rows, -1, M]), mask_BJF)
        real_B1S = cache.segment_ids[:, tf.newaxis] > 0
        y_BJM += _attend(y_BJM, cache.memory, real_B1S)
        logits_BJV = tf.einsum("BJM,MV->BJV", tf.tanh(y_BJM), theta.mix.out_MV)
        return logits_BJV, NestedMap(cache, own_BLX=own_BLX)


def _positions(at: tf.Tensor) -> tf.Tensor:
    return tf.sin(tf.cast(at, tf.float32)[..., tf.newaxis] * tf.linspace(0.1, 2.0, M))


def _attend(query_BJM: tf.Tensor, key_BSM: tf.Tensor, mask_BJS: tf.Tensor) -> tf.Tensor:
    logits = tf.einsum("BJM,BSM->BJS", query_BJM, key_BSM)
    return tf.einsum("BJS,BSM->BJM", tf.nn.softmax(tf.where(mask_BJS, logits, -1e9)), key_BSM)
