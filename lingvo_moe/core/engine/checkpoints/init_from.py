"""Begins a run with the weights of another.

It takes over all weights, and of each table with named rows the rows that both have.

A row of an embedding belongs to a piece of a vocabulary, one of a router's task embeddings to a language. The task says
which rows have names (TaskGrowth.NamedRows). They are found by their names, so the new run may have other
vocabularies and more languages.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.flags import BEST
from lingvo_moe.core.engine.checkpoints.initial_weights import InitialWeights, Places
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.files.paths import absolute
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.task.adapters import scale_of
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.task_growth import NamedRows

_FLAG, _STATE = "--init_from", "--init_from_state"
_LAST_STEP = "last_step"  # of the run itself
_SHOWN = 5  # differences between two models


class InitFromError(ValueError):
    """A run that this one cannot begin from."""


@dataclass(frozen=True)
class Beginning:
    """The weights that a run takes over from another, and a record of that."""

    weights: InitialWeights  # what to load
    # For experiment.json: `logdir` and `step` of the other run, `kept`: for each kind of named rows, how many the
    # other run has too, and how many there are; `grown`, true, if its model is a smaller one; and `state`, true, if the
    # run goes on with the other one's state.
    about: dict[str, Any]


def describe(about: Mapping[str, Any]) -> str:
    """A sentence for Beginning.about: 'began from RUN at step 500; 310 of 320 source pieces were there'."""
    shares = ", ".join(f"{n:,} of {total:,} {name}" for name, (n, total) in about["kept"].items())
    grown = ", out of whose smaller model this one grew" if about.get("grown") else ""
    how = "goes on" if about.get("state") else "began"
    return f"{how} from {about['logdir']} at step {about['step']}{grown}" + (
        f"; {shares} were there" if shares else ""
    )


def find_step(logdir: str | os.PathLike, step: int | str | None = None) -> int:
    """The newest checkpoint of a run, or `step`, which may be BEST. Reads no checkpoint.

    Raises:
        RunDirError: no run there, or no best step.
        InitFromError: no checkpoint, or not that one.
    """
    run = RunDir(logdir, flag=_FLAG)
    assert run.experiment
    steps = run.steps
    if not steps:
        raise InitFromError(f"{_FLAG}={logdir}: the run there has no checkpoint yet")
    if step == BEST:
        return run.BestStep("--init_from_step")
    if step is not None and step not in steps:
        raise InitFromError(
            f"--init_from_step={step}: {logdir} has no such checkpoint; there are {steps}"
        )
    return steps[-1] if step is None else int(step)


def check_model(logdir: str | os.PathLike, task: Params, trust_run: bool = False) -> None:
    """Raises as begin_from where a model cannot begin from a run, whatever the vocabularies. Reads no checkpoint."""
    _models(RunDir(logdir, _FLAG, trust_run), task)


def begin_from(
    logdir: str | os.PathLike,
    step: int,
    task: Params,
    artifacts: RunArtifacts,
    trust_run: bool = False,
    keep_state: bool = False,
) -> Beginning:
    """Reads the weights with which a run begins from a checkpoint of another.

    `task` are the Params of the model of the run that begins and `artifacts` those of its input; `trust_run` is that
    of RunDir, of the other run. With `keep_state` the optimizer's state, the moving average and the step go with them.

    Raises:
        RunDirError: no run there, or a damaged one, or its experiment is not there any more, or it names a class
            outside lingvo_moe.
        InitFromError: its model is another one; names the variables that differ. Or its state is to be kept, and is
            of another optimizer or other tables.
        TaskError: the other run does not say the names of its rows.
    """
    run = RunDir(logdir, _FLAG, trust_run)
    old, new, grows = _models(run, task)
    rows = _named_rows(new)
    names_of = {named.kind: named.names for named in rows.values()}
    names = {kind: (read(run.artifacts), read(artifacts)) for kind, read in names_of.items()}
    before, after = old.VariableSpecs(), new.VariableSpecs()
    moved = {}
    for path, named in rows.items():
        sizes = before.GetItem(path).shape[named.dim], after.GetItem(path).shape[named.dim]
        places = _places(*names[named.kind], *sizes)
        if sizes[0] != sizes[1] or (places != np.arange(sizes[1])).any():
            moved[path] = Places(named.dim, places)
    shared = {kind: [len({*a} & {*b}), len(b)] for kind, (a, b) in names.items()}
    about: dict[str, Any] = {"logdir": absolute(logdir), "step": step, "kept": shared}
    if grows:
        about["grown"] = True
    more: tuple[str, ...] = ()
    if keep_state:
        if moved:
            raise InitFromError(
                f"{_STATE}: the optimizer's state belongs to the rows of {run.path}, and here {', '.join(moved)} have "
                "others; leave the flag out"
            )
        if grows and scale_of(task):
            raise InitFromError(
                f"{_STATE}: the optimizer's state in {run.path} is of all weights, and here of adapters alone "
                "(task.adapter_rank); leave the flag out"
            )
        about["state"], more = True, _state_of(run, old, new)
    small = new if grows else None
    return Beginning(InitialWeights(str(run.checkpoint_dir), step, moved, small, more), about)


def _state_of(run: RunDir, old: BaseTask, new: BaseTask) -> tuple[str, ...]:
    """The parts of the state beside theta. Raises InitFromError where the two models' differ."""
    there, here = (
        {path: (s.dtype, s.shape) for path, s in model.StateSpecs().FlattenItems()}
        for model in (old, new)
    )
    for path in dict.fromkeys((*there, *here)):
        if path != _LAST_STEP and there.get(path) != here.get(path):
            raise InitFromError(
                f"{_STATE}: {run.path} has another state, e.g. {path}: {there.get(path, 'not')} there, "
                f"{here.get(path, 'not')} here; set the optimizer and task.ema_decay as there, or leave the flag out"
            )
    return tuple(name for name in new.StateSpecs() if name not in ("theta", _LAST_STEP))


def _models(run: RunDir, task: Params) -> tuple[BaseTask, BaseTask, bool]:
    """The model of the run, and the task's whose variables are alike, however they are packed; and whether that is the
    smaller one that the task grows out of."""
    before = run.Params().task
    old, whole = before.Instantiate().Unpacked(), task.Instantiate()
    forms = [(whole.Unpacked(), task)]
    if differ := task.cls.Growth(task).GrowsFrom():
        params = task.Copy().Set(**differ)
        forms.append((params.Instantiate().Unpacked(), params))
    differing = [_differences(old, model) for model, _ in forms]
    nearest = min(range(len(forms)), key=lambda i: len(differing[i]))
    new, after = forms[nearest]
    if differing[nearest]:
        raise _misfit(run, differing[nearest], new, before, after)
    if nearest and forms[0][0] is not whole:
        raise InitFromError(
            f"{_FLAG}={run.path}: the weights of a smaller model cannot be taken over by one whose stages have "
            "layers of their own; begin with task.pipeline.stages=1 and train.max_steps=0, then go on with stages"
        )
    return old, new, bool(nearest)


def _named_rows(task: BaseTask) -> dict[str, NamedRows]:
    return task.Growth(task.p).NamedRows(task.VariableSpecs())


def _differences(old: BaseTask, new: BaseTask) -> list[tuple[str, str, str]]:
    """The variables that differ but for the sizes along named rows: path, and how each model has it."""
    rows = _named_rows(new)
    there, here = (_described(model.VariableSpecs(), rows) for model in (old, new))
    paths = dict.fromkeys((*there, *here))
    descriptions = ((path, there.get(path, "not"), here.get(path, "not")) for path in paths)
    return [row for row in descriptions if row[1] != row[2]]


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


def _misfit(
    run: RunDir, differ: list[tuple[str, str, str]], new: BaseTask, before: Params, after: Params
) -> InitFromError:
    """The error for a model whose variables differ from the run's."""
    lines = [f"  {path}: {there} there, {here} here" for path, there, here in differ[:_SHOWN]]
    if len(differ) > _SHOWN:
        lines.append(f"  and {len(differ) - _SHOWN} more")
    sized_by = tuple({f"{named.sized_by} :" for named in _named_rows(new).values()})
    params_before, params_after = (_lines(p, sized_by) for p in (before, after))
    only = set(params_before) ^ set(params_after)
    lines += [f"> {line}" for line in params_before if line in only]
    lines += [f"< {line}" for line in params_after if line in only]
    return InitFromError(
        f"{_FLAG}={run.path}: weights can be taken over by a model of the same sizes, vocabularies and number of "
        "languages aside, but these variables differ; '>' are parameters of the run there, '<' of the one that would "
        "begin:\n" + "\n".join(lines)
    )


def _described(specs: NestedMap, rows: Mapping[str, NamedRows]) -> dict[str, str]:
    """The type and shape of each variable, with a letter in place of the number of named rows."""
    described = {}
    for path, spec in specs.FlattenItems():
        shape = [str(n) for n in spec.shape]
        if path in rows and rows[path].dim < len(shape):
            shape[rows[path].dim] = spec.letters[rows[path].dim]
        described[path] = f"{spec.dtype}[{','.join(shape)}]"
    return described


def _lines(task: Params, sized_by: tuple[str, ...]) -> list[str]:
    """The parameters as params.txt has them, but for those that set the number of named rows."""
    lines = [f"task.{line}" for line in task.ToText().splitlines()]
    return [line for line in lines if not any(name in line for name in sized_by)]
