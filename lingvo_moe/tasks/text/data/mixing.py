"""Draws languages by temperature sampling, p(lang) ~ n(lang)^(1/T), the multilingual recipe of the paper.

T=1 is proportional to the data; GShard's predecessors (M4) used T=5; a large T is uniform over languages.
"""

from collections.abc import Mapping

import numpy as np

from lingvo_moe.core.config import checks
from lingvo_moe.tasks.text.data.errors import DataError


def temperature_weights(pairs: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Sampling probabilities by language, which sum to 1. Raises DataError: `temperature` is not positive."""
    if not temperature > 0:
        raise DataError(
            f"temperature={temperature} must be positive: 1 follows the data, larger evens out"
        )
    # Relative to the largest, so that no power overflows.
    largest = max(pairs.values())
    powers = {lang: (n / largest) ** (1.0 / temperature) for lang, n in pairs.items()}
    total = sum(powers.values())
    return {lang: power / total for lang, power in powers.items()}


def given_weights(pairs: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, float]:
    """Sampling probabilities by language in proportion to weights.

    Raises DataError: the weights are not positive numbers, or not one for each language.
    """
    if weights.keys() != pairs.keys():
        raise DataError(
            f"input.weights={dict(weights)}: give a weight to each of {', '.join(pairs)}"
        )
    for language, weight in weights.items():
        if wrong := checks.POSITIVE(weight):
            raise DataError(f"input.weights: {language!r}: {weight!r} {wrong}")
    total = sum(weights.values())
    return {language: weights[language] / total for language in pairs}


def quotas(pairs: Mapping[str, int], temperature: float, limit: int) -> dict[str, int]:
    """Number of pairs to draw of each language, by temperature: in all at most `limit`, but one of each at least.

    A language gives at most its own pairs; larger languages fill what small ones cannot.
    """
    out: dict[str, int] = {}
    rest = dict(pairs)
    while rest:
        left = limit - sum(out.values())
        weights = temperature_weights(rest, temperature)
        full = {lang: n for lang, n in rest.items() if n <= left * weights[lang]}
        if not full:
            return out | {lang: max(1, int(left * weights[lang])) for lang in rest}
        out |= full
        rest = {lang: n for lang, n in rest.items() if lang not in full}
    return out


def draw_languages(weights: np.ndarray, seed: int, block: int, size: int) -> np.ndarray:
    """`size` language indices, int64, a pure function of its arguments (same weights, seed and block: same draw)."""
    # A plain list would become float64 where the seed needs the 64th bit, and lose its last bits.
    rng = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, block], np.uint64)))
    edges = np.cumsum(weights)
    return np.minimum(
        np.searchsorted(edges, rng.random(size) * edges[-1], side="right"), len(weights) - 1
    )
