"""The experts: E two-layer feed-forward networks in two weights (Algorithm 2, lines 5 to 7).

Letters: G group, E expert, C capacity slot, D devices, N rows of a device, M model, H hidden.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.kernels import Activation
from lingvo_moe.core.kernels.grouped_matmul import packed_feed_forward
from lingvo_moe.core.kernels.weights import FEWEST_ROWS, Packing, StackedMatrices
from lingvo_moe.core.layers.feed_forward import ACTIVATIONS, FeedForward
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import DimsMapping, dims_mapping
from lingvo_moe.core.tensors import Kept, keeps, runtime_zeros, shape_of

# The letters that shard rows [D,N,M]: devices as groups are; the rows of a device are together, as those of a group.
ROWS = "GSM"


# Multiplies rows [D,N,M], in groups of int32 [D,e] rows, by the matrices [E,M,H] of their experts; the last argument
# has the mesh axes of the matrices' dimensions.
Product = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, DimsMapping], tf.Tensor]


@dataclass(frozen=True)
class Rows:
    """Tokens sorted by expert, in groups of any size: the input and output of experts without capacity."""

    # [D,N,M], the rows of each device's experts, those of its first expert first; rows past the groups are padding,
    # zeros, and so may be the last ones of a group.
    values: tf.Tensor
    group_sizes: tf.Tensor  # int32 [D,e], how many rows each of a device's e experts has
    # int32 [D,N], the global id token * k + rank of each row; keys its random draws.
    choices: tf.Tensor
    product: Product  # the dispatcher's, which knows on which devices rows and experts are
    notes: tuple = ()  # what `Dispatch` leaves for `Combine`
    metrics: NestedMap = field(default_factory=NestedMap)  # float32 scalars about dropped rows

    def With(self, values: tf.Tensor) -> "Rows":
        """The same rows with other values, [D,N,anything]."""
        return replace(self, values=values)

    def MatMul(self, weights_EMH: tf.Tensor, mapping: DimsMapping) -> "Rows":
        """Each row times the matrix of its expert, on the device that holds both.

        Args:
            weights_EMH: [E,M,H], in the type of the rows.
            mapping: the mesh axes of the weights' dimensions. Weights are gathered along those axes of M and H
                that rows are sharded along too.
        """
        return self.With(self.product(self.values, self.group_sizes, weights_EMH, mapping))


class BaseExperts(BaseLayer):
    """The interface of experts; derive your own from it.

    Attributes:
        TAKES_ROWS: whether there is a `GroupedFProp`, for dispatchers that give `Rows`. Without one, the layer
            leaves inference to its training dispatcher too.
    """

    PART: ClassVar[str] = "experts"
    TAKES_ROWS: ClassVar[bool] = False

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M; the MoE layer sets it.", checks.SIZE)
        p.Define("hidden_dim", 0, "H; the MoE layer sets it.", checks.SIZE)
        p.Define("num_experts", 0, "E; the MoE layer sets it.", checks.SIZE)
        return p

    @classmethod
    def Flops(cls, params: HyperParams, rows: int) -> int:
        """FLOPs of the products of so many rows, each of one expert; sizes are set in `params`."""
        return 4 * rows * params.model_dim * params.hidden_dim

    @classmethod
    def Shared(cls, params: HyperParams, count: int) -> InstantiableParams:
        """The layer of `count` experts that every token visits, beside those of `params`, whose sizes are set."""
        return FeedForward.Params().Set(
            model_dim=params.model_dim, hidden_dim=count * params.hidden_dim
        )

    @scoped
    def GroupedFProp(self, theta: NestedMap, x: Rows, seed: tf.Tensor | None = None) -> Rows:
        """Rows [D,N,M] in, rows [D,N,M] out, where `TAKES_ROWS`; arguments as for FProp."""
        raise NotImplementedError(f"{type(self).__name__}.GroupedFProp")


class Experts(BaseExperts):
    """f(x wi) wo, each expert on its own tokens; f as in layers/feed_forward.py. Without biases, and with relu and the
    gated functions, an empty slot stays zero."""

    TAKES_ROWS: ClassVar[bool] = True
    KEEPS: ClassVar = {"experts_hidden": Kept.PRODUCT}

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("activation", "relu", "f, by its name.", checks.one_of(ACTIVATIONS))
        p.Define(
            "relu_dropout_prob", 0.0, "Dropout on the hidden layer, in training.", checks.SHARE
        )
        p.Define("biases", False, "Whether each product has a bias (gpt-oss).")
        return p

    @classmethod
    def Flops(cls, params: HyperParams, rows: int) -> int:
        """See `BaseExperts`."""
        products = ACTIVATIONS[params.activation].products
        return 2 * products * rows * params.model_dim * params.hidden_dim

    @classmethod
    def Shared(cls, params: HyperParams, count: int) -> InstantiableParams:
        """See `BaseExperts`; with the activation, the dropout and the biases of the routed experts."""
        shared = super().Shared(params, count).Set(use_bias=params.biases)
        return shared.Set(activation=params.activation, relu_dropout_prob=params.relu_dropout_prob)

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        E, M, H = p.num_experts, p.model_dim, p.hidden_dim
        for name in self.activation.weights:
            self.CreateVariable(name, WeightParams((E, M, H), "EMH", WeightInit.FanIn(M)))
        self.CreateVariable("wo", WeightParams((E, H, M), "EHM", WeightInit.FanIn(H)))
        if p.biases:
            for name in self.activation.weights:
                self.CreateVariable(f"{name}_bias", WeightParams.Vector((E, H), "EH", 0.0))
            self.CreateVariable("wo_bias", WeightParams.Vector((E, M), "EM", 0.0))

    def FProp(
        self, theta: NestedMap, x_EGCM: tf.Tensor, seed: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Slots [E,G,C,M] in, slots [E,G,C,M] out, both sharded along E, as the weights are."""
        weights = theta.Transform(self.Cast)
        rate, drop = self.p.relu_dropout_prob, None
        if rate and seed is not None:
            drop = functools.partial(kernels.dropout, rate=rate, seed=seed)
        hidden = None
        if keeps("experts_hidden"):
            hidden = functools.partial(self.Keep, name="experts_hidden", letters="EGCH")
        run, activation = kernels.current().experts_feed_forward, self.activation
        if not self.p.biases:
            return run(x_EGCM, weights, activation, drop, self.Shard, hidden)
        biases = [weights[f"{name}_bias"][:, tf.newaxis, tf.newaxis] for name in activation.weights]

        def biased(*products: tf.Tensor) -> tf.Tensor:
            return activation.function(*(x + b for x, b in zip(products, biases, strict=True)))

        # With a function for the first products, kernels apply the activation to all experts at once.
        hidden = hidden or tf.identity
        y_EGCM = run(
            x_EGCM, weights, replace(activation, function=biased), drop, self.Shard, hidden
        )
        return y_EGCM + weights.wo_bias[:, tf.newaxis, tf.newaxis]

    def GroupedFProp(self, theta: NestedMap, x: Rows, seed: tf.Tensor | None = None) -> Rows:
        """Rows [D,N,M] in, rows [D,N,M] out, in groups of any size, sharded along D: a device has its own experts."""
        if are_packed(theta):
            run = functools.partial(self._PackedFProp, theta)
            in_loop = isinstance(theta.wo, StackedMatrices)
            y_NM = packed_feed_forward(x.values[0], x.group_sizes[0], run, in_loop)
            return x.With(y_NM[tf.newaxis])
        products = [
            self._Biased(x.MatMul(self.Cast(theta[name]), self._Mapping(name, "EMH")), theta, name)
            for name in self.activation.weights
        ]
        products = [self.Keep(product, "experts_hidden", "GSH") for product in products]
        hidden = self.activation.function(*products)
        h = x.With(kernels.dropout(hidden, self.p.relu_dropout_prob, seed, x.choices))
        y = h.MatMul(self.Cast(theta.wo), self._Mapping("wo", "EHM"))
        return y.With(self._Biased(y, theta, "wo")) if self.p.biases else y

    def _Biased(self, rows: Rows, theta: NestedMap, name: str) -> tf.Tensor:
        """The values of rows that were multiplied by a weight, plus the bias of each row's expert, if there are any."""
        if not self.p.biases:
            return rows.values
        bias = f"{name}_bias"
        expert, hidden = self._Mapping(bias, "EM" if name == "wo" else "EH")
        shape = [*shape_of(rows.values)[:-1], 1]
        ones = rows.With(1.0 + runtime_zeros(theta[bias], rows.values.dtype, shape))
        biases = self.Cast(theta[bias])[:, tf.newaxis]
        return rows.values + ones.MatMul(biases, (expert, None, hidden)).values

    def _PackedFProp(self, theta: NestedMap, expert: Any, x_nM: tf.Tensor) -> tf.Tensor:
        """An expert's rows [n,M] through its packed weights, [n,M]."""

        def product(x: tf.Tensor, name: str) -> tf.Tensor:
            y = theta[name][expert].Product(x)
            return y + theta[f"{name}_bias"][expert] if self.p.biases else y

        hidden = (product(x_nM, name) for name in self.activation.weights)
        return product(self.activation.function(*hidden), "wo")

    @property
    def activation(self) -> Activation:
        """f."""
        return ACTIVATIONS[self.p.activation]

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer: all weights but biases; see `Packing.Experts`."""
        cast = theta.Transform(self.Cast)
        packed = {
            name: packing.Experts(w) for name, w in cast.items() if not name.endswith("_bias")
        }
        return NestedMap(cast if are_packed(packed) else theta, **packed)

    def _Mapping(self, name: str, letters: str) -> DimsMapping:
        return dims_mapping(letters, self.p.weight_split, name)


def are_packed(theta: Mapping[str, Any]) -> bool:
    """Whether the weights of experts are packed ones: see `Experts.PackWeights`."""
    return isinstance(theta.get("wo"), list | StackedMatrices)


def fewest_rows(theta: NestedMap) -> int:
    """The rows that an expert of packed weights needs at least, so that a row's result is that of any batch."""
    packed = theta.wo if isinstance(theta.wo, StackedMatrices) else theta.wo[0]
    return 1 if packed.rows_alike else FEWEST_ROWS
