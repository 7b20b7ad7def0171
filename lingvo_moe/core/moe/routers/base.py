"""The interface of all routers: tokens in, a few [G,S,k] tensors out; their inputs, and the level of a decision.

A learned router decides for each token, sentence, task or id. Kudugunta et al. 2021 (Beyond Distillation: Task-level
Mixture-of-Experts for Efficient Inference) compare the first three levels for translation. A level only changes the
input of the gating network, so any learned router works at any level. Chance (jitter, noise, a sampled second choice)
and capacity are still each token's own.

Letters: G group, S token in group, k choice rank, E expert, C capacity slot, M model, U task, V vocabulary;
B batch, T time, Z token in group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, WeightParams, scoped
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.kernels.weights import Matrix, Packing
from lingvo_moe.core.moe.routers.losses_and_metrics import (
    AuxLoss,
    Choice,
    add_losses,
    aux_loss_of,
    routing_metrics,
)
from lingvo_moe.core.moe.routers.slots import GATES, Gate, assign_slots
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import Kept, lookup

CONTEXT = {
    "ids": "the number of the token in its vocabulary",
    "segment_ids": "0 for padding, 1, 2, ... for the sentences of a row",
    "task_ids": "the number of the task, for a translation model of the source language",
}


def needed(path: str, names: Sequence[str], context: NestedMap | None) -> NestedMap | None:
    """The entries of a context, int32 [B,T] each, that a router needs, and recorded `experts` where there are some,
    int32 [B,T,k]; None where there are none.

    Raises ValueError: an entry that it needs is missing.
    """
    for name in names:
        if context is None or name not in context:
            entries = ", ".join(sorted(context or {})) or "none"
            raise ValueError(
                f"{path} routes by {name} ({CONTEXT[name]}): it must be in `context`, int32 [B,T]; "
                f"given: {entries}"
            )
    recorded = ["experts"] if context and "experts" in context else []
    names = [*names, *recorded]
    return NestedMap({name: context[name] for name in names}) if context and names else None


def grouped(path: str, context: NestedMap, groups: int, size: int) -> NestedMap:
    """A context [B,T,...] in the groups of the tokens, [G,S,...].

    Segment ids become unique in the batch: those of different rows differ.

    Raises:
        ValueError: segment ids in groups smaller than a row, which would split sentences.
    """
    out = NestedMap()
    for name, value_BT in context.items():
        if name == "segment_ids":
            batch, time = value_BT.shape.as_list()
            if size % time:
                raise ValueError(
                    f"{path} routes by sentence, but {groups} groups of {size} tokens split rows of "
                    f"{time}: num_groups must divide the {batch} rows, or be 0"
                )
            value_BT += (time + 1) * tf.range(batch)[:, tf.newaxis]
        out[name] = tf.reshape(value_BT, [groups, size, *value_BT.shape[2:]])
    return out


@dataclass(frozen=True)
class Routing:
    """A routing decision: the only argument that a dispatcher takes from a router."""

    expert_index: tf.Tensor  # int32 [G,S,k], the experts of each token, best first, all different
    # float32 [G,S,k], the weight of that expert's output in the sum; 0 where not kept.
    gate: tf.Tensor
    # int32 [G,S,k], the slot within (group, expert); below C and unique where kept, of no meaning elsewhere. None
    # where there is no capacity.
    position: tf.Tensor | None
    # float32 [G,S,k], 1 where the token is sent, 0 where it overflowed, was not sampled, or is padding.
    kept: tf.Tensor
    num_experts: int  # E
    capacity: int | None  # C; None means that nothing is ever dropped, as in inference
    aux_loss: tf.Tensor  # float32 scalar
    metrics: NestedMap  # NestedMap of float32 tensors
    # The next values of the router's variables that are not trainable, by their paths.
    updates: NestedMap = field(default_factory=NestedMap)
    aux_losses: Sequence[AuxLoss] = ()  # the terms of aux_loss
    # An expert with tokens multiplies at least so many rows: a product of a single one is rounded in another way.
    fewest_rows: int = 1


class Router(BaseLayer):
    """Chooses the experts of each token. Subclasses implement `Choose`, for training and decoding alike.

    A router does all its arithmetic in float32, whatever the activations are: the choice depends on small
    differences, and positions are sums that bfloat16 cannot represent.
    """

    PART: ClassVar[str] = "gating"
    # True for expert choice: C decides how many tokens each expert picks, so C is passed even when the dispatcher is
    # dropless.
    CHOOSES_BY_CAPACITY: ClassVar[bool] = False
    # Whether recorded `experts` of a context, int32 [G,S,k], may take the place of its own choice.
    REPLAYS: ClassVar[bool] = False

    @classmethod
    def Needs(cls, params: HyperParams) -> tuple[str, ...]:
        """The entries of CONTEXT that `context` must have for a router of these Params."""
        return ()

    @classmethod
    def LooksAhead(cls, params: HyperParams) -> bool:
        """Whether a token's experts depend on later tokens: no decoder can use such a router."""
        return False

    @classmethod
    def Slots(cls, group_size: int, capacity: int) -> int:
        """The slots of an expert in training, where the layer gives it C for S tokens."""
        return capacity

    @classmethod
    def Choices(cls, params: HyperParams) -> int:
        """k of `Routing`: the parameter k of a router that has one, else all experts; sizes are set in `params`."""
        return params.k if "k" in params else params.num_experts

    @classmethod
    def Flops(cls, params: HyperParams, tokens: int) -> int:
        """FLOPs of the gating of so many tokens; sizes are set in `params`."""
        return 0

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M; the MoE layer sets it.", checks.SIZE)
        p.Define("num_experts", 0, "E; the MoE layer sets it.", checks.SIZE)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        if "k" in self.p:
            check_choices(self.path, "k", self.p.k, self.p.num_experts)

    @scoped
    def Choose(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        paddings_GS: tf.Tensor,
        capacity: int | None = None,
        seed: tf.Tensor | None = None,
        context: NestedMap | None = None,
    ) -> Choice:
        """Chooses the experts of tokens.

        Args:
            x_GSM: tokens, in any float type.
            paddings_GS: bool or float, 1 for padding, which is never routed and takes no slot.
            capacity: C, or None for no limit; for routers that choose by it.
            seed: int32 [2]; None means inference, where nothing is random.
            context: the entries that `Needs` names, int32 [G,S] each, and recorded `experts`, if any; None where there
                are none.
        """
        raise NotImplementedError(f"{type(self).__name__}.Choose")

    def CheckRecorded(self, experts: tf.Tensor) -> None:
        """Raises ValueError where recorded experts [..., k] cannot take the place of this router's choice."""
        if not self.REPLAYS:
            raise ValueError(
                f"{self.path}: {type(self).__name__} takes no recorded `experts`; top_k and top2 do"
            )
        choices = self.Choices(self.p)
        if experts.shape[-1] != choices:
            raise ValueError(
                f"{self.path}: recorded `experts` have {experts.shape[-1]} for each token, and this router chooses "
                f"{choices}"
            )

    def FProp(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        paddings_GS: tf.Tensor,
        capacity: int | None,
        seed: tf.Tensor | None = None,
        context: NestedMap | None = None,
    ) -> Routing:
        """Routes tokens: `Choose`, then `Seat`; arguments as for `Choose`."""
        return self.Seat(self.Choose(theta, x_GSM, paddings_GS, capacity, seed, context), capacity)

    @scoped
    def Seat(self, choice: Choice, capacity: int | None, measured: bool = True) -> Routing:
        """Assigns slots to choices, C for each expert and group, and counts what became of them, unless not `measured`:
        then there are no losses and metrics.

        Raises ValueError: `choice` is no Choice, or the dtype or the shape of a part of it is wrong.
        """
        _check_choice(type(self).__name__, choice)
        E = self.p.num_experts
        if not choice.limited:
            capacity = None
        position, kept_GSk = choice.position, choice.wanted
        if position is None and capacity is not None:
            counted = kept_GSk if choice.counted is None else choice.counted
            position, fits = assign_slots(
                choice.expert_index, counted, E, capacity, choice.priority
            )
            kept_GSk = fits if choice.counted is None else kept_GSk * fits
        gate = choice.Gate(kept_GSk)
        terms = choice.losses() if measured else ()
        aux_loss, metrics = aux_loss_of(terms), NestedMap()
        if measured:
            metrics = routing_metrics(choice, gate, kept_GSk, E, capacity)
            add_losses(metrics, aux_loss, terms)
        return Routing(
            choice.expert_index,
            gate,
            position,
            kept_GSk,
            E,
            capacity,
            aux_loss,
            metrics,
            choice.updates,
            terms,
        )


def check_choices(path: str, name: str, number: int, num_experts: int) -> None:
    """Raises ValueError, naming the parameter, where a token cannot have so many different experts."""
    if not 1 <= number <= num_experts:
        raise ValueError(f"{path}.{name}={number}: must be between 1 and the {num_experts} experts")


LEVELS = ("token", "sentence", "task", "id")
_NEEDS: dict[str, tuple[str, ...]] = {
    "token": (),
    "sentence": ("segment_ids",),
    "task": ("task_ids",),
    "id": ("ids",),
}


def define_level(p: HyperParams) -> None:
    """Adds `level` and `num_tasks` to a router's Params."""
    p.Define(
        "level",
        "token",
        "The unit of the decision: each 'token', a 'sentence' (the mean of its tokens) for all of its "
        "tokens, the 'task' (an embedding of the source language's number), or the token's 'id' (an embedding of its "
        "own, for the router alone).",
        checks.one_of(LEVELS),
    )
    p.Define("num_tasks", 0, "With level 'task': how many tasks there are.", checks.COUNT)
    ids = checks.Integer(0, checks.IDS.most)
    p.Define("vocab_size", 0, "With level 'id': V; a translation model sets it.", ids)
    p.OnlyWith("vocab_size", lambda p: "" if p.level == "id" else f"level={p.level}")


def check_level(path: str, p: HyperParams) -> None:
    """Raises ValueError for level 'task' without num_tasks, num_tasks with another one, or 'id' without vocab_size."""
    if (p.level == "task") != (p.num_tasks > 0):
        raise ValueError(
            f"{path}.level={p.level!r} with {path}.num_tasks={p.num_tasks}: level 'task' needs the "
            "number of tasks (of languages, for a translation model), other levels have none"
        )
    if p.level == "id" and not p.vocab_size:
        raise ValueError(f"{path}.vocab_size=0: level 'id' needs the size of the vocabulary")


def real_tokens(paddings_GS: tf.Tensor) -> tf.Tensor:
    """float32 [G,S], 1 for tokens and 0 for padding."""
    return 1.0 - tf.cast(paddings_GS, tf.float32)


def sentence_means(
    x_GSM: tf.Tensor, segment_ids_GS: tf.Tensor, paddings_GS: tf.Tensor
) -> tf.Tensor:
    """The mean over the real tokens of each token's segment, float32 [G,S,M]; 0 at padding.

    Args:
        x_GSM: any float type.
        segment_ids_GS: int32; tokens of a group with the same number are one sentence.
        paddings_GS: bool or float, 1 for padding.
    """
    real_GS = real_tokens(paddings_GS)
    same_GSZ = tf.equal(segment_ids_GS[:, :, tf.newaxis], segment_ids_GS[:, tf.newaxis, :])
    pairs_GSZ = real_GS[:, :, tf.newaxis] * real_GS[:, tf.newaxis, :]
    same_GSZ = tf.cast(same_GSZ, tf.float32) * pairs_GSZ
    # The matrix product itself averages; the mean over padding alone is 0.
    count_GS1 = tf.maximum(tf.reduce_sum(same_GSZ, -1, keepdims=True), 1.0)
    share_GSZ = same_GSZ * kernels.current().batch_independent(tf.math.reciprocal, count_GS1)
    return tf.einsum("GSZ,GZM->GSM", share_GSZ, tf.cast(x_GSM, tf.float32))


def task_vectors(task_emb_UM: tf.Tensor, task_ids_GS: tf.Tensor) -> tf.Tensor:
    """The embedding of each token's task, float32 [G,S,M].

    A product with one-hot vectors: its gradient is a product too, which XLA shards, where the gradient of a
    gather is a scatter.
    """
    table_UM = tf.cast(task_emb_UM, tf.float32)
    hot_GSU = tf.one_hot(task_ids_GS, table_UM.shape[0])
    return tf.einsum("GSU,UM->GSM", hot_GSU, table_UM)


class LearnedRouter(Router):
    """A router with a gating network, wg [M,E]. Subclasses implement `ChooseByLogits`, or `ChooseByInputs`.

    The network's input is each token or, by `level`, its sentence's mean, or an embedding of its task (then there is a
    weight task_emb [U,M], U the number of tasks) or of its id (id_emb [V,M]), which nothing but the router uses.
    """

    KEEPS: ClassVar = {"router": Kept.PRODUCT}

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "gate",
            "softmax",
            "From logits to the weights of the experts' outputs: 'softmax' over experts, or each logit's own 'sigmoid' "
            "(moe/routers/slots.py).",
            checks.one_of(GATES),
        )
        define_level(p)
        return p

    @classmethod
    def Needs(cls, params: HyperParams) -> tuple[str, ...]:
        return _NEEDS[params.level]

    @classmethod
    def LooksAhead(cls, params: HyperParams) -> bool:
        return params.level == "sentence"

    @classmethod
    def Flops(cls, params: HyperParams, tokens: int) -> int:
        return 2 * tokens * params.model_dim * params.num_experts

    def __init__(self, params: InstantiableParams):
        params = params.Copy()
        # Every device gates its own tokens against all experts: replicated, unless asked otherwise.
        replicated = {"wg.E": None, "id_emb.V": None}
        params.weight_split = {**replicated, **(params.weight_split or {})}
        super().__init__(params)
        p = self.p
        check_level(self.path, p)
        if p.level == "task":
            self.CreateVariable(
                "task_emb", WeightParams((p.num_tasks, p.model_dim), "UM", WeightInit.Gaussian())
            )
        if p.level == "id":
            self.CreateVariable(
                "id_emb", WeightParams((p.vocab_size, p.model_dim), "VM", WeightInit.Gaussian())
            )
        self.CreateVariable(
            "wg", WeightParams((p.model_dim, p.num_experts), "ME", self.GatingInit())
        )

    @property
    def gate(self) -> Gate:
        """The function that turns logits into scores."""
        return GATES[self.p.gate]

    def GatingInit(self) -> WeightInit:
        """The initial value of wg."""
        return WeightInit.FanIn(self.p.model_dim)

    def Choose(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        paddings_GS: tf.Tensor,
        capacity: int | None = None,
        seed: tf.Tensor | None = None,
        context: NestedMap | None = None,
    ) -> Choice:
        """See `Router`; theta holds wg [M,E]."""
        recorded = {}
        if context is not None and "experts" in context:
            recorded["recorded_GSk"] = self.Shard(context.experts, "GSk")
        x_GSM = self.Seen(theta, x_GSM, paddings_GS, context)
        return self.ChooseByInputs(
            theta, x_GSM, real_tokens(paddings_GS), capacity, seed, **recorded
        )

    @scoped
    def Seen(
        self, theta: NestedMap, x_GSM: tf.Tensor, paddings_GS: tf.Tensor, context: NestedMap | None
    ) -> tf.Tensor:
        """The input of the gating network for each token, [G,S,M], by `level`; arguments as in FProp."""
        if self.p.level == "token":
            return x_GSM
        assert context is not None
        if self.p.level == "sentence":
            x_GSM = sentence_means(x_GSM, context.segment_ids, paddings_GS)
        elif self.p.level == "id":
            x_GSM = lookup(tf.cast(theta.id_emb, tf.float32), context.ids)
        else:
            x_GSM = task_vectors(theta.task_emb, context.task_ids)
        return self.Shard(x_GSM, "GSM")

    @scoped
    def ChooseByInputs(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int | None,
        seed: tf.Tensor | None,
    ) -> Choice:
        """The choice by the gating network's input; `real_GS` as in `Choice`, the other arguments as in `Choose`.

        A router overrides it if it needs more than logits: other weights, noise on the inputs; or if it `REPLAYS`: then
        it takes `recorded_GSk`, too.
        """
        return self.ChooseByLogits(self.Logits(theta, x_GSM), real_GS, capacity, seed)

    @scoped
    def Logits(self, theta: NestedMap, x_GSM: tf.Tensor) -> tf.Tensor:
        """The gating network before its softmax, float32 [G,S,E] (Algorithm 2, line 1)."""
        x_GSM = tf.cast(x_GSM, tf.float32)
        if isinstance(theta.wg, Matrix):
            return kernels.current().product(x_GSM, theta.wg)
        wg_ME = tf.cast(theta.wg, tf.float32)
        logits_GSE = self.Shard(tf.einsum("GSM,ME->GSE", x_GSM, wg_ME), "GSE")
        return self.Keep(logits_GSE, "router", "GSE")

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer: wg in float32, where scores of one row are rounded as in any batch: 8 numbers at a time."""
        if self.p.num_experts % 8:
            return theta
        return NestedMap(theta, wg=packing.Unrounded(tf.cast(theta.wg, tf.float32)))

    def ChooseByLogits(
        self,
        logits_GSE: tf.Tensor,
        real_GS: tf.Tensor,
        capacity: int | None = None,
        seed: tf.Tensor | None = None,
    ) -> Choice:
        """The choice itself, by float32 logits; the other arguments as in `ChooseByInputs`."""
        raise NotImplementedError(f"{type(self).__name__}.ChooseByLogits")


def all_experts(like_GSE: tf.Tensor) -> tf.Tensor:
    """int32 [G,S,E] with e at [g,s,e]: the index where every expert is a choice (k = E).

    Derived from a run-time tensor: a constant of this size would be made while tracing.
    """
    zero_GSE = tf.cast(like_GSE > float("inf"), tf.int32)
    return zero_GSE + tf.range(like_GSE.shape[-1])


def _check_choice(router: str, choice: Any) -> None:
    """Raises ValueError, naming the router's class, for what its Choose should not have returned."""
    if not isinstance(choice, Choice):
        raise ValueError(
            f"{router} chose with a {type(choice).__name__}; it has to return a Choice"
        )
    index_shape = tf.TensorShape(choice.expert_index.shape)
    shape = index_shape if index_shape.rank == 3 else tf.TensorShape([None] * 3)
    for name, dtype in (("expert_index", tf.int32), ("gate", tf.float32), ("wanted", tf.float32)):
        value = getattr(choice, name)
        if tf.as_dtype(value.dtype) != dtype or not shape.is_compatible_with(value.shape):
            raise ValueError(
                f"{router} returned a Choice whose {name} is {tf.as_dtype(value.dtype).name} {value.shape}; it has to "
                f"be {dtype.name} [G,S,k], where expert_index is {index_shape}"
            )
