"""Random annotated programs: attention, mixtures of experts, perceptrons, convolutions, embeddings.

A program is data, and its repr is Python, so that one that fails can be pasted into a test. It computes
a value and the gradients of all its floating-point arguments, over meshes of one to three axes.

B batch (or group), T time (or token in its group), S time of the keys, M model, H hidden or size of a
head, N head, E expert, C capacity, V vocabulary; Y and X rows and columns, I and O features, of an image.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from lingvo_moe.core import sharding
from lingvo_moe.core.sharding import Mesh

Axis = str | tuple[str, ...] | None

MESHES = (
    *("a:2", "a:3", "a:4", "a:8"),
    *("a:2,b:2", "a:4,b:2", "a:2,b:4", "a:2,b:3", "a:3,b:2"),
    *("a:2,b:2,c:2", "a:2,b:1,c:4"),
)


@dataclass(frozen=True)
class RandomProgram:
    """One annotated program.

    Attributes:
        kind: a key of KINDS.
        mesh: as `Mesh.parse` reads it.
        sizes: of each letter.
        cuts: name of a tensor -> the mesh axes of its dimensions; tensors without one are left to XLA.
        choices: what else the kind lets one choose, by name.
    """

    kind: str
    mesh: str
    sizes: tuple[tuple[str, int], ...]
    cuts: tuple[tuple[str, tuple[Axis, ...]], ...]
    choices: tuple[tuple[str, str], ...] = ()

    def Args(self) -> list[np.ndarray]:
        """Returns the arguments, the same in every call."""
        rng = np.random.RandomState(7)
        sizes, found = dict(self.sizes), []
        for name, letters in KINDS[self.kind].arguments:
            shape = [sizes[letter] for letter in letters]
            if name == "ids":
                found.append(rng.randint(0, sizes["V"], shape).astype(np.int32))
            elif name == "mask":
                found.append((rng.uniform(size=shape) < 0.4).astype(np.float32))
            else:
                found.append((rng.standard_normal(shape) / 2).astype(np.float32))
        return found

    def __call__(self, *args: tf.Tensor, annotated: bool = True) -> list[tf.Tensor]:
        """The value and the gradients of a weighted sum of it by all arguments that are learnt."""
        at, fn = _At(self, annotated), KINDS[self.kind].fn
        return value_and_gradients(lambda *xs: fn(at, *xs), args, self._Learnt())

    def ResultNames(self) -> list[str]:
        names = [name for name, _ in KINDS[self.kind].arguments]
        return ["value", *(f"gradient of {names[i]}" for i in self._Learnt())]

    def _Learnt(self) -> list[int]:
        names = [name for name, _ in KINDS[self.kind].arguments]
        return [i for i, name in enumerate(names) if name not in ("ids", "mask")]


def value_and_gradients(
    fn: Callable[..., tf.Tensor], args: Sequence[tf.Tensor], learnt: Sequence[int]
) -> list[tf.Tensor]:
    """A function's value, and the gradients of a weighted sum of it by the arguments of these numbers."""
    with tf.GradientTape() as tape:
        tape.watch([args[i] for i in learnt])
        value = fn(*args)
        count = int(np.prod(value.shape))
        weights = tf.cos(tf.cast(tf.range(count), value.dtype))
        loss = tf.reduce_sum(value * tf.reshape(weights, value.shape))
    found = tape.gradient(
        loss, [args[i] for i in learnt], unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return [value, *(tf.convert_to_tensor(g) for g in found)]


@dataclass(frozen=True)
class Kind:
    """One kind of program.

    Attributes:
        fn: of an _At and the arguments.
        arguments: name and letters of each.
        inner: the same of tensors inside that may be annotated.
        choices: name -> values.
    """

    fn: Callable[..., tf.Tensor]
    arguments: Sequence[tuple[str, str]]
    inner: Sequence[tuple[str, str]] = ()
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()


class _At:
    """A program while it is traced: its annotations and its choices."""

    def __init__(self, program: RandomProgram, annotated: bool):
        self._cuts = dict(program.cuts) if annotated else {}
        self._mesh = Mesh.parse(program.mesh)
        self.choice, self.size = dict(program.choices), dict(program.sizes)

    def __call__(self, name: str, tensor: tf.Tensor) -> tf.Tensor:
        cut = self._cuts.get(name)
        return tensor if cut is None else sharding.mesh_split(tensor, self._mesh, cut)


def _attention(at: _At, x, wq, wk, wv, wo) -> tf.Tensor:
    x, wq, wk, wv, wo = at("x", x), at("wq", wq), at("wk", wk), at("wv", wv), at("wo", wo)
    q = at("q", tf.einsum("BTM,MNH->BTNH", x, wq))
    k = at("k", tf.einsum("BTM,MNH->BTNH", x, wk))
    v = at("v", tf.einsum("BTM,MNH->BTNH", x, wv))
    logits = at("logits", tf.einsum("BTNH,BSNH->BNTS", q, k))
    if at.choice["causal"] == "yes":
        logits += tf.linalg.band_part(tf.ones_like(logits[0, 0]), -1, 0) * 4
    probs = at("probs", tf.nn.softmax(logits))
    context = at("context", tf.einsum("BNTS,BSNH->BTNH", probs, v))
    y = at("y", tf.einsum("BTNH,NHM->BTM", context, wo))
    return y + x if at.choice["residual"] == "yes" else y


def _moe(at: _At, x, mask, wg, wi, wo) -> tf.Tensor:
    """Algorithm 2 with a given mask in place of gating: mask_BTEC assigns tokens to slots."""
    x, mask, wg = at("x", x), at("mask", mask), at("wg", wg)
    wi, wo = at("wi", wi), at("wo", wo)
    gates = at("gates", tf.nn.softmax(tf.einsum("BTM,ME->BTE", x, wg)))
    combine = at("combine", gates[..., None] * mask)
    slots = at("slots", tf.einsum("BTEC,BTM->EBCM", mask, x))
    if at.choice["twice"] == "yes":
        slots = at("slots_E", slots)
    h = at("h", tf.tanh(tf.einsum("EBCM,EMH->EBCH", slots, wi)))
    out = at("out", tf.einsum("EBCH,EHM->BECM", h, wo))
    if at.choice["twice"] == "yes":
        out = at("out_B", out)
    return at("y", tf.einsum("BTEC,BECM->BTM", combine, out))


def _perceptron(at: _At, x, wi, bi, wo) -> tf.Tensor:
    x, wi, wo, bi = at("x", x), at("wi", wi), at("wo", wo), at("bi", bi)
    if at.choice["norm"] == "yes":
        x *= tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-3)
    h = at("h", tf.einsum("BTM,MH->BTH", x, wi) + bi)
    h = at("act", tf.nn.gelu(h) if at.choice["act"] == "gelu" else tf.tanh(h))
    return at("y", tf.einsum("BTH,HM->BTM", h, wo))


def _convolution(at: _At, x, kernel, further) -> tf.Tensor:
    x, kernel, further = at("x", x), at("kernel", kernel), at("further", further)
    stride, padding = int(at.choice["stride"]), at.choice["padding"]
    y = at("conv", tf.nn.conv2d(x, kernel, stride, padding))
    y = at("act", tf.tanh(y))
    y = at("conv2", tf.nn.conv2d(y, further, 1, "SAME"))
    if at.choice["pool"] == "avg":
        y = at("pool", tf.nn.avg_pool2d(y, 2, 2, "SAME"))
    if at.choice["pool"] == "max":
        y = at("pool", tf.nn.max_pool2d(y, 3, 2, "SAME"))
    return y


def _depthwise(at: _At, x, kernel, pointwise) -> tf.Tensor:
    x, kernel, pointwise = at("x", x), at("kernel", kernel), at("pointwise", pointwise)
    stride = int(at.choice["stride"])
    y = tf.nn.depthwise_conv2d(x, kernel[..., None], [1, stride, stride, 1], at.choice["padding"])
    y = at("act", tf.tanh(at("conv", y)))
    return at("y", tf.einsum("BYXI,IO->BYXO", y, pointwise))


def _embedding(at: _At, ids, table, w) -> tf.Tensor:
    ids, table, w = at("ids", ids), at("table", table), at("w", w)
    x = at("x", tf.gather(table, ids))
    h = at("h", tf.tanh(tf.einsum("BTM,MH->BTH", x, w)))
    if at.choice["tied"] == "yes":
        h = at("back", tf.einsum("BTH,MH->BTM", h, w))
        logits = at("logits", tf.einsum("BTM,VM->BTV", h, table))
        return at("y", tf.nn.log_softmax(logits))
    return h


KINDS: dict[str, Kind] = {
    "attention": Kind(
        _attention,
        (("x", "BTM"), ("wq", "MNH"), ("wk", "MNH"), ("wv", "MNH"), ("wo", "NHM")),
        (
            *(("q", "BTNH"), ("k", "BTNH"), ("v", "BTNH"), ("logits", "BNTT"), ("probs", "BNTT")),
            *(("context", "BTNH"), ("y", "BTM")),
        ),
        (("causal", ("no", "yes")), ("residual", ("no", "yes"))),
    ),
    "moe": Kind(
        _moe,
        (("x", "BTM"), ("mask", "BTEC"), ("wg", "ME"), ("wi", "EMH"), ("wo", "EHM")),
        (
            *(("gates", "BTE"), ("combine", "BTEC"), ("slots", "EBCM"), ("slots_E", "EBCM")),
            *(("h", "EBCH"), ("out", "BECM"), ("out_B", "BECM"), ("y", "BTM")),
        ),
        (("twice", ("no", "yes")),),
    ),
    "perceptron": Kind(_perceptron, (("x", "BTM"), ("wi", "MH"), ("bi", "H"), ("wo", "HM")),
        (("h", "BTH"), ("act", "BTH"), ("y", "BTM")), (("norm", ("no", "yes")), ("act", ("gelu", "tanh")))),
    "convolution": Kind(
        _convolution,
        (("x", "BYXI"), ("kernel", "KKIO"), ("further", "FFOP")),
        (("conv", "BYXO"), ("act", "BYXO"), ("conv2", "BYXP"), ("pool", "BYXP")),
        (("stride", ("1", "2")), ("padding", ("SAME", "VALID")), ("pool", ("no", "avg", "max"))),
    ),
    "depthwise": Kind(_depthwise, (("x", "BYXI"), ("kernel", "KKI"), ("pointwise", "IO")),
        (("conv", "BYXI"), ("act", "BYXI"), ("y", "BYXO")), (("stride", ("1", "2")), ("padding", ("SAME", "VALID")))),
    "embedding": Kind(_embedding, (("ids", "BT"), ("table", "VM"), ("w", "MH")),
        (("x", "BTM"), ("h", "BTH"), ("back", "BTM"), ("logits", "BTV"), ("y", "BTV")), (("tied", ("no", "yes")),)),
}  # fmt: skip
# The kinds of layers that models contain are drawn more often.
_DRAWN = (
    *("attention",) * 5,
    *("moe",) * 5,
    *("perceptron",) * 3,
    *("convolution",) * 3,
    *("depthwise", "embedding", "embedding"),
)
_EVEN, _UNEVEN = (8, 16, 24), (5, 6, 7, 9, 10, 12, 15)
_KERNELS = {"K": (1, 2, 3, 5), "F": (1, 3)}
_SPACE = {"Y": (8, 12, 16), "X": (8, 12)}


def random_program(seed: int) -> RandomProgram:
    """Returns the program of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(_DRAWN)
    mesh = rng.choice(MESHES)
    what = KINDS[kind]
    named = [*what.arguments, *what.inner]
    is_even = rng.random() < 0.7
    letters = sorted({letter for _, tensor in named for letter in tensor})
    sizes = {letter: _size(rng, letter, is_even) for letter in letters}
    if kind == "depthwise":  # Some kernels of one element end the process in XLA's compiler.
        sizes["K"] = max(sizes["K"], 2)
    choices = tuple((name, rng.choice(values)) for name, values in what.choices)
    axes = [(name, size) for name, size in mesh_axes(mesh) if size > 1]
    # Either one mapping of letters, of which some tensors get an annotation, or each tensor its own.
    by_letters = rng.random() < 0.4
    least = {letter: _least(letter, sizes, dict(choices)) for letter in letters}
    mapping = mapping_of(rng, "".join(letters), axes, least) if by_letters else {}
    share = rng.choice((0.25, 0.5, 0.8))
    cuts = []
    for name, tensor in named:
        if rng.random() > share:
            continue
        own = mapping if by_letters else mapping_of(rng, tensor, axes, least)
        seen: set[str] = set()
        cut = []
        for letter in tensor:
            axis = own.get(letter)
            flat = (axis,) if isinstance(axis, str) else axis or ()
            fits = not seen & set(flat) and letter not in "KF"
            cut.append(axis if fits else None)
            seen |= set(flat) if fits else set()
        cuts.append((name, tuple(cut)))
    if dict(choices).get("stride", "1") != "1" or dict(choices).get("padding") == "VALID":
        cuts = (
            [(n, c) for n, c in cuts if n in dict(what.arguments)] if rng.random() < 0.5 else cuts
        )
    return RandomProgram(kind, mesh, tuple(sizes.items()), tuple(cuts), choices)


def mesh_axes(mesh: str) -> list[tuple[str, int]]:
    return [(name, int(size)) for name, size in (axis.split(":") for axis in mesh.split(","))]


def _size(rng: random.Random, letter: str, is_even: bool) -> int:
    if letter in _KERNELS:
        return rng.choice(_KERNELS[letter])
    if letter in _SPACE and is_even:
        return rng.choice(_SPACE[letter])
    return rng.choice(_EVEN if is_even or rng.random() < 0.5 else _UNEVEN)


def _least(letter: str, sizes: dict[str, int], choices: dict[str, str]) -> int:
    """The size of a letter's dimension in the smallest tensor: strides and pooling shrink an image."""
    size = sizes[letter]
    if letter not in _SPACE:
        return size
    size -= sizes["K"] - 1 if choices["padding"] == "VALID" else 0
    return size // int(choices["stride"]) // (1 if choices.get("pool", "no") == "no" else 2)


def mapping_of(
    rng: random.Random, letters: str, axes: list[tuple[str, int]], sizes: dict[str, int]
) -> dict[str, Axis]:
    """Letters to mesh axes, each axis used at most once; `sizes` limits the number of parts."""
    found: dict[str, Axis] = {}
    free = list(axes)
    rng.shuffle(free)
    for name, _ in free:
        if rng.random() < 0.2:
            continue
        letter = rng.choice(letters)
        if letter in found and rng.random() < 0.7:
            continue
        held = found.get(letter)
        both = (name,) if held is None else ((held,) if isinstance(held, str) else held) + (name,)
        parts = int(np.prod([dict(axes)[axis] for axis in both]))
        if parts * 2 <= sizes[letter]:
            found[letter] = both[0] if len(both) == 1 else both
    return found
