"""The run of a task over texts: vocabularies and languages beside what core/runs/run_dir.py has."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs import run_dir
from lingvo_moe.core.runs.run_description import RunDirError
from lingvo_moe.core.runs.run_lock import DESCRIPTION
from lingvo_moe.core.task.meshes import lay_for_inference
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.runs.artifacts import VOCAB_FILES, languages_of, tidied_of, vocabs_of
from lingvo_moe.tasks.text.vocabulary.vocabulary import open_vocabulary

if TYPE_CHECKING:  # they import TensorFlow
    from lingvo_moe.core.sharding import Mesh
    from lingvo_moe.tasks.transformer.task import TransformerTask

_T = TypeVar("_T")


class TextRunDir(run_dir.RunDir):
    """The description of the run of a task over texts; see core/runs/run_dir.py."""

    @property
    def vocabs(self) -> NestedMap:
        """NestedMap(source, target): serialised vocabularies, for open_vocabulary.

        Raises:
            RunDirError: no run, a damaged one, or one of another task.
            DataError: a file is no vocabulary.
        """
        models = self._Said(vocabs_of)
        for side, model in models.items():
            open_vocabulary(model, self.path / VOCAB_FILES[side])
        return models

    @property
    def tidied(self) -> int:
        """See tidied_of. Raises RunDirError: no run, or a version that is not known."""
        return self._Said(tidied_of)

    def OpenVocabularies(self) -> NestedMap:
        """NestedMap(source, target), which tidy texts as the run's were tidied. Raises as vocabs and tidied."""
        return self.vocabs.Transform(lambda model: open_vocabulary(model, tidied=self.tidied))

    @property
    def languages(self) -> list[str] | None:
        """The source languages by task id; None if the run does not record them.

        Raises RunDirError: there is no run.
        """
        return self._Said(languages_of)

    def _Said(self, read: Callable[[RunArtifacts], _T]) -> _T:
        """Returns what `read` finds in the artifacts. Raises RunDirError: there is no run, or they do not say it."""
        try:
            return read(self.artifacts)
        except DataError as e:
            raise RunDirError(f"{self.path}: {e}") from None

    def ParamsOver(self, mesh: "Mesh | None") -> Params:
        """The Params, with a mesh as weights lie over it in inference: see lay_for_inference. Raises as Params."""
        params = self.Params()
        if mesh is not None:
            lay_for_inference(params.task, mesh)
        return params

    def Task(self, kind: "type[TransformerTask] | None" = None, mesh: "Mesh | None" = None) -> Any:
        """The model of the run, instantiated; without the adapters, which load_theta adds to its weights.

        Raises RunDirError: as Params, or it is none of `kind`.
        """
        params = self.ParamsOver(mesh).task
        if "adapter_rank" in params:
            params.adapter_rank = 0
        task = params.Instantiate()
        if kind and not isinstance(task, kind):
            raise RunDirError(
                f"--logdir={self.path}: {type(task).__name__} is no {kind.KIND} model; expected a run of one, "
                f"e.g. of {kind.EXAMPLE}"
            )
        return task


def artifacts_of_vocabularies(directory: str | os.PathLike) -> RunArtifacts | None:
    """The artifacts of the run that keeps its vocabularies in a directory, RUN/vocab; None for another directory.

    Raises RunDirError: the run is damaged.
    """
    directory = Path(directory)
    if directory.name != "vocab" or not (directory.parent / DESCRIPTION).is_file():
        return None
    return TextRunDir(directory.parent, "input.vocab_dir").artifacts
