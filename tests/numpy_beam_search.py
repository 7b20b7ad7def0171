"""A plain beam search, the reference for the flat one: lists, whole prefixes, no early stop."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PAD, BOS, EOS = 0, 1, 2

# A prefix (without BOS) -> the logits of the next token.
Scorer = Callable[[tuple[int, ...]], np.ndarray]


@dataclass
class Hypothesis:
    tokens: tuple[int, ...]
    score: float


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float32) - logits.max()
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float32))


def beam_search(
    scorer: Scorer,
    *,
    max_length: int,
    beam_size: int,
    top_k: int,
    length_alpha: float,
    allowed: np.ndarray | None = None,
) -> list[Hypothesis]:
    """Returns at most `top_k` hypotheses that end in EOS, best first, with normalised scores."""
    live = [Hypothesis((), np.float32(0.0))]
    finished: list[Hypothesis] = []
    for length in range(1, max_length + 1):
        options = []
        for j, hypothesis in enumerate(live):
            log_probs = log_softmax(scorer(hypothesis.tokens))
            for token, log_prob in enumerate(log_probs):
                if token in (PAD, BOS) or (length == max_length and token != EOS):
                    continue
                if allowed is not None and not allowed[token] and token != EOS:
                    continue
                total = np.float32(hypothesis.score + log_prob)
                options.append((-total, j, token))
        options.sort()
        candidates = [
            Hypothesis((*live[j].tokens, token), -total)
            for total, j, token in options[: 2 * beam_size]
        ]
        norm = np.float32(((5 + length) / 6) ** length_alpha)
        finished += [
            Hypothesis(c.tokens, np.float32(c.score / norm))
            for c in candidates[:beam_size]
            if c.tokens[-1] == EOS
        ]
        finished = sorted(finished, key=lambda h: -h.score)[:beam_size]  # stable: old first
        live = [c for c in candidates if c.tokens[-1] != EOS][:beam_size]
        if len(finished) == beam_size or not live:
            break
    return finished[:top_k]
