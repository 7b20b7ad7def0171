"""A run directory: what a trained model is, beside its checkpoints, so that it can be rebuilt from there alone.

experiment.json             the experiment's name, its overrides, its languages, where the vocabularies lie, which run
                            it began from
params.txt                  all of its parameters, to read and to compare
vocab/source.model          serialised SentencePiece models
vocab/target.model
checkpoints/<step>/         written by the engine
train/                      what the trainer measured
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.core import registry
from lingvo_moe.core.files import write_atomic
from lingvo_moe.core.hyperparams import Params
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.paths import check_portable

_FILE = "experiment.json"
_SIDES = ("source", "target")


class RunDirError(ValueError):
    """A directory that holds no run, or a damaged one. The message names the file and what to do."""


class RunDir:
    """The description of a run in `path`. Nothing is read or written before it is asked for."""

    def __init__(self, path: str | os.PathLike, flag: str = "--logdir"):
        """Args: the directory; the flag that named it, for errors.

        Raises:
            PathError: a path below which checkpoints could not be read again.
        """
        check_portable(path, flag)
        self.path, self._flag = Path(path), flag

    @property
    def checkpoint_dir(self) -> Path:
        """Where the engine keeps the checkpoints."""
        return self.path / "checkpoints"

    @property
    def summaries_dir(self) -> Path:
        """Where the trainer writes what it measured, for TensorBoard and `read_metrics`."""
        return self.path / "train"

    @property
    def exists(self) -> bool:
        """Whether a run was described here."""
        return (self.path / _FILE).is_file()

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first; they have their names only when they are complete."""
        if not self.checkpoint_dir.is_dir():
            return []
        return sorted(int(p.name) for p in self.checkpoint_dir.iterdir() if p.name.isdigit())

    def Write(
        self,
        model: str,
        override: str,
        vocabs: Mapping[str, bytes],
        languages: Sequence[str] = (),
        began_from: Mapping[str, Any] | None = None,
    ) -> None:
        """Describes a run, each file atomically, `experiment.json` last.

        Args:
            model: the experiment's name, e.g. 'mt.M4Demo'.
            override: as `--model_params_override`.
            vocabs: serialised SentencePiece models by side, 'source' and 'target'.
            languages: what it is trained on; a language's place here is its task id.
            began_from: Beginning.about of init_from.py, of a run that began from another.

        Raises:
            RegistryError: no such experiment or parameter.
        """
        params = registry.GetParams(model, override)
        files = {side: f"vocab/{side}.model" for side in _SIDES}
        (self.path / "vocab").mkdir(parents=True, exist_ok=True)
        for side, name in files.items():
            write_atomic(self.path / name, vocabs[side])
        write_atomic(self.path / "params.txt", params.ToText().encode())
        description = {
            "model": model,
            "params_override": override,
            "languages": list(languages),
            "vocab": files,
        } | ({"began_from": dict(began_from)} if began_from else {})
        write_atomic(self.path / _FILE, json.dumps(description, indent=2).encode() + b"\n")

    @property
    def experiment(self) -> dict[str, Any]:
        """What `experiment.json` says: model, params_override, vocab.

        Raises:
            RunDirError: no run, or a damaged description.
        """
        file = self.path / _FILE
        if not self.path.is_dir():
            raise RunDirError(f"{self._flag}={self.path}: no such directory")
        if not file.is_file():
            raise RunDirError(
                f"{self._flag}={self.path}: no run there ({_FILE} is missing); give the --logdir of a trainer"
            )
        try:
            found = json.loads(file.read_text("utf-8"))
        except ValueError as e:
            raise RunDirError(f"{file}: not JSON: {e}") from None
        missing = [k for k in ("model", "params_override", "vocab") if k not in found]
        if missing:
            raise RunDirError(f"{file}: {' and '.join(missing)} missing")
        return found

    @property
    def vocabs(self) -> NestedMap:
        """NestedMap(source, target): serialised SentencePiece models.

        Raises:
            RunDirError: no run, or a file of it is missing.
        """
        files = self.experiment["vocab"]
        out = NestedMap()
        for side in _SIDES:
            file = self.path / files[side]
            if not file.is_file():
                raise RunDirError(f"{file}: missing; it is part of the run")
            out[side] = file.read_bytes()
        return out

    @property
    def languages(self) -> list[str] | None:
        """The source languages by task id; None for a run that does not say. Raises RunDirError: no run."""
        return self.experiment.get("languages") or None

    @property
    def began_from(self) -> dict[str, Any] | None:
        """The run whose weights it began with, see Write; None for one that began from nothing, or no run."""
        return self.experiment.get("began_from") if self.exists else None

    def Params(self) -> Params:
        """The Params of the run: `task`, `input`, `train`.

        Raises:
            RunDirError: no run.
            RegistryError: the experiment, or a parameter of it, is not there any more.
        """
        found = self.experiment
        return registry.GetParams(found["model"], found["params_override"])

    def Task(self) -> Any:
        """The model of the run, instantiated. Raises as Params."""
        return self.Params().task.Instantiate()
