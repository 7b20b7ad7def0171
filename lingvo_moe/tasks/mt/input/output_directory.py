"""Whether a directory of data may be put in the place of what is there."""

import os
from collections.abc import Collection
from pathlib import Path

from lingvo_moe.tasks.mt.input.errors import DataError
from lingvo_moe.tasks.mt.input.file_list import Kind


def check_replaceable(
    output: str | os.PathLike, kind: Kind, parts: Collection[str], what: str
) -> None:
    """Raises DataError, naming --output, where something would be lost that the tool did not make.

    Args:
        output: the directory to make.
        kind: of the directory; its summary or its list tells an older one.
        parts: the directories in it; besides there are <lang>.tsv.gz.
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
    own = (kind.summary, kind.name)
    if there and not any(name in there for name in own):
        raise DataError(
            f"--output={output} holds files that are no {what}; name an empty or new directory"
        )
    for name in there:
        if name not in (*own, *parts) and not name.endswith(".tsv.gz"):
            raise DataError(
                f"--output={output}: {name!r} is no part of the {what} there and would be lost with it; move it"
                " away, or name another directory"
            )
