"""BLEU and chrF of a run's checkpoints while it trains, for `--mode=eval`."""

from typing import Any

from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.input.base_input import BaseInput
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.core.task.checkpoint_scorer import BaseCheckpointScorer, CheckpointScores
from lingvo_moe.tasks.mt.decoding.translator import Translator
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.mt.mt_model import MtModel
from lingvo_moe.tasks.mt.quality import scoring
from lingvo_moe.tasks.mt.quality.intervals import ENOUGH_LINES, with_margin
from lingvo_moe.tasks.text.data.dev_set import DevSet
from lingvo_moe.tasks.text.decoding.leading import PlacedWeights
from lingvo_moe.tasks.text.runs.artifacts import (
    language_codes_of,
    languages_of,
    target_language_of,
    tidied_of,
    vocabs_of,
)

_SCORES = ("bleu", "chrf")


class CheckpointScorer(BaseCheckpointScorer):
    """Translates held-out lines with the weights that it is called with, and scores them.

    `lines` are those of each language at most; None for ENOUGH_LINES.
    """

    def __init__(
        self,
        task: BaseTask,
        inputs: BaseInput,
        artifacts: RunArtifacts,
        lines: int | None = None,
        engine: Engine | None = None,
    ):
        assert isinstance(task, MtModel) and isinstance(inputs, MtInput)
        self._model, self._train_pairs, self._engine = task, inputs.languages, engine
        self._vocabs = NestedMap(vocabs_of(artifacts), tidied=tidied_of(artifacts))
        languages = (languages_of(artifacts) or ()) if task.RoutesByTask(task.p) else ()
        self._languages = language_codes_of(artifacts) or languages
        language = target_language_of(artifacts) or inputs.target_language
        self._options = scoring.EvalOptions(language=language)
        data_dir = inputs.p.data_dir
        trained = [lang for lang in DevSet(data_dir).languages if lang in self._train_pairs]
        self._dev = DevSet(data_dir, lines or ENOUGH_LINES, trained)
        self._translator: Translator | None = None

    def __call__(self, theta: NestedMap) -> CheckpointScores:
        """See BaseCheckpointScorer: bleu and chrf with their margins, as means over all languages and by group."""
        if self._translator is None:
            placed = PlacedWeights(self._engine, theta) if self._engine else theta
            parts = (self._model, placed, self._vocabs)
            self._translator = Translator(*parts, languages=self._languages)
        else:
            self._translator.SetTheta(theta)
        translate = self._translator.Translate
        report = scoring.evaluate(
            lambda lines, langs: [row[0] for row in translate(lines, langs).translations],
            self._dev.items(),
            {lang: self._train_pairs[lang] for lang in self._dev.languages},
            self._options,
        )
        if self._engine:
            self._translator.SetTheta(NestedMap())  # the next weights may need their room
        groups = {group: report.Average(group) for group in report.groups}
        mean = report.Average()
        metrics = _numbers(mean)
        metrics.groups = NestedMap({group: _numbers(one) for group, one in groups.items()})
        bleu = report.signatures["bleu"]
        return CheckpointScores(metrics, f"{_text(mean, groups)}; {bleu}", {"bleu/signature": bleu})


def _numbers(mean: dict[str, Any]) -> NestedMap:
    """The scores of EvalReport.Average and their margins, where they are known."""
    names = [*_SCORES, *(f"{name}_margin" for name in _SCORES)]
    return NestedMap({name: mean[name] for name in names if mean[name] is not None})


def _text(mean: dict[str, Any], groups: dict[str, dict[str, Any]]) -> str:
    """'BLEU 7.6 ± 1.2 (high 9.1, mid 7.0, low 6.7), chrF ... of 485 lines'."""
    parts = []
    for name, shown in zip(_SCORES, ("BLEU", "chrF"), strict=True):
        by_group = ", ".join(f"{group} {one[name]:.1f}" for group, one in groups.items())
        score = with_margin(mean[name], mean[f"{name}_margin"])
        parts.append(f"{shown} {score} ({by_group})")
    return f"{', '.join(parts)} of {mean['lines']:,} lines"
