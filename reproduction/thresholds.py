"""Differences between our figures and the paper's from which the page states a reason."""

# Ratios from which, and differences of shares (of 1) or exponents from which, a line is printed.
RATIO = 1.25
COMPILE_RATIO = 1.3
FLAT_RATIO = 1.1
SHARE = 0.05
EXPONENT = 0.1


def times_apart(ratio: float) -> float:
    """The factor between two numbers whose ratio is `ratio`: the larger divided by the smaller, at least 1."""
    return max(ratio, 1 / ratio)
