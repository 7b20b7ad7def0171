"""The contenders of benchmarks/decode.py: ours, each the dense model but for what its row says, and the peers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One of our own contenders.

    Attributes:
        name: in the table.
        overrides: of the experiment's Params, as --model_params_override takes them.
        full: it keeps no caches but runs the decoder over the whole prefix at each step, greedily.
        shortlist: each line is scored for its own tokens, as a random shortlist has them.
        weights: as tools.export takes them.
    """

    name: str
    overrides: str = ""
    full: bool = False
    shortlist: bool = False
    weights: str = "float32"


OURS = {
    "here": Kind("here"),
    "here_int8": Kind("here, int8", weights="int8"),
    "here_moe": Kind("here, experts (E=8, top-2)", "task.num_experts=8"),
    "here_mq": Kind("here, multi-query attention", "task.num_kv_heads=1"),
    "here_shortlist": Kind("here, random shortlist", shortlist=True),
    "here_full": Kind("here, without caches (greedy only)", full=True),
}
PEERS = {
    "ct2": "CTranslate2",
    "ct2_int8": "CTranslate2, int8",
    "hf": "Hugging Face",
    "hf_nllb_moe": "Hugging Face NLLB-MoE (E=8)",
}
NAMES = {**{kind: one.name for kind, one in OURS.items()}, **PEERS}
