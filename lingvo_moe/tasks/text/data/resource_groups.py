"""Groups of languages by how much training data they have."""

from collections.abc import Mapping

GROUPS = ("high", "mid", "low")


def resource_groups(
    train_pairs: Mapping[str, int], bounds: tuple[int, int] | None = None
) -> dict[str, str]:
    """'high', 'mid' or 'low' for each language.

    `bounds` are the fewest training pairs of a high and of a mid one; without them these are thirds of the languages,
    where names decide between equals.
    """
    ranked = sorted(train_pairs, key=lambda lang: (-train_pairs[lang], lang))
    if bounds is None:
        return {lang: GROUPS[i * len(GROUPS) // len(ranked)] for i, lang in enumerate(ranked)}
    high, mid = bounds
    return {
        lang: "high" if train_pairs[lang] >= high else "mid" if train_pairs[lang] >= mid else "low"
        for lang in ranked
    }
