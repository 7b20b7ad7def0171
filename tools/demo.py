"""Runs every step from real text to an exported model, in minutes on two CPU cores.

    python -m tools.demo

Builds a corpus of 90+ languages from installed packages, trains a small MoE translator whose
experts are sharded over two (virtual) devices, compares its scores with those of the untrained
model, exports a SavedModel, and writes report.json and report.html to the output directory. The
same command resumes where it stopped.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from lingvo_moe.tasks.mt.quality.intervals import ENOUGH_LINES, footnote, with_margin

from . import _cli

if TYPE_CHECKING:  # they import NumPy or TensorFlow
    from lingvo_moe.core.nested_map import NestedMap
    from lingvo_moe.core.task.base_task import BaseTask
    from lingvo_moe.tasks.mt.quality.scoring import EvalReport

# One for each of two cores: over eight, a step of the same arithmetic takes 1.7 times the CPU time.
_DEVICES = 2
# An untrained model translates nothing, and its beams end late: a few lines of each language show it.
_UNTRAINED_LINES = 4
_SENTENCE = re.compile(r"(\S+ ){3,}\S+[.?!]\Z")  # of four words or more


def define_flags() -> Flags:
    flags = Flags("python -m tools.demo", __doc__)
    flags.DEFINE_path("output", "demo", "directory for everything", portable=True)
    flags.DEFINE_string("model", "mt.M4Demo", "the experiment")
    flags.DEFINE_override()
    _cli.define_trust_flag(flags)
    flags.DEFINE_integer(
        "max_steps", None, "training steps (default: the experiment's)", checks.COUNT
    )
    flags.DEFINE_list("languages", (), "e.g. de,sw (default: all that the packages hold)")
    flags.DEFINE_integer(
        "max_per_language", ENOUGH_LINES, "dev pairs scored of each language", checks.SIZE
    )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    interrupted = "stopped; the same command resumes from here"
    return _cli.attempt("demo", lambda: Demo(args).Run(), interrupted)


class Demo:
    """The steps of the demo, in order."""

    def __init__(self, args: Flags):
        self._args = args
        self._out = Path(args.output)
        self._corpus, self._run = self._out / "corpus", self._out / "run"
        self._saved_model = self._out / "saved_model"
        self._start = time.monotonic()

    def Run(self) -> int:
        _cli.check_output_directory(self._out)
        self._out.mkdir(parents=True, exist_ok=True)
        self._build_corpus()
        self._train()
        self._say("loading TensorFlow")
        _cli.load_tensorflow()
        untrained, trained = self._evaluate()
        report = self._report(untrained, trained)
        self._show(report, untrained, trained)
        return 0

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._start
        print(f"[{seconds:4.0f} s] {text}", flush=True)

    def _build_corpus(self) -> None:
        from lingvo_moe.tasks.text.corpus.corpus import (
            CorpusOptions,
            build_corpus,
            languages_asked_for,
        )
        from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

        langs = self._args.languages
        if self._corpus.exists():
            there = languages_asked_for(self._corpus)
            if there == tuple(sorted(set(langs))):
                self._say(f"corpus: {self._corpus} exists already")
                return
            if TextRunDir(self._run).steps:
                raise ValueError(
                    f"--output={self._out} holds a demo of other languages, "
                    f"{','.join(there) or 'all'}; name another directory, or delete that one"
                )
        self._say("building the corpus from installed packages")
        built = build_corpus(self._corpus, CorpusOptions(langs=langs))
        pairs = sum(train for train, _ in built.languages.values())
        self._say(
            f"corpus: {len(built.languages)} languages into English, {pairs:,} pairs,"
            f" {built.english_sides:,} different English sides"
        )

    def _train(self) -> None:
        self._say(f"training {self._args.model} on {_DEVICES} virtual devices")
        more = [f"--num_devices={_DEVICES}"]
        if self._args.max_steps is not None:
            more.append(f"--max_steps={self._args.max_steps}")
        overrides = [self._args.model_params_override]
        _cli.train(self._args.model, self._corpus, self._run, overrides, *more)
        if not self._collectives().get("all-to-all"):
            raise ValueError("the compiled step holds no all-to-all: the experts were not sharded")

    def _collectives(self) -> Mapping[str, int]:
        from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

        program = TextRunDir(self._run).program
        return program["collectives"] if program else {}

    def _evaluate(self) -> "tuple[EvalReport, EvalReport]":
        """Exports the trained model; returns the scores of the untrained one (on few lines) and of the trained one."""
        from lingvo_moe.tasks.mt.decoding import translator
        from lingvo_moe.tasks.mt.quality import scoring
        from lingvo_moe.tasks.text.data.dev_set import DevSet
        from lingvo_moe.tasks.text.decoding import export
        from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

        options = translator.TranslateOptions(max_source_length=64, max_length=48, rows=32)
        devset = DevSet(self._corpus, self._args.max_per_language)
        pairs = scoring.count_train_pairs(self._corpus, devset.languages)
        model, about = translator.load_translator(
            self._run, options, trust_run=self._args.trust_run
        )
        self._say("exporting")
        export.export(model, self._saved_model, about)

        def score(name: str, devset: DevSet) -> scoring.EvalReport:
            self._say(f"translating {len(devset.languages)} languages with the {name} model")
            report = scoring.evaluate(
                lambda lines, langs: [row[0] for row in model.Translate(lines, langs).translations],
                devset.items(),
                pairs,
            )
            self._say(f"{name}: chrF {report.Average()['chrf']:.1f}")
            return report

        trained = score("trained", devset)
        trained.info = {"model": {"logdir": str(self._run), **about}, "data_dir": str(self._corpus)}
        model.SetTheta(_initial_theta(TextRunDir(self._run, trust_run=self._args.trust_run).Task()))
        most = min(_UNTRAINED_LINES, self._args.max_per_language)
        return score("untrained", DevSet(self._corpus, most)), trained

    def _report(self, untrained: "EvalReport", trained: "EvalReport") -> dict[str, Any]:
        from lingvo_moe.core.engine.loop.summaries import read_metrics
        from lingvo_moe.core.task import inspect
        from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

        rows = read_metrics(str(self._run / "train"))
        mean, before = trained.Average(), untrained.Average()
        task = TextRunDir(self._run, trust_run=self._args.trust_run).Task()
        collectives = self._collectives()
        rates = [row["tokens_per_second"] for row in rows[1:]]
        report = {
            "model": self._args.model,
            "devices": _DEVICES,
            "experts": task.p.num_experts,
            "params": inspect.count_parameters(task.VariableSpecs().Flatten()),
            "steps": rows[-1]["step"],
            "first_loss": rows[0]["loss"],
            "last_loss": rows[-1]["loss"],
            **{f"dev_{k}": mean[k] for k in ("bleu", "bleu_margin", "chrf", "chrf_margin")},
            "untrained_bleu": before["bleu"],
            "untrained_chrf": before["chrf"],
            "languages": len(trained.languages),
            "all_to_all_ops": collectives["all-to-all"],
            "collectives": collectives,
            "tokens_per_s": median_high(rates) if rates else 0.0,
            "groups": trained.ToDict()["groups"],
            "signatures": trained.signatures,
            "seconds": round(time.monotonic() - self._start, 1),
            "saved_model": str(self._saved_model),
        }
        self._write_page(trained, untrained)
        files.write_json(self._out / "report.json", report)
        return report

    def _write_page(self, trained: "EvalReport", untrained: "EvalReport") -> None:
        """Writes report.html, and its scores and texts where tools.report looks for them."""
        from lingvo_moe.tasks.mt.reports import report_page
        from lingvo_moe.tasks.mt.reports.routing import measure_routing
        from lingvo_moe.tasks.mt.reports.run_report import gather
        from lingvo_moe.tasks.text.data.dev_set import DevSet
        from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

        trained.Write(self._run / "eval")
        self._say("measuring which language is routed to which expert")
        devset = DevSet(self._corpus, self._args.max_per_language)
        trust = self._args.trust_run
        routing = measure_routing(TextRunDir(self._run, trust_run=trust), devset)
        gathered = gather(self._run, routing, trust_run=trust)
        before = untrained.Average()
        scores = f"BLEU {before['bleu']:.1f}, chrF {before['chrf']:.1f}"
        untrained_scores = f"{scores} on {before['lines']:,} of the lines"
        gathered.extra += [("untrained", untrained_scores), ("exported", str(self._saved_model))]
        page = report_page.html_report(gathered).encode("utf-8", "replace")
        files.write_atomic(self._out / "report.html", page)

    def _show(
        self, report: Mapping[str, Any], untrained: "EvalReport", trained: "EvalReport"
    ) -> None:
        from lingvo_moe.core.pages.tables import Table, numbers, show, words

        columns = words("languages") + numbers("BLEU", "untrained", "chrF", "untrained")
        show(Table(columns, _group_rows(trained, untrained)))
        print(footnote(), *trained.signatures.values(), "", sep="\n")
        show(Table(words("", "translation", "reference"), _samples(trained, 8)))
        self._say(
            f"loss {report['first_loss']:.2f} -> {report['last_loss']:.2f} in {report['steps']} "
            f"steps; {report['all_to_all_ops']} all-to-alls in the compiled step"
        )
        files = self._saved_model, self._out / "report.html", self._out / "report.json"
        _cli.made(*files, next=f"python -m tools.translate --saved_model={self._saved_model}")


def _group_rows(trained: "EvalReport", untrained: "EvalReport") -> list[list[str]]:
    """A row for each resource group and one for all: name, BLEU and chrF, each beside the untrained model's."""
    out = []
    for group in (*trained.groups, ""):
        mean, before = trained.Average(group), untrained.Average(group)
        name = f"{group or 'all'} ({mean['languages']} languages)"
        scores = [
            cell
            for kind in ("bleu", "chrf")
            for cell in (with_margin(mean[kind], mean[f"{kind}_margin"]), f"{before[kind]:.1f}")
        ]
        out.append([name, *scores])
    return out


def _initial_theta(task: "BaseTask") -> "NestedMap":
    import tensorflow as tf

    from lingvo_moe.core import randomness
    from lingvo_moe.core.sharding import single_device, use_mesh

    def init() -> "NestedMap":
        with use_mesh(single_device()):
            return task.InitTheta(randomness.make_seed(task.p.seed, 0))

    return tf.function(init, autograph=False, jit_compile=True)()


def _samples(report: "EvalReport", count: int) -> list[tuple[str, str, str]]:
    """(language, translation, reference) of some languages with whole sentences: of each, that of median length."""
    sentences: dict[str, list[tuple[str, str]]] = {}
    for lang, r in report.languages.items():
        lines = zip(r.hypotheses, r.references, strict=True)
        if whole := [line for line in lines if _SENTENCE.match(line[1])]:
            sentences[lang] = sorted(whole, key=lambda line: len(line[1]))
    names = sorted(sentences, key=lambda lang: -report.languages[lang].train_pairs)
    chosen = names[:: max(len(names) // count, 1)][:count]
    return [(lang, *sentences[lang][len(sentences[lang]) // 2]) for lang in chosen]


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    _cli.run(main)
