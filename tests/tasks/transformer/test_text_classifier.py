"""A classifier of texts, written outside of the package in one file, learns, with experts and in micro-batches.

Letters: B text, T token.
"""

import numpy as np
import tensorflow as tf
from equivalence import assert_same
from toy_text_classifier import TextClassifier

from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.core.optimizers.schedules import Constant
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh

B, T, V = 16, 6, 10


def _batch(seed):
    """Texts of 3 to 6 tokens, whose class says whether one of them is 9."""
    rng = np.random.RandomState(seed)
    at, lengths = np.tile(np.arange(T), (B, 1)), rng.randint(3, T + 1, (B, 1))
    ids = rng.randint(3, 9, (B, T))
    labels = rng.randint(0, 2, B)
    ids[:, 1] = np.where(labels, 9, ids[:, 1])
    real = at < lengths
    batch = NestedMap(ids=ids * real, segment_ids=real, segment_pos=at * real, labels=labels)
    return batch.Transform(lambda x: tf.constant(x, tf.int32))


def test_it_learns_and_parts_of_a_batch_add_up_to_it():
    p = TextClassifier.Params().Set(
        name="classifier", vocab_size=V, model_dim=16, hidden_dim=16, num_heads=2, key_dim=8
    )
    rate = Constant.Params().Set(value=0.01)
    p.Set(num_experts=2, num_groups=2, moe_every=2, dropout=0.0, repeat=False, label_smoothing=0.0)
    p.moe.Set(
        router=TopKRouter.Params()
    )  # draws nothing at random, which micro-batches would do differently
    task = p.Set(optimizer=Adam.Params().Set(learning_rate=rate)).Instantiate()
    with use_mesh(single_device()):
        step = tf.function(task.TrainStep, autograph=False)
        state = task.InitState(tf.constant(1))
        for i in range(40):
            state, metrics = step(state, _batch(i))
        assert metrics.nll < 0.3 and metrics.accuracy > 0.8

        batch, seed = _batch(99), make_seed(1, 1)
        theta = task.InitTheta(seed)
        whole = task.FProp(theta, batch, seed)[1]
        units, terms = task.Units(batch), []
        halves = task.p.Copy().Set(num_groups=1).Instantiate()
        for rows in (slice(0, B // 2), slice(B // 2, B)):
            half = batch.Transform(lambda x, rows=rows: x[rows])
            shares = NestedMap({n: u / units[n] for n, u in halves.Units(half).items()})
            terms.append(halves.MicroBatchTerms(theta, half, seed, shares)[1])
        for name in ("nll", "accuracy", "tokens"):
            assert_same(terms[0][name] + terms[1][name], whole[name])
