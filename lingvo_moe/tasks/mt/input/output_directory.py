"""Whether a directory of data may be put in the place of what is there."""

import os
from collections.abc import Collection
from pathlib import Path

from lingvo_moe.tasks.mt.input.errors import DataError


def check_replaceable(
    output: str | os.PathLike, summary: str, parts: Collection[str], what: str
) -> None:
    """Raises DataError, naming --output, where something would be lost that the tool did not make.

    Args:
        output: the directory to make.
        summary: the file by which an older one is known.
        parts: what else is in it, besides <lang>.tsv.gz.
        what: to call it in errors.
    """
    path = Path(output)
    if path.is_file():
        raise DataError(f"--output={output} is a file; name a directory")
    if not path.exists():
        return
    if path.samefile(Path.cwd()):
        raise DataError(f"--output={output} is the directory that you are in; name another one")
    there = sorted(p.name for p in path.iterdir())
    if there and summary not in there:
        raise DataError(
            f"--output={output} holds files that are no {what}; name an empty or new directory"
        )
    for name in there:
        if name not in (summary, *parts) and not name.endswith(".tsv.gz"):
            raise DataError(
                f"--output={output}: {name!r} is no part of the {what} there and would be lost with it; move it"
                " away, or name another directory"
            )
