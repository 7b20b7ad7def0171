"""Reasons why our figures and the paper's differ, and the difference from which the page states them."""

# Ratios from which, and differences of shares (of 1) or exponents from which, a line is printed.
RATIO = 1.25
COMPILE_RATIO = 1.3
FLAT_RATIO = 1.1
SHARE = 0.05
EXPONENT = 0.1

REASONS = {
    "faster": (
        "Our times are estimates without any waiting: each operation runs at its roofline "
        "or at the compiler's own count of cycles, the network behaves like its model, and input, host, "
        "stragglers and checkpoints cost nothing. The compiler is also newer than the paper's."
    ),
    "slower": (
        "Our estimate overlaps no communication with arithmetic, and takes for each operation the slower "
        "of roofline and the compiler's count. The paper states neither the length of its rows nor whether "
        "its tokens a batch are target tokens only, as we count them, with the same number of source tokens: "
        "if it counts both, its step does half the work of ours. The paper's rows also disagree with each "
        "other: by them a core with 128 experts processes 2.6 times the tokens a second of one with 512, "
        "at the same arithmetic a token; larger groups of tokens save only part of a step's cost."
    ),
    "dense": (
        "The paper trained it with GPipe, a pipeline whose stages wait for each other; ours is sharded along "
        "rows and inside layers, and estimated. Its groups of devices that sum gradients interleave and "
        "share links; the interconnect model ignores this, because it assumes separate boxes for groups."
    ),
    "compile_time": (
        "The program is the same except for its shapes; the growth is inside the compiler, which lays out "
        "larger tensors and handles a longer list of devices."
    ),
    "memory": (
        "A core always holds one expert, but other buffers grow with the number of experts: "
        "the router's weights and logits, M x E and S x E, and, with 2048 experts, more slots than the "
        "paper's formula gives: the capacity C has a minimum of 4."
    ),
    "rematerialized": (
        "Here every block is recomputed in the backward pass at every depth, so the kept activations grow "
        "with the number of blocks; the paper's compiler began to recompute only when memory ran out."
    ),
    "roofline": (
        "The paper's share is of a measured time, which includes everything that a roofline ignores; ours is "
        "of an estimated time, which ignores most of it too."
    ),
    "dispatch": (
        "The paper measured dispatch and combine, and gives them as its share of communication by AllToAll. "
        "Ours comes from the interconnect model, whose links carry nothing else and lose nothing."
    ),
    "step_ratio": (
        "Ours is estimated for equal tokens a core. With 2048 experts the capacity's minimum of 4 "
        "gives each expert more slots to compute and to send than the paper's formula, and the masks "
        "of gating and dispatch cost the memory traffic of the compiler's code for them."
    ),
    "exponent": (
        "The model counts links and hops. A small slice has no wrapped torus, and latency matters more for "
        "small messages than for large ones, which bends the line that the exponent is fitted to."
    ),
    "parameters": (
        "The paper's other figures are a third and quarters of its 600 billion, so it rounded and divided; "
        "ours count every weight of the experts, of attention, of the dense layers, of the routers and "
        "of both vocabularies."
    ),
}

CAPACITY = (
    "as a group's capacity for an expert is at least 4 slots, and the paper's formula would give fewer "
    "if a group has as many experts as tokens."
)


def times_apart(ratio: float) -> float:
    """The factor between two numbers whose ratio is `ratio`: the larger divided by the smaller, at least 1."""
    return max(ratio, 1 / ratio)


def line(key: str, what: str) -> str:
    """A line of the page: how it differs, and the reason."""
    return f"> **Differs:** {what} {REASONS[key]}"
