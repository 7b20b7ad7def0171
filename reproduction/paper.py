"""The figures and statements of the GShard paper (arXiv:2006.16668) as data, each with its place in the paper.

Of figures 7 to 9 only what the text says is used; nothing is read off their axes.
"""

from dataclasses import dataclass

TITLE = "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding"
LINK = "https://arxiv.org/abs/2006.16668"


@dataclass(frozen=True)
class PaperRow:
    """A row of tables 1 and 3. None: the paper gives none."""

    label: str  # the paper's name of the model
    parameters: float  # the paper's rounded number
    cores: int  # TPU v3 cores
    steps_per_second: float | None  # measured
    batch_tokens: int  # tokens a step, in millions
    # `core_years`, `days`: of training on 1T tokens.
    core_years: float | None
    days: float | None


# Tables 1 and 3, by (experts, layers).
MOE = {
    (2048, 60): PaperRow("MoE(2048E, 60L)", 1e12, 2048, None, 4, None, None),
    (2048, 36): PaperRow("MoE(2048E, 36L)", 600e9, 2048, 0.72, 4, 22.4, 4.0),
    (2048, 12): PaperRow("MoE(2048E, 12L)", 200e9, 2048, 2.15, 4, 7.5, 1.4),
    (512, 36): PaperRow("MoE(512E, 36L)", 150e9, 512, 1.05, 1, 15.5, 11.0),
    (512, 12): PaperRow("MoE(512E, 12L)", 50e9, 512, 3.28, 1, 4.9, 3.5),
    (128, 36): PaperRow("MoE(128E, 36L)", 37e9, 128, 0.67, 1, 6.1, 17.3),
    (128, 12): PaperRow("MoE(128E, 12L)", 12.5e9, 128, 2.16, 1, 1.9, 5.4),
}
DENSE = PaperRow("T(96L)", 2.3e9, 2048, None, 4, 235.5, 42.0)


@dataclass(frozen=True)
class Claim:
    """A statement of the text."""

    says: str  # the claim in our words
    where: str  # table, figure or section
    value: float = 0.0  # its number, where it has one


MEMORY = Claim(
    "memory on a device stays about the same, O(1), as devices and experts grow", "figure 7"
)
REMATERIALIZED = Claim(
    "MoE(2048E, 60L) keeps fewer activations than MoE(2048E, 36L), since the compiler begins to "
    "recompute",
    "section 5, figure 7",
)
STEP_RATIO = Claim("16 times the experts take 1.7 times as long", "section 5, figure 8", 1.7)
ROOFLINE = {
    128: Claim("more than 70% of roofline with 128 experts", "section 5, figure 8", 0.70),
    2048: Claim("48% of roofline with 2048 experts", "section 5, figure 8", 0.48),
}
DISPATCH = {
    128: Claim("dispatch and combine take 16% with 128 experts", "section 5, figure 8", 0.16),
    2048: Claim("dispatch and combine take 36% with 2048 experts", "section 5, figure 8", 0.36),
}
# The exponents of D, the number of devices, at 8 MB and 32 MB on each.
EXPONENTS = {
    "all-reduce": Claim("O(1) in the number of devices", "section 5.2, figure 9", 0.0),
    "all-to-all": Claim("about O(√D) in the number of devices D", "section 5.2, figure 9", 0.5),
}
FIGURE9_BYTES = (8_000_000, 32_000_000)
