"""The package's own contenders of benchmarks/decode.py: a search over a model of random weights.

    python -m benchmarks.decode_worker here '{"model_dim": 512, ..., "batch": 32, "beam": 4}'

The search is what an exported model runs: it is saved as a SavedModel and loaded. benchmarks/decode_kinds.py
lists the kinds.
"""

import json
import os
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.decode_kinds import OURS, Kind
from benchmarks.peers.stepping import keep_memory, serve


def main() -> None:
    kind, size = OURS[sys.argv[1]], json.loads(sys.argv[2])
    keep_memory()
    with tempfile.TemporaryDirectory() as directory:
        # In a process of its own: the one that is measured never had the weights before they were packed.
        if not (child := os.fork()):
            _save(kind, size, directory)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise ChildProcessError("the search was not saved; see above")
        tf = _tensorflow(size)
        before = time.process_time()
        loaded = tf.saved_model.load(directory)
        load = time.process_time() - before
    from lingvo_moe.core.private.tensorflow import unoptimized

    inputs = batch(size)

    def step() -> dict[str, Any]:
        with unoptimized():  # as our commands do
            tokens, ids = loaded.search(*inputs)
        if int(tokens) != sum(size["target_lengths"]):
            raise RuntimeError(f"{tokens} tokens came out")
        return {"tokens": int(tokens), "ids": ids.numpy()[: size["target_lengths"][0] - 1].tolist()}

    before = time.process_time()
    step()
    first = time.process_time() - before
    serve(step, load_seconds=load, first_seconds=first)


def _save(kind: Kind, size: dict[str, Any], directory: str) -> None:
    saved_model = _tensorflow(size).saved_model
    options = saved_model.SaveOptions(experimental_custom_gradients=False)
    saved_model.save(build(kind, size), directory, options=options)


def _tensorflow(size: dict[str, Any]) -> Any:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(size["threads"])
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return tf


def batch(size: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source ids [B,S], their lengths [B], and those of what comes out [B]."""
    rng = np.random.default_rng(1)
    lengths = np.array(size["source_lengths"], np.int32)
    ids = rng.integers(4, size["vocab_size"], (size["batch"], lengths.max())).astype(np.int32)
    ids *= np.arange(ids.shape[1]) < lengths[:, None]
    return ids, lengths, np.array(size["target_lengths"], np.int32)


def build(kind: Kind, size: dict[str, Any]) -> Any:
    """A tf.Module whose `search` gives the number of tokens found and those of the first line, [T]."""
    import tensorflow as tf

    from lingvo_moe.core import kernels
    from lingvo_moe.core.decode.flat_beam_search import SearchOptions
    from lingvo_moe.core.kernels import tensorflow
    from lingvo_moe.core.nested_map import NestedMap
    from lingvo_moe.core.sharding import single_device, use_mesh
    from lingvo_moe.tasks.mt.decoding.fast_decoder import FastDecoder
    from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights

    model, theta, start = _imported(size["run"]) if "run" in size else _random(kind, size)
    module = tf.Module()
    module.model = PackedWeights(model, theta, kind.weights, size["beam"])
    target = max(size["target_lengths"])
    options = SearchOptions(size["beam"], 1, bos_id=start)
    module.shortlist = shortlist(size) if kind.shortlist else None
    decoder = FastDecoder(
        module.model, options, target, model.p.target_vocab_size, module.shortlist
    )

    def search(ids: tf.Tensor, lengths: tf.Tensor, longest: tf.Tensor) -> tf.Tensor:
        with use_mesh(single_device()), kernels.using(tensorflow):
            at = tf.range(tf.shape(ids)[1])[tf.newaxis]
            real = tf.cast(at < lengths[:, tf.newaxis], tf.int32)
            src = NestedMap(ids=ids * real, segment_ids=real, segment_pos=at * real)
            if kind.full:
                return _full(module.model, src, target)
            found = decoder.Find(src, longest)
            return tf.reduce_sum(found.lengths_BK), found.ids_BKT[0, 0]

    signature = [tf.TensorSpec([None] * rank, tf.int32) for rank in (2, 1, 1)]
    module.search = tf.function(search, input_signature=signature, autograph=False)
    return module


def shortlist(size: dict[str, Any]) -> Any:
    """A shortlist of the length that tools.shortlist makes: for each source token 100 tokens drawn by Zipf's law, and
    the first 460 for every line (200 frequent ones, bytes and special tokens). A line of 30 tokens then has about 1,550
    of 32,000, and 32 lines together 16,000."""
    from lingvo_moe.tasks.mt.decoding.shortlist import Shortlist
    from lingvo_moe.tasks.mt.decoding.shortlist_columns import ShortlistColumns

    tokens = size["vocab_size"]
    up_to = np.cumsum(1 / np.arange(1, tokens + 1))
    draws = np.random.default_rng(2).random((tokens, 100))
    candidates = np.searchsorted(up_to / up_to[-1], draws)
    some = Shortlist.Make(list(candidates), range(460), {"source": b"", "target": b""})
    return ShortlistColumns(some, tokens, 2 * size["beam"] + 3)


def _imported(run: str) -> tuple[Any, Any, int]:
    """The model of an imported checkpoint, its weights, and the token that decoding starts with."""
    from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST
    from lingvo_moe.tasks.mt.decoding.translator import read_parts

    parts: Any = read_parts(run, NEWEST, trust_run=False)[0]
    model, theta, _, codes = parts
    return model, theta, codes.start_id


def _random(kind: Kind, size: dict[str, Any]) -> tuple[Any, Any, int]:
    """A model of these sizes, with random weights."""
    from lingvo_moe.core.sharding import single_device, use_mesh

    model = _model(kind, size)
    with use_mesh(single_device()):
        return model, _weights(model), 1


def _model(kind: Kind, size: dict[str, Any]) -> Any:
    from lingvo_moe.core.config import registry

    sizes = {
        "source_vocab_size": size["vocab_size"],
        "target_vocab_size": size["vocab_size"],
        "model_dim": size["model_dim"],
        "hidden_dim": size["hidden_dim"],
        "num_heads": size["num_heads"],
        "key_dim": size["model_dim"] // size["num_heads"],
        "num_encoder_layers": size["num_layers"],
        "num_decoder_layers": size["num_layers"],
        "num_experts": 0,
        "repeat": False,
    }
    overrides = [*(f"task.{name}={value}" for name, value in sizes.items()), kind.overrides]
    return registry.GetParams("mt.M4Demo", ";".join(overrides)).task.Instantiate()


def _weights(model: Any) -> Any:
    """Random ones, with which EOS never wins: what is normalised sums to the same, so its logit is what the bias
    makes it."""
    import tensorflow as tf

    from lingvo_moe.core.randomness import make_seed

    theta = model.InitTheta(make_seed(0, 0))
    theta.decoder.final_norm.bias = tf.fill([model.p.model_dim], 0.1)
    table = theta.target_embedding.table.numpy()
    table[2] = -0.5
    theta.target_embedding.table = tf.constant(table)
    return theta


def _full(fast: Any, src: Any, length: int) -> tuple[Any, Any]:
    """Greedy decoding without caches: the number of tokens, and those of the first line."""
    import tensorflow as tf

    from lingvo_moe.core.layers import masks
    from lingvo_moe.core.nested_map import NestedMap

    model, theta = fast.model, fast.Theta()
    encoded = model.Encode(theta, src)

    def step(time: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        ones = tf.ones_like(ids)
        tgt = NestedMap(
            ids=ids, segment_ids=ones, segment_pos=ones * tf.range(tf.shape(ids)[1])[tf.newaxis]
        )
        aux = NestedMap(
            self_mask=masks.causal_segment_mask(tgt.segment_ids, tgt.segment_pos),
            paddings=masks.paddings(tgt.segment_ids),
            memory=encoded.memory,
            cross_mask=masks.segment_mask(tgt.segment_ids, encoded.segment_ids),
        )
        x = model.Embed(theta, "target_embedding", tgt, None)
        y, _ = model.decoder.FProp(theta.decoder, x, aux)
        logits = model.softmax.FProp(theta.target_embedding, y[:, -1:])
        best = tf.argmax(logits, -1, output_type=tf.int32)
        return time + 1, tf.concat([ids, best], 1)

    start = tf.ones_like(src.ids[:, :1])
    _, ids = tf.while_loop(
        lambda time, _: time < length,
        step,
        (tf.constant(0), start),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, None])),
    )
    return tf.size(ids[:, 1:]), ids[0, 1:]


if __name__ == "__main__":
    main()
