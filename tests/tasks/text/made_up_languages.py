"""A small parallel corpus in made-up languages."""

import gzip
import random
from pathlib import Path

_SYLLABLES = [c + v for c in "bdfgklmnprstvw" for v in ("a", "e", "i", "o", "u", "ee", "an")]


def _words(n: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(n)]


WORDS = _words(400)
SIZES = {"aa": 300, "bb": 60, "cc": 7}


def _translate(word: str, lang: str) -> str:
    """A language of its own: the word backwards between the letters of the language's name."""
    return lang[0] + word[::-1] + lang[1]


def write_corpus(directory: Path, sizes: dict[str, int]) -> Path:
    """Writes `<lang>.tsv.gz` files of random sentences, and `dev/`."""
    (directory / "dev").mkdir(parents=True)
    for lang, size in sizes.items():
        rng = random.Random(lang)
        for path, lines in ((directory, size), (directory / "dev", 5)):
            rows = []
            for _ in range(lines):
                english = [rng.choice(WORDS) for _ in range(rng.randint(1, 8))]
                source = " ".join(_translate(word, lang) for word in english)
                rows.append(f"{source}\t{' '.join(english)}\ttest\n")
            with gzip.open(path / f"{lang}.tsv.gz", "wt", encoding="utf-8") as file:
                file.writelines(rows)
    return directory
