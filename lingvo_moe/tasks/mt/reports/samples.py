"""Chooses sample translations from the output of tools.evaluate: the best, the worst and random ones."""

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sacrebleu.metrics import CHRF

# Scoring every line of a large evaluation would take minutes.
_MOST_LINES = 2000
_FEWEST_WORDS = 3
Line = tuple[str, str, str]


@dataclass(frozen=True)
class Sample:
    """A line, its reference and its translation; chrf is the score of this line, 0 to 100."""

    language: str
    source: str
    reference: str
    translation: str
    chrf: float


def read_texts(directory: str | os.PathLike, languages: Iterable[str]) -> dict[str, list[Line]]:
    """(source, reference, translation) of every line by language, as EvalReport.Write left them.

    Raises ValueError: a file is missing, or has not as many lines as its neighbours; all of them are named.
    """
    out = {}
    for lang in languages:
        sides = []
        for suffix in ("src", "ref", "hyp"):
            file = Path(directory) / f"{lang}.{suffix}"
            if not file.is_file():
                raise ValueError(f"{file} is missing")
            sides.append(file.read_bytes().decode("utf-8", "replace").split("\n")[:-1])
        if len({len(side) for side in sides}) > 1:
            names = f"{lang}.src, {lang}.ref and {lang}.hyp"
            raise ValueError(f"{directory}: {names} have not the same lines")
        out[lang] = list(zip(*sides, strict=True))
    return out


def choose(
    texts: Mapping[str, Sequence[Line]], number: int = 4, seed: int = 0
) -> dict[str, list[Sample]]:
    """'best' and 'worst' by chrF, of equals the longer ones, and 'random', `number` of each; at most one of a language
    and of a reference in each.

    Lines that say little are left out where there are others: references of one or two words, and those that are
    their source. The same for the same texts, number and seed.
    """
    lines = [(lang, *line) for lang in sorted(texts) for line in texts[lang]]
    telling = [
        line for line in lines if len(line[2].split()) >= _FEWEST_WORDS and line[1] != line[2]
    ]
    rng = random.Random(seed)
    drawn = rng.sample(telling or lines, min(len(telling or lines), _MOST_LINES))
    chrf = CHRF()
    samples = [
        Sample(lang, source, reference, hyp, chrf.sentence_score(hyp, [reference]).score)
        for lang, source, reference, hyp in drawn
    ]
    return {
        "best": _varied(sorted(samples, key=lambda s: (-s.chrf, -len(s.reference))), number),
        "worst": _varied(sorted(samples, key=lambda s: (s.chrf, -len(s.reference))), number),
        "random": _varied(samples, number),
    }


def _varied(samples: Iterable[Sample], number: int) -> list[Sample]:
    chosen: list[Sample] = []
    for sample in samples:
        if all(s.language != sample.language and s.reference != sample.reference for s in chosen):
            chosen.append(sample)
        if len(chosen) == number:
            break
    return chosen
