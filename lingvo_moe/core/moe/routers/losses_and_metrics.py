"""The choices of routers, their auxiliary losses (how evenly experts are used, how large logits are) and their metrics;
and the choices taken out of a forward pass, in the form in which batches give them to another one.

Padding moves none of them. Sums are over the whole batch, however it is sharded, and are scaled by numbers known at run
time only.

Letters: G group, S token in group, k choice rank, E expert, C capacity slot; B batch, T time, L MoE layer.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from lingvo_moe.core.moe.routers.slots import effective_capacity_factor, normalize
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.tensors import shape_of

_TINY = 1e-20  # the least squared mean, so that the variation of zeros is 0


@dataclass(frozen=True)
class AuxLoss:
    """One term of a router's auxiliary loss."""

    name: str  # the name in metrics, after `loss_`
    value: tf.Tensor  # float32 scalar, unweighted
    weight: float  # its factor in the auxiliary loss
    # What the value is a mean over, 'groups' (those with a token) or 'tokens'; see micro_batch_terms.
    over: str


@dataclass(frozen=True)
class Choice:
    """The experts of each token as a router chooses them, before any is full. Decoding needs no more than this."""

    expert_index: tf.Tensor  # int32 [G,S,k], the experts of each token, best first, all different
    gate: tf.Tensor  # float32 [G,S,k], the weight of that expert's output, before drops
    # float32 [G,S,k], 1 where the token asks for a slot: not at padding, nor where chance decided against it.
    wanted: tf.Tensor
    real: tf.Tensor  # float32 [G,S], 1 for tokens and 0 for padding
    # float32 [G,S,E], for the metrics of a gating network; they sum to 1. None without such a network.
    probabilities: tf.Tensor | None = None
    # int32 [G,S,k], the slots, where the router assigns them itself. None: they are assigned in the order of
    # `slots.assign_slots`.
    position: tf.Tensor | None = None
    # float32 [G,S,k], 1 where a choice takes a position, wanted or not; None: as `wanted`.
    counted: tf.Tensor | None = None
    priority: tf.Tensor | None = None  # float32 [G,S], see `slots.assign_slots`
    losses: Callable[[], Sequence[AuxLoss]] = tuple  # gives the terms of the auxiliary loss
    # The next values of variables, as in `Routing`.
    updates: NestedMap = field(default_factory=NestedMap)
    # False where k = E and expert_index[..., e] = e: then the choices of a token have no order.
    ranked: bool = True
    # False where there is a slot for each choice, whatever the layer's capacity is.
    limited: bool = True
    normalized_after_drops: bool = False  # whether the gates that are kept are divided by their sum
    scale: float = 1.0  # a factor of all gates

    def Gate(self, kept_GSk: tf.Tensor) -> tf.Tensor:
        """The weights [G,S,k] of the choices that are kept, where `kept_GSk` is 1; zeros where it is 0."""
        gate = self.gate * kept_GSk
        if self.normalized_after_drops:
            gate = normalize(gate)
        return gate if self.scale == 1.0 else gate * self.scale


def load_balance(
    probabilities_GSE: tf.Tensor, count_GE: tf.Tensor, real_GS: tf.Tensor
) -> tf.Tensor:
    """E sum_e f_e P_e, averaged over groups, a float32 scalar: the Switch Transformer's loss (Fedus et al. 2021,
    section 2.2, equations 4 to 6; its alpha is the caller's), for any number of choices.

    f_e is the share of the group's choices that fell on e, first and later ones alike, so that it sums
    to 1; P_e is the mean probability of e. The gradient flows through P_e alone. Perfect balance gives
    1 for any k and E. Of first choices alone this is E^2 times Algorithm 1's 1/E sum_e (c_e / S) m_e.
    Groups of padding alone do not count.

    Args:
        probabilities_GSE: softmax outputs, float32.
        count_GE: how many choices of real tokens fell on each expert, before drops, float32.
        real_GS: 1 for tokens, 0 for padding, float32.
    """
    tokens_G = tf.reduce_sum(real_GS, 1)
    choices_G = tf.reduce_sum(count_GE, 1)
    # Sums times a runtime scalar: the gradient of reduce_mean would be a host constant of this size.
    sum_GE = tf.reduce_sum(probabilities_GSE * real_GS[:, :, tf.newaxis], 1)
    per_G = tf.math.reciprocal(tf.maximum(tokens_G, 1.0) * tf.maximum(choices_G, 1.0))
    total = tf.reduce_sum(tf.stop_gradient(count_GE * per_G[:, tf.newaxis]) * sum_GE)
    groups = tf.reduce_sum(tf.cast(tokens_G > 0, tf.float32))
    return total * (float(count_GE.shape[-1]) * tf.math.reciprocal(tf.maximum(groups, 1.0)))


def log_partition(logits_GSE: tf.Tensor) -> tf.Tensor:
    """log sum_e exp(logit), [G,S], without overflow: softmax is exp(logit - this)."""
    largest_GS1 = tf.stop_gradient(tf.reduce_max(logits_GSE, -1, keepdims=True))
    sums_GS = tf.reduce_sum(tf.exp(logits_GSE - largest_GS1), -1)
    return tf.math.log(sums_GS) + largest_GS1[:, :, 0]


def z_loss(log_partition_GS: tf.Tensor, real_GS: tf.Tensor) -> tf.Tensor:
    """The mean over tokens of (log sum_e exp(logit_e))^2, which keeps logits small (ST-MoE: Zoph et
    al. 2022, section 3.3, equation 5). `real_GS` is 1 for tokens, 0 for padding."""
    per_token = tf.math.reciprocal(tf.maximum(tf.reduce_sum(real_GS), 1.0))
    return tf.reduce_sum(tf.square(log_partition_GS) * real_GS) * per_token


def cv_squared(x_E: tf.Tensor) -> tf.Tensor:
    """The squared coefficient of variation: variance / mean^2, over all E; 0 if all are zeros."""
    scale = 1.0 / x_E.shape[0]
    mean = tf.reduce_sum(x_E) * scale
    variance = tf.reduce_sum(tf.square(x_E - mean)) * scale
    return variance / tf.maximum(tf.square(mean), _TINY)


def importance(gate_GSk: tf.Tensor, index_GSk: tf.Tensor, num_experts: int) -> tf.Tensor:
    """[E]: the sum of each expert's gates over a batch (Shazeer et al. 2017, section 4, equation 6).

    Args:
        gate_GSk: the gates of the chosen experts before drops, 0 for padding, float32.
        index_GSk: the experts, int32.
    """
    by_rank = [
        tf.reduce_sum(
            tf.one_hot(index_GSk[:, :, rank], num_experts) * gate_GSk[:, :, rank : rank + 1], [0, 1]
        )
        for rank in range(index_GSk.shape[-1])
    ]
    return tf.add_n(by_rank)


def smooth_load(
    clean_GSE: tf.Tensor, deviation_GSE: tf.Tensor, threshold_GSE: tf.Tensor, real_GS: tf.Tensor
) -> tf.Tensor:
    """[E]: the expected number of tokens of each expert over draws of its own noise (Shazeer et al.
    2017, appendix A, equations 8 to 10); unlike a count it has a gradient.

    P(x, e) = Phi((clean_e - threshold_e) / deviation_e) with Phi the normal distribution function.

    Args:
        clean_GSE: logits without noise.
        deviation_GSE: standard deviations of their noise, positive.
        threshold_GSE: the value that each noisy logit has to exceed: the k-th largest of the others.
    """
    z_GSE = (clean_GSE - threshold_GSE) / deviation_GSE
    chosen_GSE = 0.5 * tf.math.erfc(z_GSE * (-1.0 / math.sqrt(2.0)))
    return tf.reduce_sum(chosen_GSE * real_GS[:, :, tf.newaxis], [0, 1])


def routing_metrics(
    choice: Choice, gate_GSk: tf.Tensor, kept_GSk: tf.Tensor, num_experts: int, capacity: int | None
) -> NestedMap:
    """The metrics of one layer, over the real tokens of all groups.

    Args:
        gate_GSk: the weights that the outputs are combined with, 0 where not kept.
        kept_GSk: 1 where a choice got its slot.

    Returns:
        A NestedMap of float32 tensors, without gradients:
        over_capacity_ratio: the share of the choices asking for a slot that found the expert full;
        experts_per_token: the mean number of experts that a token was sent to;
        dispatch_0: the share of tokens sent to no expert;
        expert_load [E]: the share of filled slots, sums to 1;
        dead_experts: the share of experts without a token;
        effective_capacity: E C / S, or E where nothing is ever dropped.

        With probabilities, those of `_of_probabilities`; if ranked, those of `_by_rank`.
    """
    real_GS = choice.real
    per_token = tf.math.reciprocal(tf.maximum(tf.reduce_sum(real_GS), 1.0))
    if choice.ranked:
        metrics, load_E = _by_rank(choice, gate_GSk, kept_GSk, num_experts)
    else:
        metrics, load_E = NestedMap(), tf.reduce_sum(kept_GSk, [0, 1])
        metrics.dispatch_0 = _share_sent_to(0, tf.reduce_sum(kept_GSk, -1), real_GS)
    asked, slots = tf.reduce_sum(choice.wanted), tf.reduce_sum(load_E)
    metrics.over_capacity_ratio = (asked - slots) / tf.maximum(asked, 1.0)
    metrics.experts_per_token = slots * per_token
    metrics.expert_load = load_E / tf.maximum(slots, 1.0)
    dead = tf.reduce_sum(tf.cast(tf.equal(load_E, 0.0), tf.float32))
    metrics.dead_experts = dead * (1.0 / num_experts)
    metrics.effective_capacity = tf.constant(
        float(num_experts)
        if capacity is None
        else effective_capacity_factor(real_GS.shape[1], num_experts, capacity)
    )
    if choice.probabilities is not None:
        metrics.update(_of_probabilities(choice.probabilities, real_GS, per_token))
    return metrics.Transform(tf.stop_gradient)


def aux_loss_of(losses: Sequence[AuxLoss]) -> tf.Tensor:
    """The auxiliary loss, float32 scalar: the weighted sum of its terms; 0 where there is none."""
    if not losses:
        return tf.constant(0.0)
    first, *rest = [loss.value * loss.weight for loss in losses]
    return sum(rest, first)


def add_losses(metrics: NestedMap, aux_loss: tf.Tensor, losses: Sequence[AuxLoss]) -> None:
    """Adds to a router's metrics, without gradients, `aux_loss`, and each loss unweighted as `loss_<name>`."""
    metrics.aux_loss = tf.stop_gradient(aux_loss)
    for loss in losses:
        metrics[f"loss_{loss.name}"] = tf.stop_gradient(loss.value)


def micro_batch_terms(
    losses: Sequence[AuxLoss], metrics: NestedMap, shares: NestedMap
) -> tuple[tf.Tensor, NestedMap]:
    """The auxiliary loss (float32 scalar) and the metrics of a micro-batch as terms: they add up to the batch's.

    A mean over tokens, or over groups with a token, weighs as much as the micro-batch's share of the batch's. That is
    exact, since groups are the same in both, but for two things, which are weighted by tokens too: losses that are
    no such means (noisy top-k's), and overflow rates where chance decides how many second choices are sent.

    Args:
        losses: the terms of the router's auxiliary loss.
        shares: of the micro-batch in its batch, float32 scalars `tokens` and `groups`.
    """
    shares = shares.Transform(tf.stop_gradient)
    out = metrics.Transform(lambda metric: metric * shares.tokens)
    out.expert_load *= metrics.experts_per_token  # filled slots of each expert for each token
    scaled = [
        AuxLoss(loss.name, loss.value * shares[loss.over], loss.weight, loss.over)
        for loss in losses
    ]
    aux_loss = aux_loss_of(scaled)
    add_losses(out, aux_loss, scaled)
    return aux_loss, out


def combined_metrics(sums: NestedMap) -> NestedMap:
    """The metrics of a batch, [...] or by layer, from the sums of its micro_batch_terms.

    `expert_load` and `dead_experts` are no means: both follow from the filled slots of each expert.
    """
    metrics = NestedMap(sums)
    total = tf.reduce_sum(sums.expert_load, -1, keepdims=True)
    metrics.expert_load = sums.expert_load / tf.where(total > 0, total, 1.0)
    dead = tf.cast(tf.equal(sums.expert_load, 0.0), tf.float32)
    metrics.dead_experts = tf.reduce_sum(dead, -1) * (1.0 / dead.shape[-1])
    return metrics


def _of_probabilities(
    probabilities_GSE: tf.Tensor, real_GS: tf.Tensor, per_token: tf.Tensor
) -> NestedMap:
    """The metrics of the gating network's probabilities:

    importance [E]: the mean probability, sums to 1;
    gate_entropy: of a token's probabilities, the mean; nats, 0 to log E.
    """
    sum_E = tf.reduce_sum(probabilities_GSE * real_GS[:, :, tf.newaxis], [0, 1])
    entropy_GS = -tf.reduce_sum(tf.math.xlogy(probabilities_GSE, probabilities_GSE), -1)
    return NestedMap(
        importance=sum_E * per_token, gate_entropy=tf.reduce_sum(entropy_GS * real_GS) * per_token
    )


def _by_rank(
    choice: Choice, gate_GSk: tf.Tensor, kept_GSk: tf.Tensor, num_experts: int
) -> tuple[NestedMap, tf.Tensor]:
    """The metrics by rank, and [E], the filled slots of each expert. Ranks are counted from 1:

    over_capacity_<rank>_ratio: the share of the choices of this rank, asking for a slot, that found the expert full;
    dispatch_<n>: the share of tokens sent to n experts, n = 0..k;
    mean_gate_<rank>: the mean weight of that choice; 1 minus their sum was lost to drops;
    expert_load_first [E]: the share of first choices, sums to 1.
    """
    real_GS, ranks = choice.real, choice.expert_index.shape[-1]
    per_token = tf.math.reciprocal(tf.maximum(tf.reduce_sum(real_GS), 1.0))
    metrics = NestedMap()
    kept_GSE = tf.constant(0.0)
    for rank in range(ranks):
        name = rank + 1
        wanted_GS, kept_GS = choice.wanted[:, :, rank], kept_GSk[:, :, rank]
        asked = tf.reduce_sum(wanted_GS)
        full = asked - tf.reduce_sum(kept_GS)
        metrics[f"over_capacity_{name}_ratio"] = full / tf.maximum(asked, 1.0)
        metrics[f"mean_gate_{name}"] = tf.reduce_sum(gate_GSk[:, :, rank]) * per_token
        chosen_GSE = tf.one_hot(choice.expert_index[:, :, rank], num_experts)
        kept_GSE += chosen_GSE * kept_GS[:, :, tf.newaxis]
        if rank == 0:
            first_E = tf.reduce_sum(chosen_GSE * real_GS[:, :, tf.newaxis], [0, 1])
            metrics.expert_load_first = first_E * per_token
    dispatched_GS = tf.reduce_sum(kept_GSk, -1)
    for n in range(ranks + 1):
        metrics[f"dispatch_{n}"] = _share_sent_to(n, dispatched_GS, real_GS)
    return metrics, tf.reduce_sum(kept_GSE, [0, 1])


def _share_sent_to(n: int, dispatched_GS: tf.Tensor, real_GS: tf.Tensor) -> tf.Tensor:
    """The share of tokens that were sent to n experts."""
    per_token = tf.math.reciprocal(tf.maximum(tf.reduce_sum(real_GS), 1.0))
    hit_GS = tf.cast(tf.equal(dispatched_GS, float(n)), tf.float32) * real_GS
    return tf.reduce_sum(hit_GS) * per_token


_choices: contextvars.ContextVar[list[tf.Tensor] | None] = contextvars.ContextVar(
    "choices", default=None
)


@contextlib.contextmanager
def noting_choices() -> Iterator[list[tf.Tensor]]:
    """Inside, the list takes what `note_choices` is given, in the order of the layers; and MoE layers have metrics
    `choices`, float32 [G,S,k], which leave loops."""
    choices: list[tf.Tensor] = []
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


def noted_choices() -> list[tf.Tensor] | None:
    """The list of `noting_choices`; None outside."""
    return _choices.get()


def note_choices(expert_index: tf.Tensor) -> None:
    """Notes the experts of a layer's tokens, int32 [G,S,k], where somebody asks for them."""
    choices = noted_choices()
    if choices is not None:
        choices.append(expert_index)


def recorded_experts(choices_LGSk: tf.Tensor, ids_BT: tf.Tensor) -> tf.Tensor:
    """The metrics `choices` of a stack, float32 (see `noting_choices`), as rows of a batch with these ids have
    `experts`: int32 [B,T,L,k]."""
    rows, length = shape_of(ids_BT)
    layers, _, _, ranks = choices_LGSk.shape
    by_layer = tf.reshape(tf.cast(choices_LGSk, tf.int32), [layers, rows, length, ranks])
    return tf.transpose(by_layer, [1, 2, 0, 3])
