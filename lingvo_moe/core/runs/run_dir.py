"""A run directory: what a trained model is, beside its checkpoints, so that it can be rebuilt from there alone.

experiment.json             the experiment's name, its overrides, what its input keeps here, which run it began from
params.txt                  all of its parameters, to read and to compare
...                         the files that its input keeps here: of translation, vocab/source.model and target.model
manifest.sha256             the list of these files with their digests, by which each is checked before it is used
experiment.hmac             the mark of the user who made the run, see own_runs.py
train_params.txt            its parameters of `train`, which may change; written again whenever the trainer starts
program.json                the compiled training step; likewise
evaluations.json            the held-out losses by step, which say what the best checkpoint is
time.jsonl                  where the time goes, see time_record.py
checkpoints/<step>/         written by the engine
importing/                  published weights, until all are there
published/                  what came with them, e.g. a licence
train/                      what the trainer measured
eval/held_out/              what it measured on held-out data
eval/scores/                what `--mode=eval` measured

A run is data. Whoever made it may have written anything there, so nothing in it is executed, and this module reads and
writes no file outside it but the user's key. The run's parameters also name directories outside, as those of every
experiment do. Of these the tools use one, `input.data_dir`: those that read pairs take them from there when the user
names no other --data_dir.
"""

import functools
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.class_names import any_class, own_class, with_modules_as_now
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.config.stored_params import (
    StoredParamsError,
    difference,
    restore,
    stored_values,
)
from lingvo_moe.core.console.command import say
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.files.copies import copy_at, local
from lingvo_moe.core.files.files import write_atomic
from lingvo_moe.core.files.manifest import ManifestError, read_listed, write_manifest
from lingvo_moe.core.files.sealed import read_sealed, write_sealed
from lingvo_moe.core.files.store import check_place
from lingvo_moe.core.runs.evaluations import FILE as _EVALUATIONS, Evaluations, read_evaluations
from lingvo_moe.core.runs.own_runs import is_own, make_mark
from lingvo_moe.core.runs.run_description import (
    BeganFrom,
    ProgramAbout,
    RunDirError,
    SavedExperiment,
    read_experiment,
    read_program,
    write_program,
)
from lingvo_moe.core.runs.run_lock import IMPORTING
from lingvo_moe.core.runs.saved_steps import saved_steps
from lingvo_moe.core.runs.time_record import FILE as _TIME
from lingvo_moe.core.version import VERSION

if TYPE_CHECKING:  # it imports TensorFlow
    from lingvo_moe.core.task.base_task import BaseTask

MANIFEST, MARK = "manifest.sha256", "experiment.hmac"
_FILE, _PARAMS = "experiment.json", "params.txt"
_TRAIN, _PROGRAM = "train_params.txt", "program.json"
_TAKEN = (
    *(_FILE, _PARAMS, _TRAIN, _PROGRAM, MANIFEST, MARK, _EVALUATIONS, _TIME),
    *("checkpoints", IMPORTING, "train", "eval"),
)
_REMEDY = "copy the run again from where it is whole; or begin it again with --restart"


class RunDir:
    """The description of a run in `path`. Nothing is read or written before it is asked for.

    Of a run at an address all files but checkpoints are copied to this machine, and `path` is that of the copy.
    """

    def __init__(self, path: str | os.PathLike, flag: str = "--logdir", trust_run: bool = False):
        """
        Args:
            path: the directory, or the address of one in a bucket.
            flag: what named it, for errors.
            trust_run: whether to import classes outside lingvo_moe that the run names, which is to run code by
                whoever made it. Those that a run by this user names are always imported.

        Raises:
            PathError: a path below which checkpoints could not be read again.
            OSError: the run cannot be copied.
        """
        check_place(path, flag)
        self.path, self._flag, self._trust_run = local(path), flag, trust_run

    @property
    def checkpoint_dir(self) -> str:
        """The directory, or the address, of the checkpoints."""
        copy = copy_at(self.path)
        return f"{copy.store.address if copy else self.path}/checkpoints"

    @property
    def summaries_dir(self) -> Path:
        """The directory of the trainer's summaries, for TensorBoard and `read_metrics`."""
        return self.path / "train"

    @property
    def held_out_dir(self) -> Path:
        """The directory of the summaries of evaluations while it trains. Raises RunDirError as Inside."""
        return self.Inside("eval") / "held_out"

    @property
    def scores_dir(self) -> Path:
        """The directory of the summaries of `--mode=eval`. Raises RunDirError as Inside."""
        return self.Inside("eval") / "scores"

    @property
    def time_file(self) -> Path:
        """The record of where the time goes. Raises RunDirError as Inside."""
        return self.Inside(_TIME)

    @property
    def exists(self) -> bool:
        """Whether a run was described here."""
        return (self.path / _FILE).is_file()

    @property
    def identity(self) -> tuple[int, int] | None:
        """Tells the run here from one that was begun in its place later; None where no run was described."""
        try:
            status = os.stat(self.path / _FILE)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first; they have their names only when they are complete."""
        return saved_steps(self.checkpoint_dir).Steps()

    def Inside(self, name: str) -> Path:
        """The path of a file or directory in the run, to read or to write, whether it is there or not.

        Raises RunDirError: it is, or holds, a link that leads out of the run.
        """
        root, path = os.path.realpath(self.path), self.path / name
        for place in (path, *_links_below(path)):
            if not Path(os.path.realpath(place)).is_relative_to(root):
                raise RunDirError(
                    f"{self.path}: {place.relative_to(self.path)} is a link that leads out of the run, to"
                    f" {os.path.realpath(place)}; put there what it leads to"
                )
        return path

    def Write(
        self,
        model: str,
        override: str,
        artifacts: RunArtifacts,
        began_from: Mapping[str, Any] | None = None,
        params: Params | None = None,
    ) -> None:
        """Describes a run that has not begun: each file atomically, then the list of them.

        Killed before the list is written, it leaves a run that cannot be read, and that is described again when the
        trainer starts: it has no checkpoint yet.

        `override` is as `--model_params_override`; `began_from` is Beginning.about of engine/checkpoints/init_from.py;
        `params` are those of `model` with `override`, where they have been made.

        Raises:
            RegistryError: no such experiment or parameter.
            RunDirError: there is a link in the directory, by which a file outside it would be written; or an
                artifact lies outside of it, or where the run has something else.
        """
        if params is None:
            params = registry.GetParams(model, override)
        for name in artifacts.files:
            _check_artifact(self.path, name)
        for name in (*artifacts.files, _PARAMS, _FILE, MARK, MANIFEST):
            self.Inside(name)
        for name, content in artifacts.files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / name, content)
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / _PARAMS, params.ToText().encode())
        description = {
            "model": model,
            "params_override": override,
            "version": VERSION,
            "files": list(artifacts.files),
            "input": dict(artifacts.about),
        } | ({"began_from": dict(began_from)} if began_from else {})
        content = json.dumps(description, indent=2).encode() + b"\n"
        write_atomic(self.path / _FILE, content)
        if mark := make_mark(content):
            write_atomic(self.path / MARK, mark)
        self.ListFiles()
        self._Publish()

    def Undo(self, before: Collection[str]) -> None:
        """Removes a run that has not begun, but for the names that were in its directory `before` it was described.

        Raises OSError; of a run in a bucket, StoreError, and RunLockError where another writer has taken it over.
        """
        file, copy = self.path / _FILE, copy_at(self.path)
        files = read_experiment(file, file.read_bytes())["files"]
        for name in {*_TAKEN, *(PurePosixPath(name).parts[0] for name in files)} - {*before}:
            if copy and copy.holds:
                copy.holds()
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            if copy:
                copy.store.Below(name).DeleteAll()
                copy.store.Delete(name)

    def CheckReplaceable(self) -> None:
        """Raises RunDirError where Write would replace a file of another program that has a description's name."""
        file = self.path / _FILE
        if (self.path / MANIFEST).is_file() or not file.is_file():
            return
        try:  # a trainer that was killed while it described its run left one of this shape
            read_experiment(file, file.read_bytes())
        except RunDirError as e:
            raise RunDirError(
                f"{self._flag}={self.path} holds an {_FILE} that is no run's ({e}); name another directory"
            ) from None

    def ListFiles(self) -> None:
        """Lists the files of a description with their digests as they are now: vouches for them.

        Raises RunDirError: no description, or a damaged one.
        """
        file = self.path / _FILE
        files = read_experiment(file, file.read_bytes())["files"]
        write_manifest(self.path, MANIFEST, (*files, _PARAMS, _FILE))

    def WriteTrain(self, params: Params) -> None:
        """Writes the parameters of `train`, in place of those of an earlier command. Raises RunDirError as Inside."""
        lines = (line for line in params.ToText().splitlines(True) if line.startswith("train."))
        write_sealed(self.Inside(_TRAIN), "".join(lines).encode())

    @property
    def train_text(self) -> str:
        """The parameters of `train` that the newest command had; '' where those of `params_text` are all that is known.

        Raises RunDirError: the file was changed or damaged.
        """

        def damaged(why: str) -> None:
            raise RunDirError(f"{why}; delete it: the trainer writes it again when it goes on")

        text = (read_sealed(self.Inside(_TRAIN), damaged) or b"").decode("utf-8", "replace")
        return "".join(line for line in text.splitlines(True) if line.startswith("train."))

    @property
    def override(self) -> str:
        """The overrides of the run, as text; those of `train` as the newest command had them. Raises RunDirError."""
        began, newest = stored_values(self.params_text), stored_values(self.train_text)
        changed = {path: value for path, value in newest.items() if value != began.get(path)}
        first = registry.part_of(
            self.experiment["params_override"], lambda path: path not in changed
        )
        later = (f"{path}={value}".replace(";", r"\;") for path, value in changed.items())
        return ";".join(filter(None, (first, *later)))

    def WriteProgram(self, about: ProgramAbout) -> None:
        """Writes `program.json`, in place of an earlier one. Raises RunDirError: it is a link out of the run."""
        write_atomic(self.Inside(_PROGRAM), write_program(about))

    @property
    def program(self) -> ProgramAbout | None:
        """The compiled training step; None where the engine compiles none, or it has not begun.

        Raises RunDirError: it was changed or damaged.
        """
        file = self.Inside(_PROGRAM)
        return read_program(file, file.read_bytes()) if file.is_file() else None

    @property
    def evaluations(self) -> Evaluations | None:
        """The evaluations while it trained; None if there were none. Raises RunDirError: changed or damaged."""
        file = self.Inside(_EVALUATIONS)
        return read_evaluations(file, file.read_bytes()) if file.is_file() else None

    def WriteEvaluations(self, evaluations: Evaluations) -> None:
        """Writes `evaluations.json`, in place of an earlier one. Raises RunDirError: it is a link out of the run."""
        write_atomic(self.Inside(_EVALUATIONS), evaluations.ToBytes())
        self._Publish()

    def _Publish(self) -> None:
        """Writes what has changed to the bucket, of a run in one. Raises StoreError."""
        if copy := copy_at(self.path):
            copy.Push()

    def BestStep(self, flag: str) -> int:
        """The step of the checkpoint with the lowest held-out loss.

        `flag` asked for it, for errors.

        Raises:
            RunDirError: no checkpoint that is there was evaluated.
        """
        if (best := self.best_step) is None:
            raise RunDirError(
                f"{flag}=best: no checkpoint of {self.path} has a held-out loss: train with "
                "train.eval_interval_steps=100, or name a step"
            )
        return best

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint with the lowest held-out loss; None if none that is there was evaluated."""
        evaluations = self.evaluations
        best = evaluations.BestOf(self.steps) if evaluations else None
        return best.step if best else None

    @property
    def experiment(self) -> SavedExperiment:
        """The content of `experiment.json`. Checks all files of the description.

        Raises RunDirError: no run, or a damaged description.
        """
        return self._Read()[0]

    @property
    def params_text(self) -> str:
        """`params.txt`: all parameters of the run as they were when it began. Raises RunDirError: as experiment."""
        try:
            return with_modules_as_now(self._Read()[1][_PARAMS].decode("utf-8"))
        except UnicodeDecodeError as e:
            raise RunDirError(f"{self.path / _PARAMS}: not UTF-8, at byte {e.start}") from None

    @property
    def artifacts(self) -> RunArtifacts:
        """The files and facts that the input keeps here. Raises RunDirError: no run, or a damaged one."""
        experiment, contents = self._Read()
        files = {name: contents[name] for name in experiment["files"]}
        return RunArtifacts(files, experiment["input"])

    def _Read(self) -> tuple[SavedExperiment, dict[str, bytes]]:
        """The description, and the contents of its files by name, all of them as they were listed."""
        if not self.path.is_dir():
            raise RunDirError(f"{self._flag}={self.path}: no such directory")
        if not self.exists:
            raise RunDirError(
                f"{self._flag}={self.path}: no run there ({_FILE} is missing); give the --logdir of a trainer"
            )
        if not (self.path / MANIFEST).is_file():
            raise RunDirError(
                f"{self.path}: {MANIFEST}, the list of its files, is missing, so damage cannot be detected: the"
                " list was deleted, or the run is by an older version; if you know that the files are undamaged,"
                " docs/security.md has the command that lists them again"
            )
        contents = self._ReadListed((_FILE, _PARAMS))
        file = self.path / _FILE
        experiment = read_experiment(file, contents[_FILE])
        for name in experiment["files"]:
            _check_artifact(self.path, name)
        return experiment, contents | self._ReadListed(experiment["files"])

    def _ReadListed(self, names: Iterable[str]) -> dict[str, bytes]:
        names = list(names)
        for name in names:
            self.Inside(name)
        try:
            return read_listed(self.path, MANIFEST, names, _REMEDY)
        except ManifestError as e:
            raise RunDirError(str(e)) from None

    @property
    def began_from(self) -> BeganFrom | None:
        """The run whose weights it began with, see Write; None for one that began from nothing, or no run."""
        file = self.path / _FILE
        if self.exists and not (self.path / MANIFEST).is_file():  # killed while it was described
            return read_experiment(file, file.read_bytes()).get("began_from")
        return self.experiment.get("began_from") if self.exists else None

    @property
    def is_own(self) -> bool:
        """Whether this user made the run: by its mark. Raises RunDirError as Inside."""
        mark = self.Inside(MARK)
        return mark.is_file() and is_own(mark.read_bytes(), (self.path / _FILE).read_bytes())

    def Params(self, defined: Params | None = None) -> Params:
        """The Params that the run was trained with: `task`, `input`, and `train` as its newest command had it.

        A line says, once, where its experiment has other values today. `defined` are the experiment's Params, where
        they have been made: see registry.AsDefined.

        Raises RunDirError: no run; or its experiment is not there any more; or a parameter, its class or its value; or
        it names a class outside lingvo_moe, is not by this user, and is not trusted.
        """
        described, text = self.experiment, self.params_text
        newest = f"{text}\n{self.train_text}"  # of two lines of a parameter the later one counts
        model, trusted, unset = described["model"], self._trust_run or self.is_own, ""
        try:
            defined = defined or registry.AsDefined(model, trusted)
            try:  # classes that the user's overrides name are trusted as those of the experiment
                override = described["params_override"]
                today = registry.WithOverrides(defined, override, trusted, skip_derived=True)
            except registry.RegistryError as e:
                unset = f"; {e}" if trusted else ""
                today = registry.WithOverrides(defined, "", trusted)
        except registry.RegistryError as e:
            raise RunDirError(f"{self.path / _FILE}: {e}") from None
        params = today.Copy()
        try:
            # The mark is of the experiment and its overrides, not of this text.
            restore(params, newest, any_class if self._trust_run else own_class)
            registry.configure(params)
        except StoredParamsError as e:
            version = described.get("version", "an older version")
            raise RunDirError(
                f"{self.path / _PARAMS}: {model} cannot be what this run was trained as: {e}{unset}; it was "
                f"trained with lingvo_moe {version}, this is {VERSION}: use the code of then, or train it again"
            ) from None
        _say_changed(f"{self.path}", model, text, today)
        return params

    def Task(self) -> "BaseTask":
        """The task of the run, instantiated. Raises as Params."""
        return self.Params().task.Instantiate()


@functools.cache  # a command reads a run several times
def _say_once(line: str) -> None:
    say(line)


def _say_changed(run: str, model: str, text: str, today: Params) -> None:
    """Says which parameters of a run its experiment would have other values of today."""
    then, values = stored_values(text), stored_values(today.ToText())
    items = [f"{p}={then.get(p)} (today {values.get(p)})" for p in difference(then, today)]
    if items:
        more = f" and {len(items) - 3} more" if len(items) > 3 else ""
        shown = ", ".join(items[:3])
        _say_once(
            f"{run}: {model} has changed since it was trained, as which it is read: {shown}{more}"
        )


def _check_artifact(run: Path, name: str) -> None:
    """Raises RunDirError for a file of the input that would not lie in the run, or in the place of another file."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise RunDirError(
            f"{run / _FILE}: lists {name!r}, which is not in the run; must be a path below {run}"
        )
    if path.parts[0] in _TAKEN:
        raise RunDirError(
            f"{run / _FILE}: lists {name!r} as a file of the input, but that is a place of the run itself"
        )


def _links_below(directory: Path) -> Iterator[Path]:
    """The symbolic links in a directory and in those below it; none where it is no directory."""
    for root, directories, files in os.walk(directory):
        yield from (
            Path(root, name) for name in (*directories, *files) if os.path.islink(Path(root, name))
        )
