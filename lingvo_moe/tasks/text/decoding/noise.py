"""Noise in the words of translations, for back-translation (Edunov et al. 2018, after Lample et al. 2018)."""

import random
from dataclasses import dataclass

BLANK = "<blank>"


@dataclass(frozen=True)
class Noise:
    """Words, which blanks separate, that are left out, replaced by BLANK and shuffled.

    Attributes:
        drop, blank: the probability of either, for each word.
        shuffle: how many places a word moves at most.
        seed: what is drawn depends on it and on the text alone.
    """

    drop: float
    blank: float
    shuffle: int
    seed: int = 0

    def __call__(self, text: str) -> str:
        """The text with noise; at least a word of it stays, of a text that has one."""
        draw = random.Random(f"{self.seed}\n{text}")
        words = text.split()
        left = [word for word in words if draw.random() >= self.drop] or words[:1]
        left = [BLANK if draw.random() < self.blank else word for word in left]
        # Sorted by places that are up to `shuffle` + 1 apart, no word passes more than `shuffle` others.
        places = [i + draw.uniform(0, self.shuffle + 1) for i in range(len(left))]
        return " ".join(word for _, word in sorted(zip(places, left), key=lambda pair: pair[0]))


def read_noise(text: str) -> tuple[float, float, int]:
    """Reads 'DROP,BLANK,SHUFFLE': the fields of Noise without the seed. Raises ValueError: it is none."""
    try:
        drop, blank, shuffle = text.split(",")
        numbers = float(drop), float(blank), int(shuffle)
    except ValueError:
        raise ValueError(
            "must be DROP,BLANK,SHUFFLE, e.g. 0.1,0.1,3: two probabilities and a whole number"
        ) from None
    for name, number, most in zip(("DROP", "BLANK", "SHUFFLE"), numbers, (1, 1, 1000)):
        if not 0 <= number <= most:
            raise ValueError(f"{name} must be in [0, {most}], not {number:g}")
    return numbers
