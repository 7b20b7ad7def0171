"""Notices sources and targets that are in each other's place, by their frequent words."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

LINES = 2000  # of a file that are looked at
_KEPT = 300  # words of a side
_ENOUGH = 100  # words of a side
# Which hardly occur in other languages. They are 7% to 18% of the words of English interfaces and prose.
_ENGLISH = frozenset(("the", "of", "and", "with", "this", "that", "from", "your", "you", "not"))
_OTHERS = 50  # words of the targets of other files
# Differences of shares of words; docs/data.md says what was measured.
_MORE_ENGLISH, _MORE_OTHERS = 0.03, 0.1

Side = Mapping[str, float]  # the shares of the most frequent words


class Words:
    """Counts the words of the first lines of a file."""

    def __init__(self) -> None:
        self._left, self._counts = LINES, (Counter[str](), Counter[str]())

    def Add(self, *sides: str) -> None:
        """Adds a pair."""
        if self._left:
            self._left -= 1
            for counts, text in zip(self._counts, sides):
                counts.update(text.casefold().split())

    def Shares(self) -> list[Side]:
        """Returns those of the source and of the target; nothing of too few words."""
        if min(map(Counter.total, self._counts)) < _ENOUGH:
            return [{}, {}]
        return [
            {word: n / counts.total() for word, n in counts.most_common(_KEPT)}
            for counts in self._counts
        ]


def swapped(files: Sequence[Sequence[Side]], target_lang: str) -> list[int]:
    """Finds the files, given as Words.Shares, that have their sides in each other's place.

    Those have more of the target language's frequent words in their sources than in their targets. Those words are
    known of English; of another language they are those of the other files' targets, of two at least.
    """
    exchanged = []
    for i, (source, target) in enumerate(files):
        words: Iterable[str] = _ENGLISH
        if target_lang != "en":
            others = [other for j, (_, other) in enumerate(files) if j != i and other]
            shares = sum((Counter(other) for other in others), Counter[str]())
            words = [word for word, _ in shares.most_common(_OTHERS)] if len(others) > 1 else ()
        more = sum(source.get(word, 0) - target.get(word, 0) for word in words)
        if more > (_MORE_ENGLISH if target_lang == "en" else _MORE_OTHERS):
            exchanged.append(i)
    return exchanged
