"""Trains our models with and without experts and JoeyNMT for equal CPU seconds, and compares their quality.

    python -m benchmarks.quality_peers --corpus=CORPUS --peers=PEERS/bin/python
    python -m benchmarks.quality_peers --corpus=CORPUS --only=experts,dense --cpu_seconds=6000 --output=long
    python -m benchmarks.quality_peers --corpus=CORPUS --only=experts,dense --cpu_seconds=1000 --rates=0.02,0.04 \
        --output=rates
    python -m benchmarks.quality_peers --corpus=CORPUS --peers=PEERS/bin/python --only=joeynmt --cpu_seconds=150 \
        --joeynmt_rates=0.0005,0.001,0.002 --output=joeynmt_rates
    python -m benchmarks.quality_peers --corpus=CORPUS --cpu_seconds=4000 --experts=2,4,8,16,24,64 \
        --routers=hash,top1,top2 --seeds=1,2,3 --output=frontier
    python -m benchmarks.quality_peers --corpus=CORPUS --only=bilingual,dense,experts --cpu_seconds=20000 --output=m4

CORPUS is what tools.build_corpus makes; PEERS is the environment that benchmarks/install_peers.sh --joeynmt makes.
All contenders train on the same pairs in the same SentencePiece pieces, each in a process of its own on one core. CPU
seconds count from the end of the first step, without those of scoring. The held-out loss is measured at 1/8, 1/4, 1/2
and all of them, on the same pairs; BLEU and chrF at the end. All learning rates decay in the last tenth of each of
these times: a run at a stable rate goes through all of them, and a branch of it decays to each. A model for each
language (bilingual) has its share of the time, so that all of them cost what one model of all languages does. After an
interruption the same command keeps the contenders that were finished, goes on with ours and begins JoeyNMT again.
Writes OUTPUT/results.json, OUTPUT/table.md and, with bilingual models, a picture of how far each other contender is
ahead of them.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import quality_report
from benchmarks.compile_time import host
from benchmarks.contenders import (
    ROOT,
    Process,
    define_contender_flags,
    kinds_of,
    update_page,
)
from lingvo_moe.core.config import checks, registry
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.console.interrupt import StopRequest
from lingvo_moe.core.decode.ranges import BEAM_SIZE
from lingvo_moe.core.files import files
from tools import _cli

PAGE = ROOT / "docs" / "joeynmt.md"
MODEL = "mt.M4Small"
RECIPE = "task.dropout=0.0;task.repeat=False"  # less than one epoch: there is nothing to regularise
_RATE = "task.optimizer.learning_rate"
_WARMUP, _OUR_RATE = 30, 0.03
_UPCYCLE_AT = 200  # steps
# How models with experts begin: what is said of it, and the parameters beside the recipe.
_BEGINNINGS = {
    "experts": ("", ""),
    "upcycled": (
        f", grown out of dense layers at step {_UPCYCLE_AT}",
        f"train.upcycle_at={_UPCYCLE_AT}",
    ),
}
_TOP = "task.aux_loss_weight=0.01;task.moe.router=top_k;task.moe.router.k="
# How tokens find their experts, likewise.
ROUTERS = {
    "hash": ("by a hash of the token", ""),
    "top1": ("each token to its best", f"{_TOP}1"),
    "top2": ("each token to its best two", f"{_TOP}2"),
}
DENSE, BILINGUAL, JOEYNMT = "dense", "bilingual", "joeynmt"
OURS = (*_BEGINNINGS, DENSE)
# Steps of warm-up, padded tokens a side of a batch, the part of each time in which rates decay, which is ours.
_JOEYNMT_SETTINGS = {"warmup": 200, "batch_tokens": 1024, "decay_share": 0.1}
_SIZES = ("model_dim", "hidden_dim", "num_heads", "num_encoder_layers", "num_decoder_layers")
POINTS = (1 / 8, 1 / 4, 1 / 2, 1)
_LENGTH_ALPHA = 0.6


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.quality_peers", __doc__)
    flags.DEFINE_path("corpus", None, "the directory of tools.build_corpus", required=True)
    flags.DEFINE_path("output", "quality_peers", "directory for everything", portable=True)
    define_contender_flags(flags, (*OURS, BILINGUAL), (JOEYNMT,))
    flags.DEFINE_list("languages", (), "the source languages (default: all of the corpus)")
    flags.DEFINE_float("cpu_seconds", 1500.0, "of training, for each", checks.POSITIVE)
    flags.DEFINE_numbers("seeds", (1,), "each contender trains with each of them", checks.SIZE)
    flags.DEFINE_numbers("experts", (24,), "numbers of experts, a contender each", checks.SIZE)
    flags.DEFINE_list("routers", ("hash",), f"likewise: some of {', '.join(ROUTERS)}", ROUTERS)
    rates = "our highest learning rates, a contender each"
    flags.DEFINE_numbers("rates", (_OUR_RATE,), rates, checks.POSITIVE)
    flags.DEFINE_numbers("joeynmt_rates", (0.001,), "JoeyNMT's, likewise", checks.POSITIVE)
    flags.DEFINE_string("model", MODEL, "our experiment")
    flags.DEFINE_string("model_params_override", RECIPE, "its parameters, as for the trainer")
    flags.DEFINE_integer("pairs", 50, "held-out pairs of each language at most", checks.SIZE)
    flags.DEFINE_integer("beam_size", 4, "hypotheses of the search, for all", BEAM_SIZE)
    flags.DEFINE_boolean("update", False, f"write the table into {PAGE.relative_to(ROOT)}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    interrupted = "stopped; the same command keeps the contenders that were finished"
    with StopRequest() as stop, stop.AtOnce():  # a contender that trains ends, too
        return _cli.attempt("quality_peers", lambda: Comparison(args).Run(), interrupted)


class Comparison:
    """The steps of the comparison, in order."""

    def __init__(self, args: Flags):
        self._args, self._out = args, Path(args.output).resolve()

    def Run(self) -> int:
        _cli.check_output_directory(self._out)
        self._out.mkdir(parents=True, exist_ok=True)
        _cli.load_tensorflow()
        from benchmarks.quality_data import write_data
        from lingvo_moe.core.console.waiting import LineProgress
        from lingvo_moe.core.pages import drawing
        from lingvo_moe.tasks.mt.reports.report_page import draw_deltas

        self._params = registry.GetParams(self._args.model, self._override())
        inputs = self._params.input.Instantiate()
        with LineProgress() as show:
            inputs.Prepare(show)
        self._data = write_data(self._out / "data", inputs, self._args.pairs)
        self._target = inputs.vocabs.target
        results = []
        runs = list(self._runs())
        for number, (name, says, setup) in enumerate(runs, 1):
            print(f"[{number}/{len(runs)}] {name}: {says}", file=sys.stderr, flush=True)
            results.append(self._result(name, says, setup))
        about = self._about()
        content = {"about": about, "results": results}
        files.write_json(self._out / "results.json", content)
        text = quality_report.table(about, results)
        files.write_atomic(self._out / "table.md", text.encode() + b"\n")
        for name, curve in quality_report.deltas(results).items():
            files.write_atomic(self._out / f"{name}.svg", drawing.picture(draw_deltas)(curve))
        print(text)
        if self._args.update:
            update_page(PAGE, "benchmarks.quality_peers", f"{text}\n\nMeasured on {host()}.")
        return 0

    def _override(self, *more: str) -> str:
        a = self._args
        corpus = registry.escape(str(Path(a.corpus).resolve()))
        own = [f"input.data_dir={corpus}"]
        if a.languages:
            languages = ",".join(f"'{language}'" for language in a.languages)
            own.append(f"input.languages=[{languages}]")
        return ";".join(part for part in (a.model_params_override, *own, *more) if part)

    def _about(self) -> dict[str, Any]:
        data, a = self._data, self._args
        return {
            "cpu_seconds": a.cpu_seconds,
            "languages": list(data.train_pairs),
            "train_pairs": sum(data.train_pairs.values()),
            "held_out_pairs": sum(map(len, data.held_out.values())),
            "held_out_tokens": data.tokens,
            "lengths": data.lengths,
            "too_long": list(data.too_long),
            "beam_size": a.beam_size,
            "model": a.model,
            "override": a.model_params_override,
            "host": host(),
        }

    def _runs(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(name, description, setup) of each run."""
        a = self._args
        kinds = kinds_of(a, OURS, (JOEYNMT,))
        shared = {
            "points": [a.cpu_seconds * part for part in POINTS],
            "beam_size": a.beam_size,
            "length_alpha": _LENGTH_ALPHA,
            "max_length": self._params.input.target_length,
            "pairs": a.pairs,
        }
        for seed in a.seeds:
            shared["seed"] = seed
            for kind in kinds:
                if kind == JOEYNMT:
                    for rate in a.joeynmt_rates:
                        says = f"JoeyNMT, learning rate {rate:g}"
                        yield f"{kind}_{rate}_seed{seed}", says, shared | self._joeynmt(rate)
                    continue
                for name, says, override in self._models(kind):
                    for rate in a.rates:
                        of_rate = f"{says}, learning rate {rate:g}"
                        setup = shared | self._ours(override, rate, seed)
                        setup["bilingual"] = kind == BILINGUAL
                        yield f"{name}_{rate}_seed{seed}", of_rate, setup

    def _models(self, kind: str) -> Iterator[tuple[str, str, str]]:
        """(name, description, override) of our models of a kind."""
        if kind in (DENSE, BILINGUAL):
            what = "no experts" if kind == DENSE else "a model for each language"
            yield kind, f"here, {what}", "task.num_experts=0"
            return
        begins, beginning = _BEGINNINGS[kind]
        for count in self._args.experts:
            for router in self._args.routers:
                chosen, by = ROUTERS[router]
                own = (f"task.num_experts={count}", by, beginning)
                says = f"here, {count} experts, {chosen}{begins}"
                yield f"{kind}{count}_{router}", says, ";".join(part for part in own if part)

    def _ours(self, override: str, rate: float, seed: int) -> dict[str, Any]:
        schedule = f"{_RATE}=wsd;{_RATE}.value={rate};{_RATE}.warmup_steps={_WARMUP}"
        seeds = f"task.seed={seed}", f"input.seed={seed}"
        pieces = f"input.vocab_dir={registry.escape(str(self._out / 'data' / 'vocab'))}"
        return {
            "model": self._args.model,
            "override": self._override(override, schedule, *seeds, pieces),
            "use_ema": bool(self._params.task.ema_decay),
        }

    def _joeynmt(self, rate: float) -> dict[str, Any]:
        task = self._params.task
        return {
            **_JOEYNMT_SETTINGS,
            "sizes": {name: task.Get(name) for name in _SIZES},
            "learning_rate": rate,
            "temperature": self._params.input.temperature,
            "label_smoothing": task.label_smoothing,
            "dropout": task.dropout,
        }

    def _result(self, name: str, says: str, setup: dict[str, Any]) -> dict[str, Any]:
        """The result of a run: that of an earlier command, or a new one."""
        directory = self._out / name
        file = directory / "result.json"
        # As JSON has it, to compare with a file.
        setup = json.loads(json.dumps({**setup, "train_pairs": self._data.train_pairs}))
        if file.is_file():
            result = json.loads(file.read_text())
            if result["setup"] == setup and "log_probs" in result["curve"][-1]:
                print(f"{name}: done before", file=sys.stderr, flush=True)
                return result
            other = [k for k in setup if setup[k] != result["setup"].get(k)] or ["form"]
            raise ValueError(
                f"{file} has results of another {', '.join(other)}; give another --output or delete {directory}"
            )
        answers = self._train_all(directory, setup)
        result = {"name": name, "says": says, "setup": setup, **self._scores(name, answers)}
        files.write_json(file, result)
        return result

    def _train_all(self, directory: Path, setup: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs a contender's process, or that of each language's model; returns what was reported."""
        if not setup.get("bilingual"):
            return self._train(directory, setup)
        languages = list(self._data.held_out)
        points = [seconds / len(languages) for seconds in setup["points"]]
        answers = []
        for language in languages:
            alone = f"{setup['override']};input.languages=['{language}']"
            more = {"points": points, "languages": [language], "override": alone}
            answers.append(self._train(directory / language, setup | more))
        return [quality_report.together(parts) for parts in zip(*answers, strict=True)]

    def _train(self, directory: Path, setup: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs a contender's process, which goes on where an earlier one was stopped; returns what it reported."""
        import shutil

        from lingvo_moe.core.console.waiting import LineProgress

        data = self._data.directory
        paths = {
            "run": str(directory / "run"),
            "directory": str(directory),
            "data": str(data),
            "held_out": str(data / "held_out.json"),
        }
        file, is_peer = directory / "setup.json", "learning_rate" in setup
        if is_peer or not file.is_file() or json.loads(file.read_text()) != {**setup, **paths}:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        files.write_json(file, {**setup, **paths})
        if is_peer:
            command = [self._args.peers, str(ROOT / "benchmarks" / "peers" / "train_joeynmt.py")]
        else:
            command = [sys.executable, "-m", "benchmarks.quality_worker"]
        answers: list[dict[str, Any]] = []
        log = directory / "log.txt"
        print(f"{directory.name}: what it does is in {log}", file=sys.stderr, flush=True)
        with (
            LineProgress() as show,
            Process(directory.name, [*command, str(file)], threads=1, log=log) as process,
        ):
            while not answers or answers[-1]["kind"] != "end":
                answer = json.loads(process.Line("{"))
                if answer["kind"] != "progress":
                    answers.append(answer)
                if answer["kind"] != "end":
                    show(quality_report.progress(directory.name, answer, setup["points"][-1]))
        return answers

    def _scores(self, name: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """The curve, BLEU and chrF of what a contender reported.

        Raises:
            ValueError: its loss is of another number of tokens.
        """
        from benchmarks.quality_data import decode_pieces
        from lingvo_moe.tasks.mt.quality import scoring

        *points, end = answers
        for point in points:
            if point["tokens"] != self._data.tokens:
                raise ValueError(
                    f"{name}: its loss is of {point['tokens']} target tokens, not of {self._data.tokens}"
                )
        if "pieces" in end:
            lines = decode_pieces(self._target, end["pieces"])
        else:
            lines = end["hypotheses"]
        rest = iter(lines)
        report = scoring.evaluate(
            lambda sources, _: [next(rest) for _ in sources],
            self._data.held_out.items(),
            self._data.train_pairs,
        )
        report.Write(self._out / name / "eval")
        return {
            "curve": [quality_report.point(p) for p in points],
            "parameters": end["parameters"],
            "version": end["version"],
            "average": report.Average(),
            "languages": {k: r.ToDict() for k, r in report.languages.items()},
            "signatures": report.signatures,
        }


if __name__ == "__main__":
    _cli.run(main)
