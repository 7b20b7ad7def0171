"""Every place that draws: a number says nothing about its neighbours.

Marginals alone hide it where the numbers of lines n and n + 1 depend on each other.

Letters: N neighbours, G group, S token in group, M model, E expert.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import lingvo_moe
from lingvo_moe.core import kernels, randomness
from lingvo_moe.core.base_layer import VariableSpec, initial_values
from lingvo_moe.core.decode.sampling import sample
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.input.permutation import permute
from lingvo_moe.core.kernels import tensorflow, xla
from lingvo_moe.core.moe.layer import ROUTERS, MoELayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.image.input import crops
from lingvo_moe.tasks.text.data.mixing import draw_languages

LAGS = (1, 2, 4, 16, 64)
_MOST = {
    2: 30.7,
    4: 56.5,
}  # chi-square that independent draws from 2 or 4 cells exceed once in a million
SEED = randomness.make_seed(3, 4)


def check_pairs(cells: np.ndarray, count: int) -> None:
    """Pairs of the `count` equally likely cells are equally frequent, at each lag of each dimension."""
    for axis in range(cells.ndim):
        along = np.moveaxis(cells, axis, 0).reshape(cells.shape[axis], -1).astype(int)
        for lag in [lag for lag in LAGS if lag < len(along)]:
            pairs = (count * along[:-lag] + along[lag:]).ravel()
            expected = pairs.size / count**2
            got = ((np.bincount(pairs, minlength=count**2) - expected) ** 2 / expected).sum()
            assert got < _MOST[count], (axis, lag, got)


def _quarters(fractions) -> np.ndarray:
    return (np.asarray(fractions, np.float64) * 4).astype(int)


def _sampled(seed: int, step: int, rows: int = 4096) -> np.ndarray:
    settings = NestedMap(
        temperature=tf.ones([rows]),
        top_k=tf.zeros([rows], tf.int32),
        top_p=tf.ones([rows]),
        seed=tf.stack([tf.fill([rows], seed), tf.range(rows)], 1),
    )
    return sample(tf.zeros([rows, 4]), settings, tf.constant(step)).numpy()


def _dropped(backend=xla, rows=None) -> np.ndarray:
    shape = [128, 256] if rows is None else [*rows.shape, 256]
    with kernels.using(backend):
        return kernels.dropout(tf.ones(shape), 0.5, SEED, rows).numpy() != 0


def _initial(method: str) -> np.ndarray:
    """The quarters of a stack of layers: by the sign and the size of a weight."""
    spec = VariableSpec("w", (128, 16, 16), "float32", "LMN", WeightInit(method, 1.0), (), 1)
    value = initial_values(NestedMap(w=spec), SEED).w.numpy()
    median = {"gaussian": 0.67449, "truncated_gaussian": 0.63974}.get(method, 0.5)
    if method == "geo_mean_xavier":
        median = np.abs(value).max() / 2
    return 2 * (value > 0) + (np.abs(value) > median)


def _routing(name: str, logits: list[float], **params):
    """The routing of tokens [G,S] that all have these logits."""
    E = len(logits)
    router = ROUTERS[name].Params().Set(name="router", model_dim=E, num_experts=E, **params)
    router = router.Instantiate()
    with use_mesh(single_device()):
        theta = router.InitTheta(SEED).Transform(lambda w: tf.zeros_like(w))
        if "wg" in theta:
            theta.wg = tf.linalg.diag(tf.constant(logits))
        x_GSM, paddings_GS = tf.ones([128, 128, E]), tf.zeros([128, 128])
        return router.FProp(theta, x_GSM, paddings_GS, 128, seed=SEED, context=None)


def _chosen(name: str, logits: list[float], rank: int = 0, **params) -> np.ndarray:
    return _routing(name, logits, **params).expert_index[..., rank].numpy()


def _sent() -> np.ndarray:
    """Whether the second choice is sent, which is so for half of them."""
    params = {"second_expert_policy": "random", "second_expert_threshold": 1.0}
    return _routing("top2", [0.0, 0.0], **params).gate[..., 1].numpy() > 0


def _masked() -> np.ndarray:
    sizes = {"model_dim": 4, "hidden_dim": 4, "num_experts": 4}
    layer = MoELayer.Params().Set(name="moe", output_masking=0.5, **sizes).Instantiate()
    with use_mesh(single_device()):
        return layer._Masking(tf.ones([128, 128, 2]), SEED).numpy()


def _of_seeds(seeds_N2: tf.Tensor) -> np.ndarray:
    return _quarters(randomness.uniform(seeds_N2, [128, 256]))


N = tf.range(128)
PLACES = {
    "seeds of steps": lambda: (_of_seeds(randomness.make_seed(1, N)), 4),
    "seeds of runs": lambda: (
        _of_seeds(randomness.fold_in(tf.stack([N, tf.zeros_like(N)], 1), 1)),
        4,
    ),
    "seeds of micro-batches and layers": lambda: (
        _of_seeds(randomness.fold_in(randomness.fold_in(SEED, "body"), N)),
        4,
    ),
    "seeds of names": lambda: (
        _of_seeds(tf.stack([randomness.fold_in(SEED, f"layers_{i}") for i in range(128)])),
        4,
    ),
    "bits": lambda: (_quarters(randomness.uniform(SEED, [80, 70, 66])), 4),
    "a word of each seed": lambda: (
        randomness.word_of_each(randomness.fold_in(SEED, tf.range(1 << 16))).numpy() >> 30,
        4,
    ),
    "samples of lines": lambda: (np.stack([_sampled(5, step) for step in range(20)]), 4),
    "samples of seeds": lambda: (np.stack([_sampled(seed, 2, 1024) for seed in range(30)]), 4),
    "dropout": lambda: (_dropped(), 2),
    "dropout by TensorFlow's kernels": lambda: (_dropped(tensorflow), 2),
    "dropout by rows": lambda: (_dropped(rows=tf.range(1000, 1128)), 2),
    "initial values, gaussian": lambda: (_initial("gaussian"), 4),
    "initial values, truncated": lambda: (_initial("truncated_gaussian"), 4),
    "initial values, uniform": lambda: (_initial("uniform"), 4),
    "random router": lambda: (_chosen("random", [0.0] * 4, k=2), 4),
    "jitter": lambda: (_chosen("top_k", [1.0] * 4, k=1, jitter=0.1), 4),
    "noise": lambda: (_chosen("noisy_top_k", [0.0] * 4, k=1), 4),
    "second choice, sampled": lambda: (
        _chosen("top2", [20.0, 0, 0, 0, 0], 1, second_expert_policy="sampling") - 1,
        4,
    ),
    "second choice, sent or not": lambda: (_sent(), 2),
    "masked outputs of experts": lambda: (_masked(), 2),
    "permutation": lambda: (permute(np.arange(1 << 16), 1 << 16, 3) >> 14, 4),
    "permutations of epochs": lambda: (
        np.stack([permute(np.arange(1000), 1000, 3, "de", e) // 250 for e in range(80)]),
        4,
    ),
    "languages": lambda: (
        np.stack([draw_languages(np.ones(4), 3, block, 1024) for block in range(80)]),
        4,
    ),
    "crops": lambda: (
        _quarters(np.stack([crops.generator(3, 0, i).random(4) for i in range(4096)])),
        4,
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_neighbours_are_independent(place):
    check_pairs(*PLACES[place]())


def test_every_module_that_draws_is_above():
    draw = re.compile(
        r"randomness\.(bits|uniform|normal|truncated_normal|kept|word_of_each)\(|"
        r"np\.random\.Generator|import permute|import .*, permute"
    )
    root = Path(lingvo_moe.__file__).parent
    drawing = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.name != "randomness.py" and draw.search(path.read_text())
    }
    assert drawing == {
        "core/decode/sampling.py",
        "core/initializers.py",
        "core/kernels/tensorflow.py",
        "core/kernels/xla.py",
        "core/moe/layer.py",
        "core/moe/routers/lsh.py",  # its directions, as initial values
        "core/moe/routers/noisy_top_k.py",
        "core/moe/routers/random.py",
        "core/moe/routers/top2.py",
        "core/moe/routers/top_k.py",
        # the orders of pairs, images and shards, by `permute`
        "tasks/image/input/image_input.py",
        "tasks/image/input/sources.py",
        "tasks/text/batches/order.py",
        "tasks/text/vocabulary/vocab_cache.py",
        "tasks/image/input/crops.py",
        "tasks/text/data/mixing.py",
    }
