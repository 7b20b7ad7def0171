"""Why ours and the paper's differ, in plain words, and from what difference on the page says so."""

# Ratios from which, and differences of shares (of 1) or exponents from which, a line is printed.
RATIO = 1.25
COMPILE_RATIO = 1.3
FLAT_RATIO = 1.1
SHARE = 0.05
EXPONENT = 0.1

REASONS = {
    "faster": (
        "Our times are estimates of a step in which nothing waits: each operation runs at its roofline "
        "or at the compiler's own count of cycles, the network does as its model says, and input, host, "
        "stragglers and checkpoints cost nothing. The compiler is also a later one than the paper's."
    ),
    "slower": (
        "Our estimate overlaps no communication with arithmetic, and takes for each operation the slower "
        "of roofline and the compiler's count. The paper does not say how long its rows are, nor whether "
        "its tokens a batch are the target's alone, as we count them, with as many source tokens beside: "
        "if it counts both, its step does half of what ours does. Nor do the paper's rows agree among "
        "themselves: by them a core with 128 experts takes 2.6 times the tokens a second of one with 512, "
        "at the same arithmetic a token; larger groups of tokens save only some of what a step costs."
    ),
    "dense": (
        "The paper trained it with GPipe, a pipeline whose stages wait for each other; ours is cut along "
        "rows and inside layers, and estimated. Its groups of devices that sum gradients interleave and "
        "share links, which the model of the network, with groups in boxes of their own, leaves out."
    ),
    "compile_time": (
        "The program is the same but for its shapes; what grows is inside the compiler, which lays out "
        "larger tensors and a longer list of devices."
    ),
    "memory": (
        "Besides the experts, of which a core has one in any case, a core holds what grows with their "
        "number: the router's weights and logits, M x E and S x E, and, with 2048 experts, slots that the "
        "paper's formula would not give: the capacity C does not go below a minimum of 4."
    ),
    "rematerialized": (
        "Here every block is recomputed in the backward pass at every depth, so that what is kept grows "
        "with the number of blocks; the paper's compiler began to recompute only where memory ran out."
    ),
    "roofline": (
        "The paper's share is of a measured time, with all that a roofline leaves out; ours is of an "
        "estimated one, which leaves most of it out too."
    ),
    "dispatch": (
        "The paper names dispatch and combine as its share of communication by AllToAll, and measured it. "
        "Ours is what the model of the network says, for links that carry nothing else and lose nothing."
    ),
    "step_ratio": (
        "Ours compares equal tokens a core, and estimates. With 2048 experts the capacity's minimum of 4 "
        "gives each expert more slots to compute and to send than the paper's formula does, and the masks "
        "of gating and dispatch cost what the compiler's code for them moves through memory."
    ),
    "exponent": (
        "The model counts links and hops. A small slice has no wrapped torus, and latency weighs more in "
        "small messages than in large ones, which bends the line that the exponent is fitted to."
    ),
    "parameters": (
        "The paper's other figures are a third and quarters of its 600 billion, so it rounded and divided; "
        "ours count every weight of the experts, of attention, of the dense layers, of the routers and "
        "of both vocabularies."
    ),
}

CAPACITY = (
    "as a group's capacity for an expert does not go below 4 slots, and the paper's formula would give fewer "
    "where experts are as many as a group's tokens."
)


def times_apart(ratio: float) -> float:
    """How many times one of two is the other, at least 1."""
    return max(ratio, 1 / ratio)


def line(key: str, what: str) -> str:
    """A line of the page: how it differs, and the reason."""
    return f"> **Differs:** {what} {REASONS[key]}"
