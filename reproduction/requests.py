"""Names the plans that the page on reproduction uses, and the plans of each figure.

A name is also that of the recorded plan, docs/plans/<name>.json. A plan that several figures show is
made once.
"""

from dataclasses import dataclass

CORES = {128: "v3:8x8", 512: "v3:16x16", 2048: "v3:32x32"}  # by experts, one on each core
LAYERS = (12, 36, 60)
GENERATIONS = ("v4", "v5p")
CARDS = ("h100", "a100")
BF16 = 'task.fprop_dtype="bfloat16"'
# Rows of 128 tokens on a core that make the 2048 tokens of weak scaling.
ROWS_A_CORE = 16
DENSE = "T96L"


@dataclass(frozen=True)
class Wanted:
    """A plan to make: as step_plan.Request. A topology that is a generation or a card alone, e.g. 'v5p' or
    'h100', asks for the smallest machine of that kind that the model fits."""

    model: str
    topology: str
    override: str = ""
    what: str = "train"
    mesh: str = ""


def moe(experts: int, layers: int) -> str:
    """The experiment's name in params/mt/m4.py, without its 'mt.'."""
    return f"M4MoE{experts}E{layers}L"


def _weak_rows(experts: int) -> str:
    """The override that gives each core 2048 tokens; 512 and 2048 experts have them already."""
    return f"input.batch_size={ROWS_A_CORE * experts}" if experts == 128 else ""


def weak(experts: int, layers: int, bf16: bool = False) -> str:
    """The name of the plan with an expert and 2048 target tokens on each v3 core."""
    name = f"{moe(experts, layers)}-{_file(CORES[experts])}"
    return name + ("-2048_a_core" if _weak_rows(experts) else "") + ("-bf16" if bf16 else "")


def real(experts: int, layers: int) -> str:
    """The name of the plan with the paper's own batch."""
    return f"{moe(experts, layers)}-{_file(CORES[experts])}"


def today(generation: str) -> str:
    """The name of the plan of BIG for the smallest slice of a generation."""
    return f"{BIG}-{generation}"


def on_gpus(model: str, card: str, bf16: bool = False) -> str:
    """The name of the plan for the smallest cluster of a card."""
    return f"{model}-{card}" + ("-bf16" if bf16 else "")


def _file(topology: str) -> str:
    return topology.replace(":", "_")


BIG = moe(2048, 36)
DENSE_NAME = f"{DENSE}-{_file(CORES[2048])}"
PIPELINED = "T96LPipe8"
PIPELINED_NAME = f"{PIPELINED}-{_file(CORES[2048])}"
# No figure shows it: 9 blocks in 2 stages, for docs/pipelines.md.
UNEQUAL = f"{BIG}Pipe2"
UNEQUAL_NAME = f"{UNEQUAL}-{_file(CORES[2048])}"
# No figure shows it: a trillion float32 parameters without copies, for docs/state.md.
SHARDED = f"{moe(2048, 60)}Sharded"
SHARDED_NAME = f"{SHARDED}-{_file(CORES[2048])}"
# No figure shows it: a hundred billion parameters on one host, for docs/state.md.
ONE_HOST, HOST = "M4MoE200E60LOneHost", "v6e:2x4"
HOST_NAME = f"{ONE_HOST}-{_file(HOST)}"
DECODE = f"{real(2048, 36)}-decode"
GPU_MODELS = (*(moe(experts, 36) for experts in sorted(CORES, reverse=True)), DENSE)
# The paper's model of 600 billion parameters on 256 GPUs, which need not be the fewest that hold it.
CLUSTER = "h100:32x8"
ON_CLUSTER = f"{BIG}-{_file(CLUSTER)}"

# Figure 2: as many experts, groups and times 2048 tokens as devices, in 36 layers.
COMPILED = {
    8: "M4MoE2048E36L-v3_2x2-8E",
    32: "M4MoE2048E36L-v3_4x4-32E",
    **{experts: weak(experts, 36) for experts in CORES},
}


_MANY_FIRST = sorted(CORES, reverse=True)


def _paper_s(experts: int, layers: int, *overrides: str, what: str = "train") -> Wanted:
    """A model on the paper's cores."""
    override = ";".join(filter(None, overrides))
    return Wanted(f"mt.{moe(experts, layers)}", CORES[experts], override, what)


def _few_devices(devices: int, topology: str) -> Wanted:
    sizes = f"task.num_experts={devices};task.num_groups={devices}"
    rows = f"input.batch_size={ROWS_A_CORE * devices}"
    return Wanted(f"mt.{BIG}", topology, f"{sizes};{rows}")


REQUESTS: dict[str, Wanted] = {
    **{real(e, n): _paper_s(e, n) for e in _MANY_FIRST for n in (12, 36)},
    **{weak(e, n): _paper_s(e, n, _weak_rows(e)) for e in _MANY_FIRST for n in LAYERS},
    **{weak(e, 60, bf16=True): _paper_s(e, 60, _weak_rows(e), BF16) for e in _MANY_FIRST},
    DENSE_NAME: Wanted(f"mt.{DENSE}", CORES[2048]),
    PIPELINED_NAME: Wanted(f"mt.{PIPELINED}", CORES[2048]),
    UNEQUAL_NAME: Wanted(f"mt.{UNEQUAL}", CORES[2048]),
    SHARDED_NAME: Wanted(f"mt.{SHARDED}", CORES[2048]),
    HOST_NAME: Wanted(f"mt.{ONE_HOST}", HOST),
    COMPILED[8]: _few_devices(8, "v3:2x2"),
    COMPILED[32]: _few_devices(32, "v3:4x4"),
    DECODE: _paper_s(2048, 36, what="decode"),
    **{today(g): Wanted(f"mt.{BIG}", g, BF16) for g in GENERATIONS},
    ON_CLUSTER: Wanted(f"mt.{BIG}", CLUSTER),
    **{
        on_gpus(m, card, bf16): Wanted(f"mt.{m}", card, BF16 * bf16)
        for card in CARDS
        for m in GPU_MODELS
        for bf16 in (False, True)
    },
}

TABLE3 = {
    **{(experts, layers): real(experts, layers) for experts in CORES for layers in (12, 36)},
    (2048, 60): weak(2048, 60),
}
# What each group of figures reads. Table 1 counts the parameters of table 3's plans.
GROUPS: dict[str, tuple[str, ...]] = {
    "table3": (*TABLE3.values(), weak(2048, 60, bf16=True), DENSE_NAME, PIPELINED_NAME),
    "figure2": tuple(COMPILED.values()),
    "figure7": tuple(
        weak(experts, layers, bf16)
        for experts in CORES
        for layers in LAYERS
        for bf16 in (False, True)
        if layers == 60 or not bf16
    ),
    "figure8": tuple(weak(experts, 36) for experts in CORES),
    "decode": (DECODE,),
    **{g: (today(g),) for g in GENERATIONS},
    "stages": (UNEQUAL_NAME,),
    "state": (SHARDED_NAME, HOST_NAME),
    "cluster": (ON_CLUSTER,),
    **{c: tuple(on_gpus(m, c, bf16) for m in GPU_MODELS for bf16 in (False, True)) for c in CARDS},
}
