"""Scores a model on held-out pairs: sacreBLEU and chrF per language, by resource group and on average.

    python -m tools.evaluate --logdir=RUN --data_dir=CORPUS
    python -m tools.evaluate --saved_model=DIR --data_dir=CORPUS --languages=de,sw --output=scores

CORPUS holds <lang>.tsv.gz and dev/<lang>.tsv.gz. DIR/report.json gets the scores, and DIR/texts/<lang>.src,
.ref and .hyp the lines, for other scorers. Groups are thirds of the languages by their training pairs.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tools import _cli


def main(argv: list[str] | None = None) -> int:
    parser = _cli.Parser(prog="python -m tools.evaluate", description=__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--saved_model", metavar="DIR", help="what tools.export wrote")
    model.add_argument("--logdir", metavar="RUN", help="a run, as given to the trainer")
    parser.add_argument(
        "--data_dir", metavar="CORPUS", help="the pairs (default: what RUN trained on)"
    )
    parser.add_argument(
        "--languages",
        type=_cli.names,
        default=(),
        help="e.g. de,sw (default: all that have dev pairs)",
    )
    parser.add_argument(
        "--max_per_language", type=int, help="dev pairs of a language (default: all)"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="report and texts (default: RUN/eval; nothing for a SavedModel)",
    )
    parser.add_argument("--batch_size", type=int, default=256, help="lines at once (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    _cli.add_search_flags(parser)
    args = parser.parse_args(argv)
    _cli.check_at_least(parser, args, batch_size=1, max_per_language=1)
    try:
        return _run(args)
    except (ValueError, OSError) as e:
        print(f"evaluate: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(args: Any) -> int:
    output = args.output or (Path(args.logdir) / "eval" if args.logdir else None)
    if output:
        _cli.check_output_directory(output)
    _cli.load_tensorflow()
    from lingvo_moe.core.engine.progress import LineProgress
    from lingvo_moe.core.files import write_atomic
    from lingvo_moe.tasks.mt import scoring
    from lingvo_moe.tasks.mt.input.dev_set import DevSet

    data_dir = args.data_dir or _data_of_run(args.logdir)
    devset = DevSet(data_dir, args.max_per_language, args.languages)
    pairs = scoring.count_train_pairs(data_dir, devset.languages)
    translator, about = _cli.open_translator(args)
    with LineProgress() as show:
        report = scoring.evaluate(
            lambda lines, langs: [
                row[0] for row in translator.Translate(lines, langs).translations
            ],
            devset.items(),
            pairs,
            args.batch_size,
            None if args.quiet else lambda n, all_: show(f"evaluate: {n} of {all_} lines"),
        )
    report.info = {"model": about, "data_dir": str(data_dir)}
    if output:
        report.WriteTexts(Path(output) / "texts")
        content = json.dumps(report.ToDict(), indent=2, ensure_ascii=False)
        write_atomic(Path(output) / "report.json", content.encode() + b"\n")
    _print_table(report, scoring.GROUPS)
    if output:
        print(f"written: {output}/report.json, {output}/texts/")
    return 0


def _data_of_run(logdir: str | None) -> str:
    if not logdir:
        raise ValueError(
            "--data_dir is needed with --saved_model: a directory with dev/<lang>.tsv.gz"
        )
    from lingvo_moe.tasks.mt.run_dir import RunDir

    return RunDir(logdir).Params().input.data_dir


def _print_table(report: Any, groups: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Scores per language", title_justify="left")
    for name in ("language", "group"):
        table.add_column(name)
    for name in ("training pairs", "dev pairs", "BLEU", "chrF"):
        table.add_column(name, justify="right")
    for lang, r in sorted(report.languages.items(), key=lambda item: -item[1].train_pairs):
        table.add_row(
            lang,
            r.group,
            f"{r.train_pairs:,}",
            f"{len(r.references):,}",
            f"{r.bleu:.1f}",
            f"{r.chrf:.1f}",
        )
    table.add_section()
    for group in (*(g for g in groups if report.Average(g)["languages"]), ""):
        mean = report.Average(group)
        label = f"mean of {mean['languages']}"
        table.add_row(label, group or "all", "", "", f"{mean['bleu']:.1f}", f"{mean['chrf']:.1f}")
    console = Console()
    console.print(table)
    for signature in report.signatures.values():
        console.print(signature, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
