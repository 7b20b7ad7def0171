"""Formats the table of a prepared data set: one row a language, and the dropped pairs with examples."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from lingvo_moe.core.pages.tables import Table, lines, numbers, words
from lingvo_moe.tasks.text.batches.lengths import NAMES, PERCENTILES
from lingvo_moe.tasks.text.preparing.filters import REASONS

_COLUMNS = ("read", "kept", "dev")
_TOKENS = ("source_tokens", "target_tokens")


def all_languages(summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries of prepared.json for all languages, including those without a training pair."""
    return {**summary["languages"], **summary["left_out"]}


def format_table(summary: Mapping[str, Any]) -> str:
    """The table of prepared.json's contents."""
    languages = all_languages(summary)
    dropped = Counter[str]()
    for about in languages.values():
        dropped.update(about["dropped"])
    reasons = [reason for reason in REASONS if dropped[reason]]
    shares = {"share T=1": "share_at_1"}  # one column where both temperatures are 1
    shares[f"share T={summary['temperature']:g}"] = "share"
    names = [name.replace("_", " ") for name in (*reasons, *_TOKENS)]
    rows = []
    for lang, about in sorted(languages.items()):
        parts = [f"{about[name]:.2%}" if name in about else "" for name in shares.values()]
        rows.append([lang, *_numbers(about, reasons), *parts])
    total = {name: sum(a[name] for a in languages.values()) for name in (*_COLUMNS, *_TOKENS)}
    total["dropped"] = dropped
    rows.append(["all", *_numbers(total, reasons), *[""] * len(shares)])
    return "\n".join(lines(Table(words("") + numbers(*_COLUMNS, *names, *shares), rows)))


def format_lengths(summary: Mapping[str, Any]) -> str:
    """The percentiles of prepared.json's row lengths, and the lengths that hold nearly all pairs."""
    about = summary["row_lengths"]
    titles = [f"{p}%" for p in PERCENTILES[:-1]]
    rows = [[side, *map(str, percentiles)] for side, percentiles in about["percentiles"].items()]
    table = lines(Table(words("row length") + numbers(*titles, "longest"), rows))
    enough = about["enough"]
    lengths = ", ".join(f"{name}={n}" for name, n in zip(NAMES[-len(enough) :], enough))
    said = f"rows of {lengths} hold {about['kept_by_enough']:.1%} of the pairs"
    return "\n".join([*table, said])


def format_examples(summary: Mapping[str, Any]) -> str:
    """One line for each reason that occurred: its count, its meaning, and an example; '' if no pair was dropped."""
    languages = all_languages(summary)
    said = []
    for reason, meaning in REASONS.items():
        total = sum(about["dropped"].get(reason, 0) for about in languages.values())
        if not total:
            continue
        said.append(f"  {total:,} {reason.replace('_', ' ')}: {meaning}")
        for lang, about in sorted(languages.items()):
            if examples := about["examples"].get(reason):
                said.append(f"      {lang}: {examples[0]}")
                break
    return "\n".join(["dropped:", *said]) if said else ""


def _numbers(about: Mapping[str, Any], reasons: list[str]) -> list[str]:
    numbers = [about[name] for name in _COLUMNS]
    numbers += [about["dropped"].get(reason, 0) for reason in reasons]
    return [f"{n:,}" for n in [*numbers, *(about[name] for name in _TOKENS)]]
