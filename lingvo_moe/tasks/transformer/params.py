"""The parameters of Transformer tasks: sizes, attention, layers with experts, and training.

Letters: H hidden, N heads, A heads of keys and values, K key, M model, L layers.
"""

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.class_names import ClassesByName
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.kernels.blockwise import BLOCK, FROM_LENGTH
from lingvo_moe.core.layers import embedding, kept, normalization, positions, softmax
from lingvo_moe.core.layers.attention import AUTO, MultiHeadAttention
from lingvo_moe.core.layers.feed_forward import ACTIVATIONS
from lingvo_moe.core.layers.normalization import NORMS
from lingvo_moe.core.layers.transformer_layer import NORM_PLACES, NORM_PLACES_HELP
from lingvo_moe.core.pipeline import params as pipeline
from lingvo_moe.tasks.transformer import experts

_LAYERS = "lingvo_moe.core.layers"
ATTENTIONS = ClassesByName(
    {
        "multi_head": f"{_LAYERS}.attention.MultiHeadAttention",
        "extended": f"{_LAYERS}.extended_attention.ExtendedAttention",
        "latent": f"{_LAYERS}.latent_attention.LatentAttention",
    }
)
# The values of attention_block beside numbers.
BLOCK_WORDS = (AUTO, "full")


def define_parameters(
    p: InstantiableParams, num_experts: int, num_groups: int, moe_every: int
) -> None:
    """Adds to a task's Params those of its Transformer, with these defaults of its experts."""
    _define_sizes(p)
    _define_attention(p)
    experts.define_experts(p, num_experts, num_groups)
    p.Define(
        "moe_every",
        moe_every,
        "With experts: every n-th layer has them, the last of each n; the others are dense.",
        checks.SIZE,
    )
    p.Define(
        "dense_first_layers",
        0,
        "With experts: how many layers of each stack, before those that `moe_every` counts, are dense.",
        checks.COUNT,
    )
    p.OnlyWith("moe_every dense_first_layers", experts.without_experts)
    _define_training(p)
    p.Derive("optimizer.learning_rate.model_dim", "model_dim")
    p.Derive("norm.model_dim", "model_dim")
    p.Derive("position.model_dim", "model_dim")


def _define_sizes(p: InstantiableParams) -> None:
    """The sizes of layers, their activation and normalization."""
    p.Define("model_dim", 1024, "M.", checks.SIZE)
    p.Define("hidden_dim", 8192, "H, of feed-forward layers.", checks.SIZE)
    p.Define("num_heads", 16, "N, attention heads.", checks.SIZE)
    p.Define(
        "num_kv_heads",
        0,
        "A, heads of keys and values, each for num_heads / A heads; 1: multi-query attention; 0: num_heads.",
        checks.COUNT,
    )
    p.Define("key_dim", 128, "K, per head.", checks.COUNT)
    p.Define(
        "activation",
        "relu",
        "The function inside feed-forward layers and experts, e.g. swiglu: see layers/feed_forward.py.",
        checks.one_of(ACTIVATIONS),
    )
    p.Define(
        "position",
        positions.PositionalEmbedding.Params(),
        "Positions of tokens, added to their embeddings, given to queries and keys of self-attention, or added to its "
        "scores.",
        choices=positions.POSITIONS,
    )
    p.Define("norm", normalization.LayerNorm.Params(), "Normalizations.", choices=NORMS)
    p.Define("norm_place", "before", NORM_PLACES_HELP, checks.one_of(NORM_PLACES))
    p.Define(
        "use_bias",
        False,
        "Whether all projections of attention, feed-forward layers and experts have biases. False: those whose own "
        "parameters say so.",
    )
    p.Define("embedding_scale", None, embedding.SCALE_HELP, checks.or_none(checks.POSITIVE))
    p.Define("softmax_scale", 1.0, softmax.SCALE_HELP, checks.POSITIVE)
    p.Define(
        "tied_softmax",
        True,
        "Whether the softmax uses the table of embeddings of the tokens that it predicts. False: it has a table of its "
        "own.",
    )
    p.Define(
        "multi_token_weight",
        0.0,
        "The weight in the loss of a head for the token after the next (multi_token.py); 0: there is none.",
        checks.NOT_NEGATIVE,
    )


def _define_attention(p: InstantiableParams) -> None:
    """The kinds of self-attention; sizes, positions and dropout are set from above."""
    p.Define(
        "attention",
        MultiHeadAttention.Params(),
        "Self-attention of the layers, of all stacks.",
        choices=ATTENTIONS,
    )
    p.Define(
        "attention_block",
        "auto",
        "Tokens of a block of a decoder's self-attention, whose memory then grows with the length of rows and not with "
        f"its square (kernels/blockwise.py). full: no blocks. auto: in rows of at least {FROM_LENGTH} tokens, unless "
        "there is attention_dropout, which blocks do not have; by the fused kernel of TPUs from v4 on "
        f"(kernels/pallas/attention.py), elsewhere in blocks of {BLOCK}.",
        checks.SizeOr(BLOCK_WORDS),
    )
    p.Define(
        "nth_attention",
        None,
        "Self-attention of every nth_attention_every-th layer, after the dense first ones; None: as of the others.",
        choices=ATTENTIONS,
    )
    p.Define("nth_attention_every", 2, "n of nth_attention.", checks.SIZE)
    p.OnlyWith(
        "nth_attention_every", lambda p: "nth_attention=None" if p.nth_attention is None else ""
    )
    sources = {
        "model_dim": "model_dim",
        "num_heads": "num_heads",
        "num_kv_heads": "num_kv_heads",
        "dim_per_head": "key_dim",
        "position": "position",
        "block": "attention_block",
        "atten_dropout_prob": "attention_dropout",
        "norm_epsilon": "norm.epsilon",
    }
    for name, source in sources.items():
        p.Derive(f"attention.{name}", source)
        p.Derive(f"nth_attention.{name}", source)


def _define_training(p: InstantiableParams) -> None:
    """Regularisation, pipeline, and whether blocks are recomputed."""
    p.Define(
        "adapter_rank",
        0,
        "r of low-rank adapters (core/task/adapters.py): weights stay as they are, and products of matrices of r "
        "columns and rows, which are added to some, are trained; 0: all weights are trained.",
        checks.COUNT,
    )
    p.Define("adapter_alpha", 16.0, "The products are multiplied by alpha / r.", checks.POSITIVE)
    p.Define(
        "adapter_weights",
        r"self_atten\.[qkvo]$",
        "A regular expression, which the paths of the weights have to which products are added, e.g. ffn.experts.",
        checks.TEXT,
    )
    p.OnlyWith(
        "adapter_alpha adapter_weights", lambda p: "" if p.adapter_rank else "adapter_rank=0"
    )
    p.Define(
        "dropout", 0.1, "Rate on embeddings, residual branches and hidden layers.", checks.SHARE
    )
    p.Define("attention_dropout", 0.0, "Rate on attention probabilities.", checks.SHARE)
    p.Define("label_smoothing", 0.1, "Probability spread evenly over the vocabulary.", checks.SHARE)
    p.Define(
        "pipeline",
        pipeline.pipeline_params(),
        "Stages of layers one after the other on devices.",
    )
    p.Define(
        "repeat",
        True,
        "True: a loop scans blocks of layers over their stacked weights, and the backward pass recomputes each "
        "block. That takes less memory, and the size of the program does not grow with depth. False: blocks are "
        "unrolled and nothing is recomputed, which is faster. auto: False if the step fits into memory that way, "
        "else True; the trainer prints which. Weights and checkpoints are the same in both forms.",
        checks.FlagOr("auto"),
    )
    p.Define(
        "remat",
        kept.FULL,
        "What the loop over blocks computes again in the backward pass. full: all but the input of each block. dots: "
        "all but products with weights, which are kept. Or a list of the names of what is kept: those that the "
        "model's layers declare in KEEPS.",
        checks.NamesOr(
            (kept.FULL, kept.DOTS), (), {"none": "task.repeat=False keeps every activation"}
        ),
    )
