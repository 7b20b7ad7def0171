"""Numbers the tasks of a translation model, its source languages."""

from collections.abc import Sequence

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.tasks.text.data.errors import DataError


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
