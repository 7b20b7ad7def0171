"""The stacks of a Transformer task, as data, and the Params of their layers.

A stack is its dense first layers, if any, and then equal blocks of layers. With experts, every `moe_every`-th layer of
a block has them; every `nth_attention_every`-th one has an attention of its own kind.

Letters: B batch, T time, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params as HyperParams
from lingvo_moe.core.layers import attention, feed_forward
from lingvo_moe.core.layers.transformer import TransformerStack
from lingvo_moe.core.layers.transformer_layer import TransformerLayer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.transformer import experts
from lingvo_moe.tasks.transformer.params import BLOCK_WORDS


@dataclass(frozen=True)
class TaskStack:
    """A stack of a task, and the rows that it reads; parameters are those of the task, unless said otherwise."""

    name: str  # the name of its child, e.g. 'decoder'
    num_layers: str  # the parameter that sets its number of layers
    side: str  # 'source' or 'target': the prefix of the input's parameters about its rows
    causal: bool  # whether a token sees only itself and those before it
    row: str = ""  # the path in a batch of its rows, e.g. 'src'; '': the batch itself
    prefix: str = ""  # the prefix of its embedding, its vocab_size and its units, e.g. 'source_'
    memory: str = ""  # the name of the stack before it, whose output its cross-attention reads; '': it has none
    router: str = ""  # the parameter of its own router, where None means moe.router; '': there is no such parameter
    # A name that the seed of its embeddings is folded with, before theirs; '': there is none.
    seed: str = ""

    @property
    def embedding(self) -> str:
        """The name of the child that embeds its tokens, if no other stack's does."""
        return f"{self.prefix}embedding"

    @property
    def vocab_size(self) -> str:
        """The parameter that sets V."""
        return f"{self.prefix}vocab_size"

    def Row(self, batch: NestedMap) -> NestedMap:
        """Its rows, int32 [B,T] each: ids, segment_ids, segment_pos, and labels where they are predicted."""
        return batch.GetItem(self.row) if self.row else batch

    def Router(self, p: HyperParams) -> tuple[str, HyperParams]:
        """The parameter that its router comes from, and the router's Params."""
        own = p.Get(self.router) if self.router else None
        return ("moe.router", p.moe.router) if own is None else (self.router, own)


def sizes_of(stacks: Sequence[TaskStack]) -> dict[str, tuple[str, ...]]:
    """The parameters that set a task's numbers of layers and vocabularies: see BaseTask.SIZES."""
    first = {f"{stack.name}.first.L": ("task.dense_first_layers",) for stack in stacks}
    layers = {f"{stack.name}.L": (f"task.{stack.num_layers}",) for stack in stacks}
    return {**first, **layers, "V": tuple(f"task.{stack.vocab_size}" for stack in stacks)}


def layers_of_block(p: HyperParams) -> int:
    """The number of layers after which experts and kinds of attention repeat."""
    return math.lcm(
        p.moe_every if p.num_experts else 1,
        p.nth_attention_every if p.nth_attention is not None else 1,
    )


def layers_before(p: HyperParams) -> int:
    """The number of layers of a stack before its blocks."""
    return p.dense_first_layers if p.num_experts else 0


def stack_params(p: HyperParams, stack: TaskStack) -> InstantiableParams:
    """A stack of a task. Raises ParamError for a number of layers that is not one of whole blocks."""
    before, layers, size = layers_before(p), p.Get(stack.num_layers), layers_of_block(p)
    if layers <= before or (layers - before) % size:
        than = f", beside the {before} of task.dense_first_layers" if before else ""
        raise ParamError(
            f"task.{stack.num_layers}",
            str(layers),
            f"must be a multiple of {size}, after which task.moe_every and task.nth_attention_every begin again"
            f"{than}",
        )
    params = TransformerStack.Params().Set(
        num_blocks=(layers - before) // size,
        block=[layer_params(p, stack, number) for number in range(1, size + 1)],
        repeat=p.repeat is not False,  # also where the choice is open
        remat=p.remat,
        parts=p.pipeline.stages * p.pipeline.repeats,
        model_dim=p.model_dim,
        final_norm_tpl=p.norm.Copy(),
        has_final_norm=p.norm_place != "after",
    )
    return params.Set(first=layer_params(p, stack, 0), num_first=before) if before else params


def layer_params(p: HyperParams, stack: TaskStack, number: int) -> InstantiableParams:
    """The layer of that number, from 1, in a block of a stack; 0: one of its first layers."""
    atten = p.attention
    if number and p.nth_attention is not None and number % p.nth_attention_every == 0:
        atten = p.nth_attention
    if number and p.num_experts and number % p.moe_every == 0:
        name, router = stack.Router(p)
        ffn = experts.moe_params(p, name, router, stack.causal, p.Get(stack.vocab_size))
    else:
        ffn = feed_forward.FeedForward.Params().Set(
            hidden_dim=p.hidden_dim,
            activation=p.activation,
            relu_dropout_prob=p.dropout,
            use_bias=p.use_bias,
        )
    return TransformerLayer.Params().Set(
        self_atten_tpl=_self_attention(p, stack, atten.Copy()),
        cross_atten_tpl=_cross_attention(p) if stack.memory else None,
        ffn_tpl=ffn.Set(model_dim=p.model_dim),
        norm_tpl=p.norm.Copy(),
        norm_place=p.norm_place,
        residual_dropout_prob=p.dropout,
    )


def _self_attention(
    p: HyperParams, stack: TaskStack, atten: InstantiableParams
) -> InstantiableParams:
    """Self-attention of a kind, with the parameters that the task sets."""
    if p.num_kv_heads and "num_kv_heads" not in atten:
        why = f"has no effect with {atten.cls.__name__}, which has none; leave it 0"
        raise ParamError("task.num_kv_heads", str(p.num_kv_heads), why)
    if stack.causal and p.attention_block not in BLOCK_WORDS:
        atten.block = p.attention_block
    if "norm_epsilon" in atten:
        atten.norm_epsilon = p.norm.epsilon
    if p.position.cls.IN_ATTENTION:
        atten.position = p.position.Copy()
        if "bidirectional" in atten.position:
            atten.position.bidirectional = not stack.causal
    return _sized(p, atten)


def _cross_attention(p: HyperParams) -> InstantiableParams:
    """Cross-attention, with the biases and the scale of scores of self-attention, if its kind has them."""
    cross = attention.CrossAttention.Params()
    for name in ("biases", "score_scale"):
        if name in p.attention:
            cross.Set(**{name: p.attention.Get(name)})
    return _sized(p, cross)


def _sized(p: HyperParams, atten: InstantiableParams) -> InstantiableParams:
    """Attention with the task's sizes, dropout and biases."""
    if p.use_bias:
        if "biases" not in atten:
            why = f"{atten.cls.__name__} has no biases; choose task.attention=multi_head, or set this to False"
            raise ParamError("task.use_bias", "True", why)
        atten.biases = True
    if "num_kv_heads" in atten:
        atten.num_kv_heads = p.num_kv_heads
    return atten.Set(
        num_heads=p.num_heads, dim_per_head=p.key_dim, atten_dropout_prob=p.attention_dropout
    )
