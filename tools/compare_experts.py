"""Compares experts and routers: small models, trained on the demo's data at equal cost, side by side.

    python -m tools.compare_experts                     # everything: hours on two cores
    python -m tools.compare_experts --only=routers --steps=500

Trains every variant of a model for the same number of steps (those of balance for the same CPU seconds) on the same
batches, then measures its loss on held-out pairs. A token costs the same number of multiplications in each variant.
After an interruption the same command resumes. Writes results.json, a table and a picture of each group to the output
directory, and keeps each variant's run for TensorBoard and tools.report.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from lingvo_moe.reproduction import expert_comparison
from lingvo_moe.reproduction.expert_variants import GROUPS, STEPS, VARIANTS, Variant
from lingvo_moe.tasks.text.data import file_list
from lingvo_moe.tasks.text.data.errors import DataError

from . import _cli


def define_flags() -> Flags:
    flags = Flags("python -m tools.compare_experts", __doc__)
    flags.DEFINE_path("output", "compare", "directory for everything", portable=True)
    flags.DEFINE_path("corpus", "", "the pairs (default: OUTPUT/corpus, built if missing)")
    about = f"groups ({', '.join(GROUPS)}) or variants: {', '.join(VARIANTS)}"
    flags.DEFINE_list("only", (), about, {*GROUPS, *VARIANTS})
    flags.DEFINE_string("model", "", "the experiment to vary (default: the variant's own)")
    most = ", ".join(f"{group} {steps}" for group, steps in STEPS.items())
    flags.DEFINE_integer(
        "steps", None, f"training steps of each variant (default: {most})", checks.SIZE
    )
    flags.DEFINE_integer("batches", 60, "held-out batches", checks.SIZE)
    flags.DEFINE_string("engine", "tf", "the trainer's --engine")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    interrupted = "stopped; the same command resumes from here"
    return _cli.attempt("compare_experts", lambda: Comparison(args).Run(), interrupted)


def _chosen(names: tuple[str, ...]) -> list[str]:
    """The variants that these names of variants or groups select; all of them for no names."""
    return [
        name
        for name, variant in VARIANTS.items()
        if not names or name in names or {*variant.group.split()} & {*names}
    ]


class Comparison:
    """The steps of the experiment, in order."""

    def __init__(self, args: Flags):
        self._args = args
        self._out = Path(args.output)
        self._corpus = Path(args.corpus) if args.corpus else self._out / "corpus"
        self._start = time.monotonic()

    def Run(self) -> int:
        _cli.check_output_directory(self._out)
        self._out.mkdir(parents=True, exist_ok=True)
        self._build_corpus()
        chosen = _chosen(self._args.only)
        for number, name in enumerate(chosen, 1):
            self._say(f"[{number}/{len(chosen)}] {name}: {VARIANTS[name].says}")
            self._variant(name, VARIANTS[name])
        results = self._results()
        files.write_json(self._out / "results.json", results)
        for group in expert_comparison.groups(results):
            table = expert_comparison.table(results, group)
            picture = expert_comparison.picture(results, group)
            files.write_atomic(self._out / f"{group}.md", table.encode())
            files.write_atomic(self._out / f"{group}.svg", picture)
            print(table)
        _cli.made(self._out)
        return 0

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:4.0f} s] {text}", flush=True)

    def _build_corpus(self) -> None:
        from lingvo_moe.tasks.text.corpus.corpus import CorpusOptions, build_corpus

        if not self._corpus.exists():
            self._say("building the corpus from installed packages")
            build_corpus(self._corpus, CorpusOptions())

    def _variant(self, name: str, variant: Variant) -> None:
        run, result = self._out / name, self._out / name / "result.json"
        model, steps = self._args.model or variant.model, self._args.steps or variant.steps
        if self._is_done(result, steps):
            self._say(f"{name}: done before")
            return
        more = f"--engine={self._args.engine}", f"--max_steps={steps}"
        is_new, began = not run.exists(), os.times()
        _cli.train(model, self._corpus, run, [variant.override], *more)
        ended, measured = os.times(), self._measure(run)
        if is_new:  # the time of a part says nothing
            spent = sum(ended[2:4]) - sum(began[2:4])  # user and system time of children
            measured["cpu_seconds"] = round(spent)
        entry = {"says": variant.says, "group": variant.group, "experts": variant.experts}
        entry["most_steps"] = steps
        content = json.dumps({**entry, **measured}, indent=2).encode() + b"\n"
        file_list.write_listed(result, content)
        self._say(f"{name}: held-out loss {measured['held_out_nll']:.3f}")

    def _is_done(self, result: Path, steps: int) -> bool:
        """Whether a variant was measured after so many steps at most; reports a damaged result, and ignores it."""
        if not result.is_file():
            return False
        try:
            file_list.verify_listed(result, "it is measured again")
        except DataError as e:
            self._say(str(e))
            return False
        return json.loads(result.read_text()).get("most_steps") == steps

    def _measure(self, run: Path) -> dict[str, Any]:
        _cli.load_tensorflow()
        from lingvo_moe.core.engine.loop.summaries import read_metrics
        from lingvo_moe.core.task import inspect
        from lingvo_moe.tasks.text.quality.held_out_loss import held_out_loss
        from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
        from lingvo_moe.tasks.transformer.task import TransformerTask

        task = TextRunDir(run).Task(TransformerTask)
        held_out = held_out_loss(run, self._corpus, self._args.batches)
        rows = read_metrics(str(run / "train"))
        return {
            "steps": held_out.step,
            "params": inspect.count_parameters(task.VariableSpecs().Flatten()),
            "held_out_nll": float(held_out.nll),
            "held_out_accuracy": float(held_out.accuracy),
            "held_out_tokens": int(held_out.tokens),
            "train_nll": rows[-1]["nll"],
            **expert_comparison.routing(rows),
        }

    def _results(self) -> dict[str, Any]:
        """All measurements, of now and before, by variant. Raises DataError: a result is damaged."""
        files = {name: self._out / name / "result.json" for name in VARIANTS}
        files = {name: file for name, file in files.items() if file.is_file()}
        for name, file in files.items():
            file_list.verify_listed(file, f"measure it again with --only={name}")
        return {name: json.loads(file.read_text()) for name, file in files.items()}


if __name__ == "__main__":
    _cli.run(main)
