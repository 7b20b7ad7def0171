"""The experts of Transformer tasks: their parameters, their layer in a model, and what follows from them.

Letters: B batch, T time, H hidden, E expert, G group, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params as HyperParams
from lingvo_moe.core.layers.transformer import TransformerStack
from lingvo_moe.core.moe import layer as moe_layer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.base_task import TaskError
from lingvo_moe.tasks.transformer.shrinking import Size

# For a task's SIZES.
SIZES: Mapping[str, tuple[str, ...]] = {
    "G": ("task.num_groups",),
    "E": ("task.num_experts",),
    "H": ("task.hidden_dim", "task.expert_hidden_dim"),
}


def define_experts(p: InstantiableParams, num_experts: int, num_groups: int) -> None:
    """Adds to a task's Params those of its experts, with these defaults."""
    p.Define("expert_hidden_dim", 0, "H of an expert; 0: hidden_dim.", checks.COUNT)
    p.Define("num_experts", num_experts, "E; 0: every feed-forward layer is dense.", checks.COUNT)
    p.Define(
        "num_groups",
        num_groups,
        "G: tokens are routed in G independent groups, in training.",
        checks.COUNT,
    )
    p.Define("moe", moe_layer.MoELayer.Params(), "The MoE layer; sizes are set from above.")
    p.Define(
        "aux_loss_weight",
        0.01,
        "k: loss = nll + k * (sum of the MoE layers' auxiliary losses).",
        checks.NOT_NEGATIVE,
    )
    p.OnlyWith("moe aux_loss_weight expert_hidden_dim num_groups", without_experts)
    for name in ("model_dim", "num_experts", "num_groups"):
        p.Derive(f"moe.{name}", name)
    p.Derive("moe.hidden_dim", "expert_hidden_dim", "hidden_dim")
    p.Derive("moe.experts.relu_dropout_prob", "dropout")
    p.Derive("moe.experts.activation", "activation")


def without_experts(p: HyperParams) -> str:
    """The parameter because of which a task has no experts, or '': a condition of Params.OnlyWith."""
    return "" if p.num_experts else "num_experts=0"


def moe_params(
    p: HyperParams, name: str, router: HyperParams, causal: bool, vocab_size: int
) -> InstantiableParams:
    """The MoE layer of a task, without its model_dim.

    Args:
        name: the router's parameter.
        causal: whether later tokens are unknown, as in a decoder.
        vocab_size: V, the ids that a router may be asked for.

    Raises:
        ParamError: a router that looks ahead, in a decoder; a router's vocabulary that is too small.
    """
    ffn = p.moe.Copy().Set(
        num_experts=p.num_experts,
        num_groups=p.num_groups,
        hidden_dim=p.expert_hidden_dim or p.hidden_dim,
    )
    ffn.router = _configured(p, name, router, causal, vocab_size)
    ffn.experts.relu_dropout_prob = p.dropout
    if p.use_bias:
        ffn.experts.biases = True
    if "activation" in ffn.experts:
        ffn.experts.activation = p.activation
    return ffn


def _configured(
    p: HyperParams, name: str, router: HyperParams, causal: bool, vocab_size: int
) -> HyperParams:
    """The router, with the parameters that the task sets; see `moe_params`."""
    if causal and router.cls.LooksAhead(router):
        better = "decoder_router" if "decoder_router" in p else name
        why = (
            "looks at later tokens, which a decoder does not have yet; choose another one for the decoder, e.g. "
            f"task.{better}=top2"
        )
        raise ParamError(f"task.{name}", router.cls.__name__, why)
    router = router.Copy()
    if "aux_loss_scale" in router and router.aux_loss_scale is None:
        # Algorithm 1's loss is 1/E^2 when experts are balanced: times k it would have no force.
        # Scaled by E^2, as in the authors' Lingvo, k means the same for any number of experts.
        router.aux_loss_scale = float(p.num_experts**2)
    if "ids" in router.cls.Needs(router) and "vocab_size" in router:
        if 0 < router.vocab_size < vocab_size:
            why = f"must be at least {vocab_size}, the ids that it is asked for, or 0, which takes that"
            raise ParamError(f"task.{name}.vocab_size", str(router.vocab_size), why)
        router.vocab_size = router.vocab_size or vocab_size
    return router


def exchanges_rows(task: HyperParams) -> bool:
    """Whether the dispatcher moves rows between devices itself: not within stages, and by products without letters."""
    dispatcher = moe_layer.dispatcher_params(task.moe.dispatcher).cls
    return bool(task.num_experts) and dispatcher.GIVES_ROWS


def with_letters(task: InstantiableParams) -> None:
    """Gives a task whose dispatcher exchanges rows one whose products have letters, with as many slots as rows."""
    if exchanges_rows(task):
        slots = task.moe.router.cls.Choices(task.moe.router)
        task.moe.Set(dispatcher="index", capacity_factor=float(slots), min_capacity=1)


def check_groups(task: HyperParams, rows: int, length: int, length_name: str) -> None:
    """Raises TaskError if batches of `rows` rows of `length` tokens do not fall into equal groups."""
    groups = task.num_groups
    if task.num_experts and groups and rows * length % groups:
        raise TaskError(
            f"task.num_groups={groups}: a batch of input.batch_size={rows} rows of "
            f"input.{length_name}={length} does not fall into that many equal groups; choose a divisor "
            f"of {rows * length}"
        )


def units(task: HyperParams, real_BT: tf.Tensor) -> NestedMap:
    """Counts in rows where tokens are 1 and padding is 0: `tokens`, and with experts the `groups` that have a token,
    float32 scalars."""
    if not task.num_experts:
        return NestedMap(tokens=tf.reduce_sum(real_BT))
    in_groups = tf.reshape(real_BT, [task.num_groups or real_BT.shape[0], -1])
    groups = tf.reduce_sum(tf.reduce_max(in_groups, 1))
    return NestedMap(tokens=tf.reduce_sum(real_BT), groups=groups)


def shrink_experts(task: HyperParams, size: Size) -> int:
    """Sets the smallest sizes of experts that a mesh divides, and returns the number of groups; see BaseTask.Shrink."""
    groups = size("G", 1) if task.num_groups else 0
    unit, least = size("E", 1), 4
    for stack in task.cls.STACKS:
        router = dict(stack.Router(task)[1].IterParams())
        expert_groups = router.get("expert_groups", 1)
        unit = math.lcm(unit, expert_groups)
        least = max(least, router.get("k", 1) * expert_groups // router.get("groups_per_token", 1))
    task.Set(
        expert_hidden_dim=size("H", 12) if task.expert_hidden_dim else 0,
        num_experts=unit * -(-least // unit) if task.num_experts else 0,
        num_groups=groups,
    )
    return groups


def flops_of(name: str, stack: HyperParams, *shapes: Sequence[int]) -> dict[str, int]:
    """Forward operations of a stack by part, e.g. 'decoder.moe'; shapes as for TransformerLayer.FPropMeta."""
    flops_by_part: dict[str, int] = {}
    for layer, parts in TransformerStack.FlopsByLayer(stack, *shapes):
        ffn = "moe" if issubclass(layer.ffn_tpl.cls, moe_layer.MoELayer) else "ffn"
        for part, flops in parts.items():
            key = f"{name}.{ffn if part == 'ffn' else part}"
            flops_by_part[key] = flops_by_part.get(key, 0) + flops
    return flops_by_part
