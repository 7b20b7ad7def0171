"""The run of a translation or language model: vocabularies and languages beside what core/runs/run_dir.py has."""

from typing import TYPE_CHECKING, Any

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs import run_dir
from lingvo_moe.core.runs.run_description import RunDirError
from lingvo_moe.tasks.mt.input.artifacts import VOCAB_FILES, languages_of, vocabs_of
from lingvo_moe.tasks.mt.input.errors import DataError
from lingvo_moe.tasks.mt.input.vocabulary import open_vocabulary

if TYPE_CHECKING:  # it imports TensorFlow
    from lingvo_moe.core.task.base_task import BaseTask


class RunDir(run_dir.RunDir):
    """The description of the run of a translation or language model; see core/runs/run_dir.py."""

    @property
    def vocabs(self) -> NestedMap:
        """NestedMap(source, target): serialised vocabularies, for open_vocabulary.

        Raises:
            RunDirError: no run, a damaged one, or one of another task.
            DataError: a file is no vocabulary.
        """
        try:
            found = vocabs_of(self.artifacts)
        except DataError as e:
            raise RunDirError(f"{self.path}: {e}") from None
        for side, model in found.items():
            open_vocabulary(model, self.path / VOCAB_FILES[side])
        return found

    @property
    def languages(self) -> list[str] | None:
        """The source languages by task id; None if the run does not record them.

        Raises RunDirError: there is no run.
        """
        try:
            return languages_of(self.artifacts)
        except DataError as e:
            raise RunDirError(f"{self.path}: {e}") from None

    def Task(self, kind: "type[BaseTask] | None" = None) -> Any:
        """The model of the run, instantiated: an MtModel, or one of another class that is asked for.

        Raises RunDirError: as Params, or the run is one of another task.
        """
        from lingvo_moe.tasks.mt.model import MtModel

        task, kind = super().Task(), kind or MtModel
        if not isinstance(task, kind):
            what, example = "language", "lm.MoEDemo"
            if issubclass(MtModel, kind):
                what, example = "translation", "mt.M4Demo"
            raise RunDirError(
                f"--logdir={self.path}: {type(task).__name__} is no {what} model; expected a run of one, "
                f"e.g. of {example}"
            )
        return task
