"""The values that the options of a search may have, for the search and for the command lines that set them.

Free of TensorFlow, so that a command refuses a flag before it loads anything.
"""

from dataclasses import dataclass
from typing import ClassVar

from lingvo_moe.core.config import checks

# A beam of 1000 takes seconds a line with the smallest of models; masks grow with its square.
BEAM_SIZE = checks.Integer(1, 1000)
# Tokens of a line or a translation: so many bytes, 64 for each piece, are still an int32.
LENGTH = checks.Integer(1, 1_000_000)
# Usual are 0 to 1; with 10 the norm of long lines is still a float32.
LENGTH_ALPHA = checks.Number(0, 10)
_WORD = checks.Integer(-(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Sampling:
    """The way to continue a prompt.

    Attributes:
        max_tokens: new tokens at most.
        temperature: what logits are divided by; 0: the most likely token, always.
        top_k: the most likely tokens of which one is drawn; 0: all.
        top_p: of these the fewest that have this probability together.
        seed, number: what is drawn depends on these alone, and on the token's place.
    """

    RANGES: ClassVar = {
        "max_tokens": checks.SIZE,
        "temperature": checks.NOT_NEGATIVE,
        "top_k": checks.COUNT,
        "top_p": checks.Number(1e-6, 1),
        "seed": _WORD,
        "number": _WORD,
    }

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        checks.check_fields(self, self.RANGES)

    def Values(self) -> list:
        """The values of all settings in order; seed and number form one pair."""
        own = (self.max_tokens, self.temperature, self.top_k, self.top_p)
        return [*own, (self.seed, self.number)]
