"""Training steps that others measured and published, and some that we measured, as requests for plans.

TFLOP/s, where a source states those of a device instead of seconds, count as it counts: see `_MaxText.Seconds`
and `_megatron_seconds`. A source is a publication with a model, a machine, a layout and a time; what it leaves open is
in `doubt`, and such rows count apart.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS

from .requests import Wanted

PREFIX = "published-"  # of the recorded plans' names
OURS = "measured here, with benchmarks.gpu.train; JAX 0.11.2, CUDA 13"
FITTED = frozenset(
    [
        "3",
        "4",
        "9",
        "11 128",
        "15 x1",
        "19 x1",
        "21 8",
        "25",
        "43",
        "44",
        "46",
        "48 8",
        "50 7.5B",
        "H3",
    ]
)
WHY = {
    "1": "its layers are not scanned: the compiler of that time decided what is recomputed, here all is",
    "11 2x256": "a longer step on two slices than on one by 15%, where two slices of half the size lose 3%",
    "21 8": "of the v6e rows it has most arithmetic beside products, where XLA's program is not theirs",
    "25": "of the v6e rows it reaches the smallest share of the peak: 42% without recomputation",
    "36": "all copies of a token cross between nodes, in half of the estimate: see above",
    "44": "the fastest program on H100s: a node alone, whose libraries choose kernels by trying them",
    "48 8": "cards of 500 W instead of 700, and another framework",
    "48 128": "as 48 8",
    "H2": "not understood; perhaps its scatters, which add tokens' gradients on a GPU and count as traffic alone",
    "50 7.5B": "a program of 2021, whose layers are not compiled as a whole; the rate is from memory",
}
RATIOS = (
    ("15 x1", "15 x4", "slices, 1 to 4"),
    ("15 x1", "15 x16", "slices, 1 to 16"),
    ("17 x1", "17 x8", "slices, 1 to 8"),
    ("17 x1", "17 x32", "slices, 1 to 32"),
    ("11 128", "11 256", "chips, 128 to 256"),
    ("11 128", "11 2x128", "slices, 1 to 2"),
    ("11 256", "11 2x256", "slices, 1 to 2"),
    ("48 8", "48 128", "GPUs, 8 to 128"),
)


@dataclass(frozen=True)
class Row:
    """A step of a published measurement."""

    number: str  # of the row, with what varies in it, e.g. '15 x4'
    what: str  # the model and what ran it
    wanted: Wanted  # the request for a plan
    seconds: float  # measured, or by the source's own count of operations
    source: str  # where it was published
    doubt: str = ""  # what the source leaves open; '' if nothing

    @property
    def fitted(self) -> bool:
        """Whether a number of the model of time was fitted to it."""
        return self.number in FITTED

    @property
    def ours(self) -> bool:
        """Whether the measured program is the very one that is planned."""
        return self.source == OURS

    @property
    def why(self) -> str:
        """The reason why its estimate is far off; '' if it is not, or if that is not known."""
        return WHY.get(self.number, "")

    @property
    def name(self) -> str:
        """The name of its recorded plan."""
        return PREFIX + self.number.replace(" ", "_")

    @property
    def kind(self) -> str:
        """The TPU generation or the card."""
        return self.wanted.topology.partition(":")[0]

    @property
    def device(self) -> str:
        """'tpu' or 'gpu'."""
        return "gpu" if self.kind in CARDS else "tpu"


def _override(**values: object) -> list[str]:
    """Overrides of the task by its parameters' names."""
    return [f"task.{name}={_text(value)}" for name, value in values.items()]


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _rows(batch: int, length: int) -> list[str]:
    return [f"input.batch_size={batch}", f"input.target_length={length}"]


def _vocabulary(size: int) -> list[str]:
    return [*_override(vocab_size=size), f"input.target_vocab_size={size}"]


# Attention was written out by these programs, as full probabilities.
_WRITTEN_OUT = _override(attention_block='"full"')
_PLAIN = "lm.GPipe13L"  # sinusoidal positions, layer normalization; each row sets its sizes
_LLAMA = "lm.Llama31_8B"  # rotary positions, RMS normalization
_OWN_ROWS = "train.num_micro_batches=1"  # the experiment's own 32 are of another batch


# --- Lingvo on TPU v3


def _lingvo() -> Iterator[Row]:
    """Sharded in two dimensions, by the partitioner that is used here: x shards rows and weights, y the model."""
    letters = dict.fromkeys("NHV", "y")
    split = _override(
        weight_split={"M": "x", **letters}, activation_split={"B": "x", "M": "y", **letters}
    )
    wide = {"model_dim": 8192, "hidden_dim": 65536, "num_heads": 128, "activation": "geglu"}
    wider = {"model_dim": 12288, "hidden_dim": 49152, "num_heads": 96, "activation": "gelu"}
    for number, name, topology, mesh, batch, length, sizes, layers, speed in (
        ("1", "DenseLm128B8x8", "v3:8x8", "x:8,y:16", 16, 1024, wide, 64, 3.7e3),
        ("3", "DenseLm128B32x32", "v3:32x32", "x:32,y:64", 512, 1024, wide, 64, 62e3),
        ("4", "DenseLm175B32x32", "v3:32x32", "x:64,y:32", 1024, 2048, wider, 96, 51.53e3),
        ("6", "DenseLm12kWide41BAdam16x16", "v3:16x16", "x:16,y:32", 256, 2048, wider, 24, 53.8e3),
    ):
        override = [
            *_override(**sizes, key_dim=128, num_layers=layers, fprop_dtype='"bfloat16"'),
            *_override(optimizer="adam" if "Adam" in name else "adafactor", repeat=True),
            *_override(tied_softmax=True),
            _OWN_ROWS,
            *_rows(batch, length),
            *split,
            *_WRITTEN_OUT,
        ]
        yield Row(
            number,
            f"{name}, Lingvo",
            Wanted(_PLAIN, topology, ";".join(override), mesh=mesh),
            batch * length / speed,
            "lingvo/tasks/lm/params/synthetic_packed_input.py",
        )


# --- MaxText on TPU v4, v5e and v5p


@dataclass(frozen=True)
class _MaxText:
    """A dense model of MaxText's tables; heads of 128 numbers unless said."""

    model_dim: int
    num_heads: int
    hidden_dim: int
    num_layers: int
    key_dim: int = 128
    activation: str = "swiglu"

    def Override(self, batch: int, remat: str, vocabulary: int = 32000) -> list[str]:
        """The sizes, and rows of 2048 tokens."""
        sizes = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return [
            *_override(**sizes, num_kv_heads=0, repeat=True, remat=remat),
            *_vocabulary(vocabulary),
            *_rows(batch, 2048),
        ]

    def Seconds(self, rows: int, teraflops: float) -> float:
        """Seconds of a step of so many rows on a chip: 6 FLOPs a weight and token, and attention in full."""
        m, inside = self.model_dim, self.num_heads * self.key_dim
        products = 3 if "glu" in self.activation else 2
        layer = 4 * m * inside + products * m * self.hidden_dim
        tokens = 2048 * rows
        weights = 6 * (self.num_layers * layer + 32000 * m) * tokens
        return (weights + 12 * tokens * 2048 * inside * self.num_layers) / teraflops / 1e12


_16B = _MaxText(4096, 64, 28672, 32)
_22B = _MaxText(6144, 24, 24576, 48, key_dim=256, activation="relu")
_32B = _MaxText(8192, 64, 28672, 32)
_64B = _MaxText(8192, 64, 28672, 64)
_128B = _MaxText(8192, 128, 57344, 64)
_512B = _MaxText(16384, 128, 57344, 128)
_MINIMAL = "dots"  # its name for keeping products with weights


def _fsdp(slices: bool = False, tensor: bool = False) -> list[str]:
    """Weights and rows sharded along `fsdp`, rows along `data` too, and with `tensor` the model along `model`."""
    inside = dict.fromkeys("NHV" if tensor else "", "model")
    rows = {"B": ["data", "fsdp"] if slices else "fsdp"} | dict.fromkeys(
        "M" if tensor else "", "model"
    )
    return [
        *_override(weight_split={"M": "fsdp", **inside}),
        *_override(activation_split={**rows, **inside}),
        "train.shard_state=none",
    ]


def _maxtext() -> Iterator[Row]:
    """MaxText's tables have rows a chip and TFLOP/s, by slice, slices, their chips and the size of the tensor axis."""
    for number, model, size, one, slices, chips, tensor, rows, remat, flops in (
        ("9", _32B, "32B", "v5p:4x4x4", 1, 64, 4, 6, _MINIMAL, 328),
        ("11 128", _128B, "128B", "v5p:4x4x8", 1, 128, 8, 1, _MINIMAL, 315),
        ("11 256", _128B, "128B", "v5p:4x8x8", 1, 256, 8, 1, _MINIMAL, 316),
        ("11 2x128", _128B, "128B", "v5p:4x4x8", 2, 128, 8, 1, _MINIMAL, 305),
        ("11 2x256", _128B, "128B", "v5p:4x8x8", 2, 256, 8, 1, _MINIMAL, 274),
        ("13", _512B, "512B", "v5p:8x8x8", 1, 512, 8, 2, "full", 294),
        ("15 x1", _16B, "16B", "v5e:16x16", 1, 256, 1, 6, "full", 120),
        ("15 x4", _16B, "16B", "v5e:16x16", 4, 256, 1, 6, "full", 117),
        ("15 x16", _16B, "16B", "v5e:16x16", 16, 256, 1, 6, "full", 111),
        ("17 x1", _64B, "64B", "v5e:16x16", 1, 256, 1, 2, "full", 118),
        ("17 x8", _64B, "64B", "v5e:16x16", 8, 256, 1, 2, "full", 108),
        ("17 x32", _64B, "64B", "v5e:16x16", 32, 256, 1, 2, "full", 99),
        ("19 x1", _22B, "22B", "v4:4x4x4", 1, 64, 1, 13, "full", 156),
    ):
        mesh = f"data:{slices}," * (slices > 1) + f"fsdp:{chips // tensor}"
        override = model.Override(rows * chips * slices, remat) + _fsdp(slices > 1, tensor > 1)
        yield Row(
            number,
            f"MaxText's {size}",
            Wanted(
                _LLAMA,
                f"{one}*{slices}" if slices > 1 else one,
                ";".join(override),
                mesh=mesh + f",model:{tensor}" * (tensor > 1),
            ),
            model.Seconds(rows, flops),
            "maxtext, README of its configurations (e7829012d^)",
        )


# --- logged steps on TPU v6e


def _logged() -> Iterator[Row]:
    """Llama 3.1 with inputs of layers, queries, keys and values in the hosts' memory; GPT-3 with full recomputation."""
    for number, model, name, sides, rows, seconds in (
        ("21 8", _LLAMA, "Llama-3.1-8B", (2, 4), 3, 3.443),
        ("21 64", _LLAMA, "Llama-3.1-8B", (8, 8), 5, 5.652),
        ("21 256", _LLAMA, "Llama-3.1-8B", (16, 16), 4, 4.546),
        ("22 64", "lm.Llama31_70B", "Llama-3.1-70B", (8, 8), 2, 18.688),
        ("22 256", "lm.Llama31_70B", "Llama-3.1-70B", (16, 16), 5, 42.656),
    ):
        chips = sides[0] * sides[1]
        override = [
            *_override(repeat=True, remat='["query","key","value"]'),
            *_rows(rows * chips, 8192),
            "train.offload=activations",
            *_fsdp(),
        ]
        topology = f"v6e:{sides[0]}x{sides[1]}"
        wanted = Wanted(model, topology, ";".join(override), mesh=f"fsdp:{chips}")
        yield Row(number, f"{name}, MaxText", wanted, seconds, "tpu-recipes")
    gpt = _MaxText(12288, 96, 49152, 96, activation="gelu")
    override = gpt.Override(3 * 256, "full", vocabulary=50304) + _fsdp()
    wanted = Wanted(_LLAMA, "v6e:16x16", ";".join(override), mesh="fsdp:256")
    yield Row("25", "GPT-3 175B, MaxText", wanted, 17.182, "tpu-recipes")


# --- GPUs


def _megatron_seconds(d: int, layers: int, batch: int, gpus: int, teraflops: float) -> float:
    """Seconds of a step of rows of 2048 tokens, by the paper's count: with recomputation, and attention in full."""
    factor = 1 + 2048 / (6 * d) + 51200 / (16 * layers * d)
    return 96 * batch * 2048 * layers * d * d * factor / gpus / teraflops / 1e12


def _gpt(d: int, layers: int, heads: int, batch: int, vocabulary: int) -> list[str]:
    """A GPT that was trained with its attention written out, in rows of 2048 tokens."""
    return [
        *_override(model_dim=d, hidden_dim=4 * d, num_layers=layers, num_heads=heads),
        *_override(key_dim=d // heads, activation="gelu", fprop_dtype='"bfloat16"', repeat=True),
        *_override(tied_softmax=True),
        *_vocabulary(vocabulary),
        *_rows(batch, 2048),
        _OWN_ROWS,
        *_WRITTEN_OUT,
    ]


def _gpus() -> Iterator[Row]:
    """Megatron's, Pax's, MaxText's and torchtitan's."""
    inside = dict.fromkeys("NHV", "model")
    override = [
        *_gpt(4096, 36, 32, 512, 51200),
        *_override(dtype="bfloat16", activation_split={"B": "data", **inside}),
        *_override(weight_split=inside),
    ]
    yield Row(
        "50 7.5B",
        "GPT 7.5B, Megatron",
        Wanted(_PLAIN, "a100:16x8", ";".join(override), mesh="data:32,model:4"),
        _megatron_seconds(4096, 36, 512, 128, 142),
        "arXiv 2104.04473, table 1, from memory",
    )
    override = [
        *_gpt(12288, 96, 96, 1536, 50304),
        "train.shard_state=weights",
        *_override(activation_split={"B": "data"}),
    ]
    wanted = Wanted(_PLAIN, "a100:32x8", ";".join(override), mesh="data:256")
    yield Row("46", "GPT 175B, Pax", wanted, 75.1, "JAX-Toolbox (ddf1b991^)")
    llama2 = [
        *_override(hidden_dim=11008, num_kv_heads=0, repeat=True, remat=_MINIMAL),
        *_vocabulary(32000),
        *_rows(16, 4096),
        *_fsdp(),
    ]
    wanted = Wanted(_LLAMA, "h100:1x8", ";".join(llama2), mesh="fsdp:8")
    yield Row("44", "Llama-2-7B, MaxText", wanted, 0.721, "JAX-Toolbox")
    for nodes, speed in ((1, 6667), (16, 6514)):
        gpus = 8 * nodes
        override = [*_override(repeat=True, remat=_MINIMAL), *_rows(2 * gpus, 8192), *_fsdp()]
        yield Row(
            f"48 {gpus}",
            "Llama-3.1-8B, torchtitan",
            Wanted(_LLAMA, f"h100:{nodes}x8", ";".join(override), mesh=f"fsdp:{gpus}"),
            2 * 8192 / speed,
            "torchtitan's benchmarks, December 2024",
            doubt="it keeps every second product, these plans keep all",
        )
    override = [
        *_override(repeat=True, remat='["query","key","value","attention"]'),
        *_rows(512, 8192),
        *_fsdp(slices=True),
    ]
    wanted = Wanted("lm.Llama31_70B", "h200:32x8", ";".join(override), mesh="data:2,fsdp:128")
    yield Row("43", "Llama-3.1-70B, MaxText", wanted, 15.516, "gpu-recipes, a3ultra")


# --- with experts

# One-hot masks dispatch there. Its factor of 1.25 is of the choices, two a token, and ours of the tokens.
_MASKED = _override(**{"moe.dispatcher": "einsum", "moe.capacity_factor": 2.5})
# In rows of 8192 tokens its chunks of 8192 are whole rows: layers differ in nothing that takes time.
_ALIKE = _override(nth_attention=None)
# Loads were forced to be equal there: devices send each other equally many rows.
_DROPLESS = "lingvo_moe.core.moe.dispatch_dropless/DroplessDispatcher"
# It recomputes no product and sends nothing again.
_NOT_AGAIN = ["query", "key", "value", "attention", "router"]
_NOT_AGAIN += ["dispatched", "experts_hidden", "returned"]


def _with_experts() -> Iterator[Row]:
    """MaxText's, which gather weights so that each chip computes all experts for its own tokens; Megatron's.

    MaxText kept inputs of layers in the hosts' memory, for Mixtral those of attention too; here all is computed again.
    """
    split = {"weight_split": {"M": "fsdp"}, "activation_split": dict.fromkeys("BG", "fsdp")}
    full = [*_override(repeat=True, remat="full", **split), "train.shard_state=none"]
    for number, model, name, one, chips, rows, length, more, seconds in (
        ("27", "Mixtral8x7B", "Mixtral 8x7B", "v6e:16x16", 256, 12, 4096, _MASKED, 13.484),
        ("30", "DeepSeekV3", "DeepSeek-V3", "v5p:8x8x8", 512, 6, 8192, [], 90.668),
        ("32", "Llama4Scout", "Llama 4 Scout", "v5p:8x8x8", 512, 8, 8192, _ALIKE, 31.652),
    ):
        override = [*full, *more, *_rows(rows * chips, length)]
        wanted = Wanted(f"lm.{model}", one, ";".join(override), mesh=f"fsdp:{chips}")
        yield Row(number, f"{name}, MaxText", wanted, seconds, "tpu-recipes")
    override = [
        *_override(repeat=True, dtype="bfloat16", remat=json.dumps(_NOT_AGAIN)),
        *_override(weight_split={"E": "expert"}, activation_split=dict.fromkeys("BGE", "expert")),
        *_override(**{"moe.dispatcher.cls": f"type/{_DROPLESS}"}),
        *_override(**{"moe.dispatcher.device_capacity_factor": 1}),
        *_rows(1024, 4096),
        "train.num_micro_batches=64",
        "train.shard_state=slots",
    ]
    wanted = Wanted("lm.Qwen3_30B_A3B", "h100:2x8", ";".join(override), mesh="expert:16")
    yield Row(
        "36",
        "Qwen3-30B-A3B, Megatron",
        wanted,
        24.714,
        "Megatron-Bridge, skills on MoE communication",
        doubt="it may send a token to a node once, these plans send all its copies",
    )


# --- measured here


def _ours() -> Iterator[Row]:
    """Models of published widths with fewer layers, on made-up tokens: the mean of 40 steps."""
    four, rows = "task.num_layers=4", ";".join(_rows(4, 4096))
    index = ";task.moe.dispatcher=index;task.moe.capacity_factor=1.25"
    gshard = [*_override(num_experts=16, num_encoder_layers=4, num_decoder_layers=4)]
    gshard += [*_override(num_groups=16, fprop_dtype='"bfloat16"'), "input.batch_size=128"]
    for number, name, model, mesh, override, seconds in (
        ("H1", "4 layers of Llama-3.1-8B", "lm.Llama31_8B", "data", f"{four};{rows}", 0.3534),
        ("H2", "4 of OLMoE, index", "lm.OLMoE1B7B", "expert", f"{four};{rows}{index}", 0.1229),
        ("H3", "4 of OLMoE, dropless", "lm.OLMoE1B7B", "expert", f"{four};{rows}", 0.9415),
        ("H4", "GShard, 16 experts", "mt.M4MoE128E12L", "expert", ";".join(gshard), 0.1104),
    ):
        mesh += ":1,model:1" if model.startswith("lm") else ":1"
        yield Row(number, name, Wanted(model, "h200:1x1", override, mesh=mesh), seconds, OURS)


ROWS: Sequence[Row] = (
    *_lingvo(),
    *_maxtext(),
    *_logged(),
    *_gpus(),
    *_with_experts(),
    *_ours(),
)

REQUESTS = {row.name: row.wanted for row in ROWS}
LEFT_OUT = (
    (
        "19 on several slices",
        "no rate of the network between slices of v4 is published",
    ),
    (
        "21 and 22 on more chips",
        "inputs of layers in the hosts' memory take the compiler very long",
    ),
    ("27, 30", "with experts: the requested programs do not fit a device: see above"),
    ("39", "with experts in stages: the dropless dispatcher cannot exchange rows within stages"),
    (
        "50 but for 7.5B",
        "XLA's GPU compiler refuses the 1.7B without a device; the others have pipelines",
    ),
    ("51", "products of 8-bit floating point, which plans count but no experiment here has"),
    ("53", "attention and feed-forward layer beside each other, which no experiment here has"),
)
