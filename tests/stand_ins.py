"""Stand-ins for the slow parts of commands: they record how they were called, and give back something small.

What a command does is then the calls of its stand-ins, its output and its files, all of them within milliseconds.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import io
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.flags import Flags


@dataclasses.dataclass(frozen=True)
class Through:
    """A replacement that takes the place itself, and is not recorded."""

    value: Any


def scorer(*about: Any) -> Any:
    """Stands for a Scorer; of the directory TEXTS, for one of a language model."""
    one = SimpleNamespace(log_prob=-1.0, pieces=["a"], token_log_probs=[-1.0], truncated=False)

    def score(sources: Sequence[str], targets: Sequence[str], *_: Any) -> list[Any]:
        print(about, targets)
        return [one] * len(sources)

    return SimpleNamespace(Score=score, scores_texts=about[0] == "TEXTS", mesh_scores=None)


class StandIns:
    """Replaces attributes, named 'module:attribute', by recorders of their calls, which give back the value there.

    Attributes:
        calls: a text for each call since the last `Run`.
    """

    def __init__(self, replacements: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        for target, result in replacements.items():
            module, _, name = target.partition(":")
            owner: Any = importlib.import_module(module)
            *parents, last = name.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            stub = result.value if isinstance(result, Through) else self._Recorder(name, result)
            monkeypatch.setattr(owner, last, stub)

    def _Recorder(self, name: str, result: Any) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(f"{name}{shown(args)}{shown(kwargs)}")
            return result

        return stand_in

    def Run(self, main: Callable[..., int | None], argv: Sequence[str], files: Path) -> "Done":
        """Runs a command in a copy of the directory `files`, with two lines on its standard input."""
        place = files.with_name("place")
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(files, place)
        self.calls.clear()
        out = io.TextIOWrapper(io.BytesIO(), "utf-8")
        stdin = sys.stdin
        sys.stdin = io.TextIOWrapper(io.BytesIO(b"eins\tone\tde\nzwei\ttwo\tde\n"), "utf-8")
        try:
            with (
                contextlib.chdir(place),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(out),
            ):
                status = main(list(argv))
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else 1
        finally:
            sys.stdin = stdin
        out.flush()
        said = re.sub(r"[\d.,]+ (s|min|a second)\b", "TIME", out.buffer.getvalue().decode())  # type: ignore[attr-defined]
        made = (path for path in sorted(place.rglob("*")) if path.is_file())
        written = {str(path.relative_to(place)): _digest(path) for path in made}
        return Done(status or 0, said, tuple(self.calls), tuple(written.items()))


@dataclasses.dataclass(frozen=True)
class Done:
    """The effects of a command: its status, its output, calls of stand-ins, and the files that are there afterwards."""

    status: int
    said: str
    calls: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shown(value: Any) -> str:
    """A text that is equal for equal arguments, in every process."""
    if isinstance(value, Flags):
        raise AssertionError("all flags go to this stand-in: replace what reads them there")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(shown, value)) + ")"
    if isinstance(value, Params):
        return value.ToText()
    if isinstance(getattr(value, "p", None), Params):
        return f"{type(value).__name__}({value.p.ToText()})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return type(value).__name__ + shown({f.name: getattr(value, f.name) for f in fields})
    if callable(value) or isinstance(value, MagicMock):
        return "function"
    text = str(value)
    if " at 0x" not in text:
        return text
    plain = {
        k: v
        for k, v in getattr(value, "__dict__", {}).items()
        if isinstance(v, str | int | list | Path)
    }
    return type(value).__name__ + shown(plain)


def anything(**attributes: Any) -> MagicMock:
    """An object that can do anything."""
    return MagicMock(**attributes)
