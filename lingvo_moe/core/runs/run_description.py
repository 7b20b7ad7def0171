"""The shape of a run's JSON files. Anybody may have written them, so the type of every value is checked."""

import hashlib
import json
import reprlib
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict


class RunDirError(ValueError):
    """A directory that holds no run, or a damaged one. The message names the file and what to do."""


class BeganFrom(TypedDict):
    """The run that another run began from; see Beginning.about of engine/checkpoints/init_from.py."""

    logdir: str
    step: int
    kept: dict[str, list[int]]
    grown: NotRequired[bool]
    state: NotRequired[bool]


class SavedExperiment(TypedDict):
    """`experiment.json`; see RunDir.Write.

    Keys:
        model: the experiment's name.
        params_override: its overrides.
        version: of the package that trained it; runs of before 0.1.0 do not say.
        files: paths of the files that its input keeps in the run's directory.
        input: what else its input keeps.
        began_from: the run whose weights it began with.
    """

    model: str
    params_override: str
    version: NotRequired[str]
    files: list[str]
    input: dict[str, Any]
    began_from: NotRequired[BeganFrom]


class ProgramAbout(TypedDict):
    """`program.json`: the compiled training step.

    Keys:
        name, hash: of the program.
        mesh: what it was compiled for, as text.
        collectives: how many of each kind.
    """

    name: str
    mesh: str
    hash: str
    collectives: dict[str, int]


def read_experiment(file: Path, content: bytes) -> SavedExperiment:
    """`experiment.json` from its bytes.

    Raises RunDirError: not JSON, or not of the shape of SavedExperiment; names the key and the value.
    """
    value = _read_json(file, content)
    if isinstance(value, dict) and "vocab" in value:
        value = _modernised(file, value)
    return _checked(file, value, _EXPERIMENT, ("began_from", "version"))


def _modernised(file: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """An older run's experiment.json as runs have it now: there, all runs were of translation."""
    old = _checked(file, stored, _OLD_EXPERIMENT, ("languages", "began_from"))
    new = {key: value for key, value in old.items() if key not in ("vocab", "languages")}
    about = {"languages": old["languages"]} if "languages" in old else {}
    return {**new, "files": list(old["vocab"].values()), "input": about}


def write_program(about: ProgramAbout) -> bytes:
    """`program.json`: `about`, and a digest of it, so that the file alone shows that it is whole."""
    digest = hashlib.sha256(json.dumps(about, indent=1).encode()).hexdigest()
    return json.dumps({**about, "sha256": digest}, indent=1).encode()


def read_program(file: Path, content: bytes) -> ProgramAbout:
    """`program.json` from its bytes. Raises RunDirError: not what write_program wrote."""
    value = _read_json(file, content)
    about = {k: v for k, v in value.items() if k != "sha256"} if isinstance(value, dict) else {}
    checked = _checked(file, about, _PROGRAM)
    if write_program(checked) != content:
        raise RunDirError(
            f"{file}: was changed or damaged, or is by an older version; delete it: it only describes the compiled"
            " step, and the trainer writes it again when it goes on"
        )
    return checked


def _read_json(file: Path, content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise RunDirError(f"{file}: not UTF-8, at byte {e.start}") from None
    except ValueError as e:
        raise RunDirError(f"{file}: not JSON: {e}") from None
    except RecursionError:
        raise RunDirError(f"{file}: not a run's: its brackets are too deep to be read") from None


_Shape = Mapping[str, tuple[Callable[[Any], bool], str]]


def _checked(file: Path, value: Any, shape: _Shape, optional: Container[str] = ()) -> Any:
    """`value`, of the shape: for each key a test of its value, and what that would be in words."""
    if not isinstance(value, dict):
        raise RunDirError(
            f"{file}: must be an object with {', '.join(shape)}, but is {_shown(value)}"
        )
    missing = [key for key in shape if key not in value and key not in optional]
    if missing:
        raise RunDirError(f"{file}: {' and '.join(missing)} missing")
    for key, (fits, what) in shape.items():
        if key in value and not fits(value[key]):
            raise RunDirError(f"{file}: {key} must be {what}, but is {_shown(value[key])}")
    return value


def _shown(value: Any) -> str:
    """A value in an error: JSON's null, or a short form of Python's."""
    return "null" if value is None else reprlib.repr(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_mapping(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(fits(v) for v in value.values())


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(fits(v) for v in value)


def _is_beginning(value: Any) -> bool:
    def is_pair(counts: Any) -> bool:
        return _is_list(counts, _is_count) and len(counts) == 2

    return (
        isinstance(value, dict)
        and _is_text(value.get("logdir"))
        and _is_count(value.get("step"))
        and _is_mapping(value.get("kept"), is_pair)
        and all(isinstance(value.get(name, False), bool) for name in ("grown", "state"))
    )


_TEXT = (_is_text, "a string")
_BEGAN_FROM = (
    _is_beginning,
    "an object with logdir, a string, step, a number, and kept, two numbers for each name",
)
_EXPERIMENT: _Shape = {
    "model": _TEXT,
    "params_override": _TEXT,
    "version": _TEXT,
    "files": (lambda v: _is_list(v, _is_text), "a list of strings"),
    "input": (lambda v: isinstance(v, dict), "an object"),
    "began_from": _BEGAN_FROM,
}
_OLD_EXPERIMENT: _Shape = {
    "model": _TEXT,
    "params_override": _TEXT,
    "vocab": (
        lambda v: _is_mapping(v, _is_text) and v.keys() == {"source", "target"},
        "an object with the strings source and target",
    ),
    "languages": (lambda v: _is_list(v, _is_text), "a list of strings"),
    "began_from": _BEGAN_FROM,
}
_PROGRAM: _Shape = {
    "name": _TEXT,
    "mesh": _TEXT,
    "hash": _TEXT,
    "collectives": (lambda v: _is_mapping(v, _is_count), "an object of numbers"),
}
