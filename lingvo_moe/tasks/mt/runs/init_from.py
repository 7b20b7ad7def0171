"""What a run takes over from another run to begin with: weights, and of each table the rows that both have.

A row of an embedding belongs to a piece of a vocabulary, one of a router's task embeddings to a language. Such rows are
found again by their names, so that the new run may have other vocabularies and more languages.

Letters: V vocabulary, U task (language).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.core.engine.initial_weights import InitialWeights, Places
from lingvo_moe.core.hyperparams import Params
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.input.vocabulary import Vocabulary
from lingvo_moe.tasks.mt.runs.run_dir import RunDir

_FLAG = "--init_from"
_NAMES = {"source": "source pieces", "target": "target pieces", "languages": "languages"}
_TOLD = 5  # differences between two models


class InitFromError(ValueError):
    """A run that this one cannot begin from."""


@dataclass(frozen=True)
class Beginning:
    """How a run begins from another.

    Attributes:
        weights: what to load.
        about: for experiment.json: `logdir` and `step` of the other run, and `kept`: of the source pieces, the target
            pieces and, where the model routes by them, the languages, how many the other run has, and how many
            there are.
    """

    weights: InitialWeights
    about: dict[str, Any]


def describe(about: Mapping[str, Any]) -> str:
    """A sentence for Beginning.about: 'began from RUN at step 500; 310 of 320 source pieces were there'."""
    kept = ", ".join(f"{n:,} of {total:,} {name}" for name, (n, total) in about["kept"].items())
    return f"began from {about['logdir']} at step {about['step']}; {kept} were there"


def find_step(logdir: str | os.PathLike, step: int | None = None) -> int:
    """The newest checkpoint of a run, or `step`. Reads no checkpoint.

    Raises:
        RunDirError: no run there.
        InitFromError: no checkpoint, or not that one.
    """
    run = RunDir(logdir, flag=_FLAG)
    assert run.experiment
    steps = run.steps
    if not steps:
        raise InitFromError(f"{_FLAG}={logdir}: the run there has no checkpoint yet")
    if step is not None and step not in steps:
        raise InitFromError(
            f"--init_from_step={step}: {logdir} has no such checkpoint; there are {steps}"
        )
    return steps[-1] if step is None else step


def check_model(logdir: str | os.PathLike, task: Params, trust_run: bool = False) -> None:
    """Raises as begin_from where a model cannot begin from a run, whatever the vocabularies. Reads no checkpoint."""
    _variables(RunDir(logdir, _FLAG, trust_run), task)


def begin_from(
    logdir: str | os.PathLike,
    step: int,
    task: Params,
    vocabs: Mapping[str, Vocabulary],
    languages: Sequence[str],
    trust_run: bool = False,
) -> Beginning:
    """How a run begins from a checkpoint of another.

    Args:
        logdir: the other run's.
        step: of its checkpoint.
        task: Params of the model of the run that begins.
        vocabs: its vocabularies, 'source' and 'target'.
        languages: its languages, by task id.
        trust_run: see RunDir; of the other run.

    Raises:
        RunDirError: no run there, or a damaged one, or its experiment is not there any more, or it names a class
            outside lingvo_moe.
        InitFromError: its model is another one; names the variables that differ.
    """
    run = RunDir(logdir, _FLAG, trust_run)
    old, new, rows = _variables(run, task)
    names = {
        side: (_pieces(Vocabulary(run.vocabs[side])), _pieces(vocabs[side]))
        for side in ("source", "target")
    }
    if any(kind == "languages" for kind, _ in rows.values()):
        if run.languages is None:
            raise InitFromError(f"{_FLAG}={logdir}: experiment.json does not say its languages")
        names["languages"] = (run.languages, list(languages))
    moved = {}
    for path, (kind, dim) in rows.items():
        sizes = old.GetItem(path).shape[dim], new.GetItem(path).shape[dim]
        places = _places(*names[kind], *sizes)
        if sizes[0] != sizes[1] or (places != np.arange(sizes[1])).any():
            moved[path] = Places(dim, places)
    kept = {_NAMES[kind]: [len({*a} & {*b}), len(b)] for kind, (a, b) in names.items()}
    about = {"logdir": os.path.abspath(logdir), "step": step, "kept": kept}
    return Beginning(InitialWeights(str(run.checkpoint_dir), step, moved), about)


def _variables(
    run: RunDir, task: Params
) -> tuple[NestedMap, NestedMap, dict[str, tuple[str, int]]]:
    """The specs of the run's variables and of the task's, which are alike, and `_rows` of those that have them."""
    before, after = run.Params().task, task
    old, new = (p.Instantiate().VariableSpecs() for p in (before, after))
    rows = {path: found for path, s in new.FlattenItems() if (found := _rows(path, s.letters))}
    _check_same(run, old, new, rows, before, after)
    return old, new, rows


def _rows(path: str, letters: str) -> tuple[str, int] | None:
    """Of a variable that has rows with names: whose, and along which dimension."""
    if "V" in letters:
        return "source" if path.startswith("source_embedding") else "target", letters.index("V")
    return ("languages", letters.index("U")) if "U" in letters else None


def _pieces(vocabulary: Vocabulary) -> list[str]:
    return vocabulary.Pieces(range(vocabulary.size))


def _places(old: Sequence[str], new: Sequence[str], old_size: int, new_size: int) -> np.ndarray:
    """int64 [new_size], where each row of the new table lay in the old one, by name; -1 where it is new.

    Rows beyond the names stay where they are.
    """
    number = {name: i for i, name in enumerate(old)}
    places = np.full(new_size, -1)
    places[: len(new)] = [number.get(name, -1) for name in new]
    beyond = np.arange(max(len(old), len(new)), min(old_size, new_size))
    places[beyond] = beyond
    return places


def _check_same(
    run: RunDir,
    old: NestedMap,
    new: NestedMap,
    rows: Mapping[str, tuple[str, int]],
    before: Params,
    after: Params,
) -> None:
    """Raises InitFromError unless both models have the same variables, but for the sizes along `rows`."""

    def about(specs: NestedMap) -> dict[str, str]:
        found = {}
        for path, spec in specs.FlattenItems():
            shape = [str(n) for n in spec.shape]
            if path in rows and rows[path][1] < len(shape):
                shape[rows[path][1]] = spec.letters[rows[path][1]]
            found[path] = f"{spec.dtype}[{','.join(shape)}]"
        return found

    there, here = about(old), about(new)
    differ = [p for p in dict.fromkeys((*there, *here)) if there.get(p) != here.get(p)]
    if not differ:
        return
    told = [
        f"  {p}: {there.get(p, 'not')} there, {here.get(p, 'not')} here" for p in differ[:_TOLD]
    ]
    if len(differ) > _TOLD:
        told.append(f"  and {len(differ) - _TOLD} more")
    only = set(_lines(before)) ^ set(_lines(after))
    told += [f"> {line}" for line in _lines(before) if line in only]
    told += [f"< {line}" for line in _lines(after) if line in only]
    raise InitFromError(
        f"{_FLAG}={run.path}: weights can be taken over by a model of the same sizes, vocabularies and number of "
        "languages aside, but these variables differ; '>' are parameters of the run there, '<' of the one that would "
        "begin:\n" + "\n".join(told)
    )


def _lines(task: Params) -> list[str]:
    """The parameters as params.txt has them, but for those that may differ."""
    lines = [f"task.{line}" for line in task.ToText().splitlines()]
    return [line for line in lines if "vocab_size :" not in line and "num_tasks :" not in line]
