"""Gathers the contents of a run's page (report_page.py) from its directory; missing parts are named."""

import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.engine.checkpoints import init_from
from lingvo_moe.core.engine.loop.summaries import read_metrics
from lingvo_moe.core.task import inspect
from lingvo_moe.tasks.mt.mt_model import MtModel
from lingvo_moe.tasks.mt.quality.scoring import verify_scores
from lingvo_moe.tasks.mt.reports import samples
from lingvo_moe.tasks.mt.reports.routing import RoutingReport
from lingvo_moe.tasks.mt.reports.samples import Sample
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

_log = logging.getLogger(__name__)
_VERSIONS = ("tensorflow", "jax", "sentencepiece", "sacrebleu")


@dataclass(frozen=True)
class Missing:
    """A part that a page cannot show: why, and the command that would make it ('' for none)."""

    why: str
    command: str = ""


@dataclass
class RunReport:
    """The contents of the page."""

    name: str  # the name of the experiment
    settings: list[tuple[str, str]]  # (name, value), to be read
    params: str  # params.txt, all parameters
    metrics: list[dict[str, Any]] | Missing  # rows of `read_metrics`
    scores: dict[str, Any] | Missing  # the scores as EvalReport.ToDict, or why there are none
    samples: dict[str, list[Sample]] | Missing  # by kind, or why there are none
    routing: RoutingReport | Missing  # or why there is none
    parameters: int  # how many the model has
    steps: int  # the run's: of its newest checkpoint or of its last line of metrics
    # Rows of the evaluations while it trained, by step.
    held_out: list[dict[str, Any]] = field(default_factory=list)
    scored: list[dict[str, Any]] = field(default_factory=list)  # rows of `--mode=eval`, by step
    # More settings, shown after the others.
    extra: list[tuple[str, str]] = field(default_factory=list)

    def ToDict(self) -> dict[str, Any]:
        """Settings, scores, routing and evaluations for JSON; None for each that is missing."""
        routing = None if isinstance(self.routing, Missing) else self.routing.ToDict()
        scores = None if isinstance(self.scores, Missing) else self.scores
        settings = dict(self.settings) | {"parameters": self.parameters}
        out = {"model": self.name, "settings": settings, "scores": scores, "routing": routing}
        return {**out, "held_out": self.held_out, "scored": self.scored}


def gather(
    logdir: str | os.PathLike,
    routing: RoutingReport | Missing,
    eval_dir: str | os.PathLike | None = None,
    number: int = 4,
    seed: int = 0,
    trust_run: bool = False,
) -> RunReport:
    """Gathers the contents of the page from a run's files.

    Args:
        routing: measured before, or why not.
        eval_dir: what tools.evaluate wrote; None for RUN/eval.
        number: sample translations of each kind.

    Raises:
        RunDirError: no run, or a damaged one. ValueError: a report in `eval_dir` that is damaged.
    """
    run = TextRunDir(logdir, trust_run=trust_run)
    directory = Path(eval_dir) if eval_dir else run.path / "eval"
    scores = _scores(run, directory)
    metrics = read_metrics(str(run.summaries_dir))
    parameters = inspect.count_parameters(run.Task(MtModel).VariableSpecs().Flatten())
    no_metrics = Missing(
        f"{run.summaries_dir} has no metrics.jsonl with an undamaged line", _train(run)
    )
    return RunReport(
        name=run.experiment["model"],
        settings=_settings(run, scores, metrics),
        params=run.params_text,
        metrics=metrics or no_metrics,
        scores=scores,
        samples=_samples(run, scores, directory, number, seed),
        routing=routing,
        parameters=parameters,
        steps=max([0, *run.steps, *(row["step"] for row in metrics)]),
        held_out=read_metrics(str(run.held_out_dir)),
        scored=read_metrics(str(run.scores_dir)),
    )


def _train(run: TextRunDir) -> str:
    return f"python -m lingvo_moe.trainer --model={run.experiment['model']} --logdir={run.path}"


def _evaluate(run: TextRunDir) -> str:
    return f"python -m tools.evaluate --logdir={run.path}"


def _scores(run: TextRunDir, directory: Path) -> dict[str, Any] | Missing:
    file = directory / "report.json"
    if not file.is_file():
        return Missing(f"there is no {file}", _evaluate(run))
    verify_scores(directory, [file.name])
    try:
        scores = json.loads(file.read_text("utf-8"))
        _ = scores["average"]["bleu"], scores["groups"], scores["languages"], scores["signatures"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{file}: not a report of tools.evaluate, or damaged ({type(e).__name__}: {e})"
        ) from None
    return scores


def _samples(
    run: TextRunDir, scores: Any, directory: Path, number: int, seed: int
) -> dict[str, list[Sample]] | Missing:
    if isinstance(scores, Missing):
        return scores
    sides, languages = ("src", "ref", "hyp"), scores["languages"]
    try:
        files = [f"texts/{lang}.{side}" for lang in languages for side in sides]
        verify_scores(directory, files, warn=False)  # _scores did
        texts = samples.read_texts(directory / "texts", languages)
    except ValueError as e:
        _log.warning("no samples: %s", e)
        return Missing(str(e), _evaluate(run))
    return samples.choose(texts, number, seed)


def _settings(run: TextRunDir, scores: Any, metrics: Sequence[dict]) -> list[tuple[str, str]]:
    experiment, p = run.experiment, run.Params()
    out = [("run", str(run.path)), ("experiment", experiment["model"])]
    out.append(("overrides", experiment["params_override"] or "none"))
    if run.began_from:
        out.append(("beginning", init_from.describe(run.began_from)))
    out.append(("data", str(p.input.data_dir or "not said")))
    languages = run.languages or ([] if isinstance(scores, Missing) else scores["languages"])
    if languages:
        out.append(("languages", f"{len(languages)}: {', '.join(languages)}"))
    batch = (
        f"{p.input.batch_size} rows of {p.input.source_length} and {p.input.target_length} tokens"
    )
    out.append(("batch", batch))
    out.append(("experts", f"{p.task.num_experts:,}" if p.task.num_experts else "none: dense"))
    out += _program(run)
    out += _cut_short(run, p.train, metrics)
    rates = sorted(row["tokens_per_second"] for row in metrics[1:] if row.get("tokens_per_second"))
    if rates:
        out.append(
            ("training", f"{rates[len(rates) // 2]:,.0f} target tokens a second, the median")
        )
    if not isinstance(scores, Missing):
        out.append(("scored", _scored(scores)))
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _VERSIONS]
    out.append(
        ("versions", f"of this page: Python {platform.python_version()}, {', '.join(versions)}")
    )
    return out


def _program(run: TextRunDir) -> list[tuple[str, str]]:
    program = run.program
    if program is None:
        why = "unknown: program.json is missing; only the engine pjrt writes one"
        return [("collectives a step", why)]
    counts = ", ".join(f"{n} {kind}" for kind, n in program["collectives"].items())
    return [("mesh", program["mesh"]), ("collectives a step", counts or "none")]


def _cut_short(run: TextRunDir, train: Params, metrics: Sequence[dict]) -> list[tuple[str, str]]:
    """Says where metrics.jsonl lacks lines that were written before the newest checkpoint was."""
    newest, last = max(run.steps, default=0), metrics[-1]["step"] if metrics else 0
    if last >= newest - newest % train.summary_interval_steps:
        return []
    why = f"metrics.jsonl ends at step {last}, the newest checkpoint is of step {newest}: lines are missing"
    return [("curves", why)]


def _scored(scores: dict[str, Any]) -> str:
    model = scores.get("model") or {}
    what = (
        f"step {model['step']}"
        if "step" in model
        else model.get("saved_model") or model.get("texts") or "a model"
    )
    if model.get("averaged_steps"):
        what = f"the mean of steps {', '.join(map(str, model['averaged_steps']))}"
    if model.get("ema"):
        what += ", the moving average of the weights"
    lines = sum(one["lines"] for one in scores["languages"].values())
    return f"{what}, {lines:,} lines of {len(scores['languages'])} languages; " + "; ".join(
        scores["signatures"].values()
    )
