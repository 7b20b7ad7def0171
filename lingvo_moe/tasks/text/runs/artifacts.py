"""Artifacts of the input of a task over texts: two vocabularies, and the languages by task id."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.file_list import check_tidied
from lingvo_moe.tasks.text.vocabulary.language_codes import LanguageCodes

VOCAB_FILES = {"source": "vocab/source.model", "target": "vocab/target.model"}


def text_artifacts(
    vocabs: Mapping[str, bytes],
    languages: Sequence[str] = (),
    target_language: str = "",
    tidied: int = 0,
    codes: LanguageCodes | None = None,
) -> RunArtifacts:
    """The artifacts of a run.

    `vocabs` are serialised vocabularies by side; a language's place in `languages` is its task id. `target_language`
    is '' where it is not known; `tidied` is the version of tidy_text that the texts went through; `codes` are those of
    a model that translates from any language to any.
    """
    files = {name: vocabs[side] for side, name in VOCAB_FILES.items()}
    about: dict[str, Any] = {"languages": list(languages)}
    about |= {"target_language": target_language} if target_language else {}
    about |= {"language_codes": dataclasses.asdict(codes)} if codes else {}
    return RunArtifacts(files, about | ({"tidied": tidied} if tidied else {}))


def tidied_of(artifacts: RunArtifacts) -> int:
    """The version of tidy_text that the run's texts went through; 0: none, or a run that does not say.

    Raises DataError: there is no such version here.
    """
    return check_tidied(artifacts.about.get("tidied", 0), "the run's experiment.json")


def target_language_of(artifacts: RunArtifacts) -> str:
    """The code of the target language; '' for a run that does not say."""
    return str(artifacts.about.get("target_language") or "")


def language_codes_of(artifacts: RunArtifacts) -> LanguageCodes | None:
    """The languages of a model that translates from any to any; None for another. Raises DataError: damaged."""
    about = artifacts.about.get("language_codes")
    if about is None:
        return None
    try:
        ids = {str(code): int(i) for code, i in about["ids"].items()}
        return LanguageCodes(ids, bool(about["is_last"]), int(about["start_id"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(f"the run's language_codes are damaged: {about!r:.80}") from None


def vocabs_of(artifacts: RunArtifacts) -> NestedMap:
    """NestedMap(source, target): serialised vocabularies. Raises DataError where one is missing."""
    for name in VOCAB_FILES.values():
        if name not in artifacts.files:
            raise DataError(f"the run keeps no {name}: it is no run of a model of texts")
    return NestedMap({side: artifacts.files[name] for side, name in VOCAB_FILES.items()})


def languages_of(artifacts: RunArtifacts) -> list[str] | None:
    """The source languages by task id; None for a run that does not say.

    Raises DataError: they are no list of strings.
    """
    languages = artifacts.about.get("languages", [])
    if not isinstance(languages, list) or not all(isinstance(name, str) for name in languages):
        raise DataError(f"the run's languages must be a list of strings, but are {languages!r}")
    return languages or None


def task_numbers(languages: Sequence[str], tasks: Sequence[str] | None) -> list[int]:
    """The task id of each language: its place among `tasks`, or, where they are None, among the languages sorted.

    Raises DataError: a language that is none of the tasks.
    """
    tasks = sorted(languages) if tasks is None else list(tasks)
    for language in languages:
        if language not in tasks:
            raise DataError(
                f"language {language!r} is none of the {len(tasks)} that the run knows{did_you_mean(language, tasks)}:"
                " its experts are chosen by language, so others cannot be translated"
            )
    return [tasks.index(language) for language in languages]
