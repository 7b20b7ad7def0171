"""The values that the options of a search may have, for the search and for the command lines that set them.

Free of TensorFlow, so that a command refuses a flag before it loads anything.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from lingvo_moe.core.config import checks

# A beam of 1000 takes seconds a line with the smallest of models; masks grow with its square.
BEAM_SIZE = checks.Integer(1, 1000)
# Tokens of a line or a translation: so many bytes, 64 for each piece, are still an int32.
LENGTH = checks.Integer(1, 1_000_000)
# Usual are 0 to 1; with 10 the norm of long lines is still a float32.
LENGTH_ALPHA = checks.Number(0, 10)
_WORD = checks.Integer(-(2**31), 2**31 - 1)
_MOST_STOPS = 16


class _Stops(checks.Check):
    """A few strings that end a text."""

    def Allows(self, value: Any) -> bool:
        is_list = isinstance(value, tuple | list) and len(value) <= _MOST_STOPS
        return is_list and all(isinstance(text, str) and text for text in value)

    def __str__(self) -> str:
        return f"up to {_MOST_STOPS} strings, none of them empty"


@dataclass(frozen=True)
class Sampling:
    """The way to continue a prompt.

    Attributes:
        max_tokens: new tokens at most.
        temperature: what logits are divided by; 0: the most likely token, always.
        top_k: the most likely tokens of which one is drawn; 0: all.
        top_p: of these the fewest that have this probability together.
        min_p: only tokens with at least this share of the likeliest one's probability are drawn; 0: all.
        repetition_penalty: divides the positive logits of tokens that the prompt or the text has, and multiplies the
            negative ones (Keskar et al. 2019); 1: nothing.
        stop: the text ends before the first of these strings.
        logprobs: whether the log-probability of each token is wanted: by the model alone, before any of the above.
        seed, number: what is drawn depends on these alone, and on the token's place.
    """

    RANGES: ClassVar = {
        "max_tokens": LENGTH,
        "temperature": checks.NOT_NEGATIVE,
        "top_k": checks.COUNT,
        "top_p": checks.Number(1e-6, 1),
        "min_p": checks.Number(0, 1),
        "repetition_penalty": checks.Number(1e-2, 1e2),
        "stop": _Stops(),
        "logprobs": checks.FLAG,
        "seed": _WORD,
        "number": _WORD,
    }

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    number: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        checks.check_fields(self, self.RANGES)

    def NotOfABeam(self) -> list[str]:
        """The names of the settings that say something, and that a beam search does not have."""
        names = ("temperature", "min_p", "repetition_penalty", "stop", "logprobs")
        return [name for name in names if getattr(self, name) != getattr(type(self), name)]

    def Values(self) -> list:
        """The values of the settings of a step, in order; seed and number form one pair."""
        first = (self.max_tokens, self.temperature, self.top_k, self.top_p)
        return [*first, self.min_p, self.repetition_penalty, (self.seed, self.number)]
