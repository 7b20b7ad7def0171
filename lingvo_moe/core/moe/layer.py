"""MoELayer: the position-wise mixture-of-experts layer (paper sections 2.2 and 3.1).

Letters: B batch, T time, G group, S token in group, E expert, C capacity slot, M model, H hidden.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.class_names import ClassesByName
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.kernels.weights import Packing
from lingvo_moe.core.moe.experts import Experts, are_packed, fewest_rows
from lingvo_moe.core.moe.routers.base import Routing, grouped, needed
from lingvo_moe.core.moe.routers.losses_and_metrics import (
    micro_batch_terms,
    note_choices,
    noted_choices,
)
from lingvo_moe.core.moe.routers.slots import expert_capacity
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.sharding import replicate
from lingvo_moe.core.tensors import Kept

# Names of routers and dispatchers; a class is imported when it is asked for.
_ROUTERS = "lingvo_moe.core.moe.routers"
_MOE = "lingvo_moe.core.moe"

ROUTERS = ClassesByName(
    {
        "top2": f"{_ROUTERS}.top2.Top2Router",
        "top_k": f"{_ROUTERS}.top_k.TopKRouter",
        "noisy_top_k": f"{_ROUTERS}.noisy_top_k.NoisyTopKRouter",
        "expert_choice": f"{_ROUTERS}.expert_choice.ExpertChoiceRouter",
        "hash": f"{_ROUTERS}.hash.HashRouter",
        "lsh": f"{_ROUTERS}.lsh.LshRouter",
        "random": f"{_ROUTERS}.random.RandomRouter",
        "soft": f"{_ROUTERS}.soft.SoftRouter",
    }
)

DISPATCHERS = ClassesByName(
    {
        "einsum": f"{_MOE}.dispatch.EinsumDispatcher",
        "index": f"{_MOE}.dispatch.IndexDispatcher",
        "dropless": f"{_MOE}.dispatch_dropless.DroplessDispatcher",
        "masked": f"{_MOE}.dispatch_masked.MaskedDispatcher",
    }
)


def dispatcher_params(chosen: str | InstantiableParams) -> InstantiableParams:
    """The Params of the dispatcher of a name in DISPATCHERS; Params are returned as they are."""
    return _params(DISPATCHERS, chosen) if isinstance(chosen, str) else chosen


def _params(classes: ClassesByName, name: str) -> InstantiableParams:
    return classes[name].Params()  # type: ignore[attr-defined]


class MoELayer(BaseLayer):
    """Route, dispatch, experts, combine; shared experts, if any, are added. The residual connection is the caller's.

    Training (a seed) divides the B T tokens into G groups of S, which compete for C slots an expert and
    group; the output of a token that finds none is zeros. Inference (seed None) drops no token and draws
    nothing at random, so that a token's result depends on that token alone.
    """

    PART: ClassVar[str] = "dispatch_combine"
    KEEPS: ClassVar = {"combined": Kept.OTHER}

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("model_dim", 0, "M.", checks.SIZE)
        p.Define("hidden_dim", 0, "H, the width inside an expert.", checks.SIZE)
        p.Define("num_experts", 0, "E.", checks.SIZE)
        p.Define(
            "num_groups",
            0,
            "G; 0: one group a sequence. Results depend on it, never on the devices. "
            "Must divide B T.",
            checks.COUNT,
        )
        p.Define(
            "capacity_factor",
            2.0,
            "C = capacity_factor S / E; see moe/routers/slots.py.",
            checks.POSITIVE,
        )
        p.Define("min_capacity", 4, "The least C, S allowing.", checks.SIZE)
        p.OnlyWith("capacity_factor min_capacity", _without_capacity)
        p.Define("router", _params(ROUTERS, "top2"), "Chooses the experts.", choices=ROUTERS)
        p.Define("experts", Experts.Params(), "The experts.")
        p.Define(
            "num_shared_experts",
            0,
            "Experts that every token passes beside those that it is routed to: one feed-forward layer, that many "
            "times H wide. 0: none.",
            checks.Integer(0, 1024),
        )
        p.Define(
            "shared_hidden_dim", 0, "The width of a shared expert; 0: hidden_dim.", checks.COUNT
        )
        p.OnlyWith(
            "shared_hidden_dim", lambda p: "" if p.num_shared_experts else "num_shared_experts=0"
        )
        p.Define(
            "gate_inputs",
            False,
            "Whether the gate multiplies the input of a token's expert instead of its output, for routers of one expert"
            " a token (Llama 4).",
        )
        p.Define(
            "output_masking",
            0.0,
            "In training, the share of a token's choices whose expert's output is masked, each by chance; in inference"
            " all outputs are multiplied by 1 - this (NLLB Team 2022, section 6.2.1: EOM).",
            checks.SHARE,
        )
        p.Define(
            "dispatcher",
            "index",
            f"One of {', '.join(sorted(DISPATCHERS))}; or Params of a Dispatcher.",
            choices=DISPATCHERS,
        )
        p.Define(
            "inference_dispatcher",
            "dropless",
            "The same, without a seed. For experts without GroupedFProp `dispatcher` is used instead.",
            choices=DISPATCHERS,
        )
        p.Define(
            "exchange_factor",
            2.0,
            "In inference over devices, dropless: rows go to their experts in rounds, each with room for what a device "
            "gets if its experts are chosen so many times as often as the mean. 0: one round, with room for all.",
            checks.NOT_NEGATIVE,
        )
        p.OnlyWith("exchange_factor", _without_rows)
        for name in ("model_dim", "num_experts"):
            p.Derive(f"router.{name}", name)
            p.Derive(f"experts.{name}", name)
        p.Derive("experts.hidden_dim", "hidden_dim")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        dims = {"model_dim": p.model_dim, "num_experts": p.num_experts}
        self.CreateChild("router", p.router.Copy().Set(**dims))
        for name in ("dispatcher", "inference_dispatcher"):
            self.CreateChild(name, dispatcher_params(getattr(p, name)))
        experts = p.experts.Copy().Set(hidden_dim=p.hidden_dim, **dims)
        self.CreateChild("experts", experts)
        if p.num_shared_experts:
            self.CreateChild("shared_experts", _shared_params(p, experts))
        self._CheckDispatchers()
        choices = self.router.Choices(self.router.p)
        if p.gate_inputs and choices != 1:
            raise ValueError(
                f"{self.path}.gate_inputs=True: the input of a token has one gate, and this router gives a token "
                f"{choices} experts; choose router=top_k with k=1"
            )

    def _CheckDispatchers(self) -> None:
        limit = self.inference_dispatcher.OwnLimit()
        if limit:
            raise ValueError(
                f"{self.path}.inference_dispatcher.{limit}: must be 0, since in inference the other tokens "
                "of a batch may not cause a token to be dropped"
            )
        if self.dispatcher.GIVES_ROWS and not self.experts.TAKES_ROWS:
            raise ValueError(
                f"{self.path}: {type(self.experts).__name__} has no GroupedFProp, which "
                "dispatcher='dropless' needs; choose 'index', or give it one"
            )

    def FProp(
        self,
        theta: NestedMap,
        x_BTM: tf.Tensor,
        paddings_BT: tf.Tensor,
        seed: tf.Tensor | None = None,
        context: NestedMap | None = None,
        shares: NestedMap | None = None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """The layer's output, without the residual.

        Args:
            theta: router.wg [M,E], experts.wi [E,M,H], experts.wo [E,H,M]; shared_experts, if there are any.
            x_BTM: of a static shape where there is a seed.
            paddings_BT: bool or float, 1 for padding. Padding comes out as zeros, without shared experts.
            seed: int32 [2]; None means inference.
            context: the entries that the router needs (`Needs`), int32 [B,T] each; and recorded `experts`, int32
                [B,T,k], where the router is to choose these: a token's are all different and best first, or negative
                where it chooses itself. Other entries are ignored.
            shares: of a micro-batch in its batch, float32 scalars `tokens` and `groups`; loss and metrics are
                then terms that sum up over micro-batches (see routers/losses_and_metrics.py). None for a whole batch.

        Returns:
            y_BTM in the activation type, and NestedMap(aux_loss: float32 scalar, unscaled by the
            task's weight for it; metrics: see routers/losses_and_metrics.py; and, where the router has some,
            updates: see `Routing`).

        Raises:
            ValueError: tokens that do not fall into num_groups groups, no context that the router needs, or
                experts that it does not take.
        """
        context = needed(self.path, self.Needs(self.p), context)
        if context is not None and "experts" in context:
            self.router.CheckRecorded(context.experts)
        x_BTM = tf.cast(x_BTM, self.fprop_dtype)
        if seed is None:
            x_GSM, paddings_GS, capacity = x_BTM, paddings_BT, None
        else:
            x_GSM, paddings_GS, capacity, context = self._InGroups(x_BTM, paddings_BT, context)
        x_GSM = self.Shard(x_GSM, "GSM")
        router_seed = self.FoldSeed(seed, "router")
        arguments = (theta.router, x_GSM, paddings_GS, capacity, router_seed, context)
        packed = are_packed(theta.experts)
        if packed:  # for a search, which reads no extras
            routing = self.router.Seat(self.router.Choose(*arguments), capacity, measured=False)
            routing = replace(routing, fewest_rows=fewest_rows(theta.experts))
        else:
            routing = self.router.FProp(*arguments)
        if seed is None:
            note_choices(routing.expert_index)
        if self.p.gate_inputs:
            x_GSM *= tf.cast(routing.gate, x_GSM.dtype)
            routing = replace(routing, gate=routing.kept)
        if self.p.output_masking:
            routing = replace(routing, gate=routing.gate * self._Masking(routing.gate, seed))
        dispatcher = self.dispatcher
        if seed is None and self.experts.TAKES_ROWS:
            dispatcher = self.inference_dispatcher
        run = self.experts.GroupedFProp if dispatcher.GIVES_ROWS else self.experts.FProp

        def experts(tokens: Any) -> Any:
            return run(theta.experts, tokens, seed=self.FoldSeed(seed, "experts"))

        factor = self.p.exchange_factor if seed is None else 0.0
        y_GSM, row_metrics = dispatcher.Through(routing, x_GSM, experts, factor)
        y_BTM = y_GSM if seed is None else tf.reshape(y_GSM, x_BTM.shape)
        if self.p.num_shared_experts:
            shared_seed = self.FoldSeed(seed, "shared_experts")
            y_BTM += self.shared_experts.FProp(
                theta.shared_experts, x_BTM, paddings_BT, shared_seed
            )[0]
        y_BTM = self.Keep(self.Shard(y_BTM, "BTM"), "combined", "BTM")
        return y_BTM, NestedMap() if packed else _extras(routing, row_metrics, shares)

    def _Masking(self, gate_GSk: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        """The factors of gates, for `output_masking`."""
        if seed is None:
            return tf.constant(1.0 - self.p.output_masking)
        drawn_GSk = randomness.uniform(self.FoldSeed(seed, "masked"), gate_GSk.shape)
        return tf.cast(self.Shard(drawn_GSk, "GSk") >= self.p.output_masking, tf.float32)

    def ActiveParameters(self) -> int:
        """See BaseLayer: of the experts, as many as a token chooses."""
        experts = self.experts.ActiveParameters()
        unused = self.p.num_experts - self.router.Choices(self.router.p)
        return super().ActiveParameters() - experts * unused // self.p.num_experts

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer: the experts', where the layer is dropless in inference. There are no extras then."""
        packed = self.PackChildren(theta, packing)
        if self.p.inference_dispatcher != "dropless":
            packed.experts = theta.experts
        return packed

    def Grow(self, small: NestedMap, fresh: NestedMap) -> NestedMap:
        """See BaseLayer: sparse upcycling of a dense layer (Komatsuzaki et al. 2022, section 3.1).

        Each expert is a copy of it, and shared experts begin by adding zeros; or, where both together are as wide as
        it, shared experts are its first hidden units, and each expert is a copy of the others. So the outputs are the
        same where the gates of a token sum to one. The router is new, and so are slots that the dense layer lacks.
        """
        grown = NestedMap(fresh)
        grown.experts, narrower = _units(small, fresh.experts, self.p.num_experts)
        if narrower:
            grown.shared_experts, _ = _units(small, fresh.shared_experts)
        elif self.p.num_shared_experts:
            shared = fresh.shared_experts
            grown.shared_experts = NestedMap(shared, wo=map_structure(tf.zeros_like, shared.wo))
        return grown

    def _InGroups(
        self, x_BTM: tf.Tensor, paddings_BT: tf.Tensor, context: NestedMap | None
    ) -> tuple[tf.Tensor, tf.Tensor, int | None, NestedMap | None]:
        """Tokens, paddings and context in groups [G,S], and C, the slots of an expert for each group."""
        p = self.p
        groups, size = _grouping(self.path, p.num_groups, x_BTM.shape[:2].as_list())
        capacity = None
        if self.dispatcher.LIMITED or self.router.CHOOSES_BY_CAPACITY:
            capacity = expert_capacity(size, p.num_experts, p.capacity_factor, p.min_capacity)
        if context is not None:
            context = grouped(self.path, context, groups, size)
        x_GSM = tf.reshape(x_BTM, [groups, size, p.model_dim])
        return x_GSM, tf.reshape(paddings_BT, [groups, size]), capacity, context

    @classmethod
    def Needs(cls, params: HyperParams) -> tuple[str, ...]:
        """The entries that `context` must have: see moe/routers/base.py."""
        return params.router.cls.Needs(params.router)

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """Forward FLOPs in training: matrix products, two for each multiply-add.

        Gating 2 G S M E (if it is learnt), dispatch and combine 2 G S E C M each if by einsum, experts
        4 M H (6 M H if their activation is gated) for each of their rows: E G C slots, or the dispatcher's number of
        rows. Softmax, counting and activations, which touch each element a few times, are left out.

        Args:
            input_shapes: that of x_BTM first; others are ignored.

        Returns:
            Also `dispatch`, the part of `flops` that no token needs: einsums with masks, and rows of empty slots.
        """
        p = params
        B, T, M = input_shapes[0]
        G, S = _grouping(p.name, p.num_groups, [B, T])
        E = p.num_experts
        dispatcher = dispatcher_params(p.dispatcher).cls
        router = p.router.Copy().Set(model_dim=M, num_experts=E)
        C = S
        if dispatcher.LIMITED or router.cls.CHOOSES_BY_CAPACITY:
            C = expert_capacity(S, E, p.capacity_factor, p.min_capacity)
            C = router.cls.Slots(S, C)
        gating = router.cls.Flops(router, G * S)
        each_way = dispatcher.Flops(G, S, E, C, M)
        rows = dispatcher.ExpertRows(G, S, E, C, router.cls.Choices(router))
        experts = p.experts.Copy().Set(model_dim=M, hidden_dim=p.hidden_dim, num_experts=E)
        computed = experts.cls.Flops(experts, rows)
        chosen = G * min(S * router.cls.Choices(router), E * C)
        dispatch = 2 * each_way + computed - experts.cls.Flops(experts, chosen)
        if p.num_shared_experts:
            shared = _shared_params(p, experts)
            computed += shared.cls.FPropMeta(shared, (B, T, M)).flops
        flops = gating + 2 * each_way + computed
        return NestedMap(flops=flops, dispatch=dispatch, out_shapes=((B, T, M),))


def _shared_params(p: HyperParams, experts: HyperParams) -> InstantiableParams:
    """Params of the shared experts, beside the routed ones, whose sizes are set."""
    one_expert = experts.Copy().Set(hidden_dim=p.shared_hidden_dim or p.hidden_dim)
    return experts.cls.Shared(one_expert, p.num_shared_experts)


def _units(dense: NestedMap, fresh: NestedMap, copies: int = 0) -> tuple[NestedMap, bool]:
    """Weights or slots in the structure of `fresh`, which are hidden units of a dense layer; and whether it has more.

    They are its first units, or for so many `copies` its last ones; `fresh` stays where the layer has none such.
    """
    old, new, narrower = dict(dense.FlattenItems()), [], False
    for path, value in fresh.FlattenItems():
        if path in old:
            sizes = list(value.shape)[1 if copies else 0 :]
            spare = [n - size for n, size in zip(old[path].shape, sizes, strict=True)]
            narrower = narrower or any(spare)
            value = tf.slice(old[path], spare if copies else [0] * len(sizes), sizes)
            if copies:
                value = tf.repeat(value[tf.newaxis], copies, axis=0)
        new.append(value)
    return fresh.Pack(new), narrower


def _without_capacity(p: HyperParams) -> str:
    """The parameter because of which no capacity is needed, or '': a condition of Params.OnlyWith."""
    if dispatcher_params(p.dispatcher).cls.LIMITED or p.router.cls.CHOOSES_BY_CAPACITY:
        return ""
    return (
        f"dispatcher={p.dispatcher if isinstance(p.dispatcher, str) else p.dispatcher.cls.__name__}"
    )


def _without_rows(p: HyperParams) -> str:
    """The parameters because of which inference exchanges no rows, or '': a condition of Params.OnlyWith."""
    if not p.experts.cls.TAKES_ROWS:
        return f"experts={p.experts.cls.__name__}"
    chosen = p.inference_dispatcher
    if dispatcher_params(chosen).cls.GIVES_ROWS:
        return ""
    return f"inference_dispatcher={chosen if isinstance(chosen, str) else chosen.cls.__name__}"


def _extras(routing: Routing, row_metrics: NestedMap | None, shares: NestedMap | None) -> NestedMap:
    """FProp's second result."""
    aux_loss, metrics = routing.aux_loss, routing.metrics
    # The number of rows is that of the choices kept, whatever C would be.
    if row_metrics is not None:
        metrics = NestedMap({**metrics, **row_metrics})
        metrics.effective_capacity = metrics.experts_per_token
    if shares is not None:
        aux_loss, metrics = micro_batch_terms(routing.aux_losses, metrics, shares)
    if noted_choices() is not None:
        metrics = NestedMap(metrics, choices=tf.cast(routing.expert_index, tf.float32))
    # Without an annotation XLA shards a vector of E numbers as it shards experts, and gathers it later.
    metrics = metrics.Transform(lambda x: replicate(x) if x.shape.rank else x)
    extras = NestedMap(aux_loss=aux_loss, metrics=metrics)
    if routing.updates:
        extras.updates = routing.updates
    return extras


def _grouping(path: str, num_groups: int, batch_time: Sequence[int | None]) -> tuple[int, int]:
    """(G, S) for tokens of shape [B,T]."""
    batch, time = batch_time
    if batch is None or time is None:
        raise ValueError(f"{path}: training needs a static [B,T], got {list(batch_time)}")
    groups = num_groups or batch
    if groups < 1 or (batch * time) % groups:
        raise ValueError(
            f"{path}.num_groups={num_groups}: {batch} x {time} = {batch * time} tokens do not fall "
            "into that many equal groups; choose a divisor, or 0 for one group a sequence"
        )
    return groups, batch * time // groups
