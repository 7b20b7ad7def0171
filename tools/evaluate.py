"""Scores a model on held-out pairs: sacreBLEU and chrF per language, by resource group and on average.

    python -m tools.evaluate --logdir=RUN --data_dir=CORPUS
    python -m tools.evaluate --saved_model=DIR --data_dir=CORPUS --languages=de,sw --output=scores
    python -m tools.evaluate --logdir=RUN --baselines=BILINGUAL --rescore

CORPUS holds <lang>.tsv.gz and dev/<lang>.tsv.gz. The output directory gets the scores, report.json; the lines for other
scorers, texts/<lang>.src, .ref and .hyp; and the same lines of all languages for comet-score, comet/. Groups are
thirds of the languages by their training pairs, or have the bounds of --resource_bounds. Scores have 95 % confidence
intervals, and those of languages with few lines are marked. --baselines compares with
bilingual models: BILINGUAL/<lang>/ is the run of one, scored by this command on the same pairs.
After Ctrl-C or another interruption the same command resumes.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingvo_moe.core.config import checks
from lingvo_moe.core.console import units
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.console.waiting import LineProgress
from lingvo_moe.core.files.copies import local
from lingvo_moe.tasks.mt.quality.intervals import TOKENIZERS

from . import _cli, _mesh, _models

if TYPE_CHECKING:  # they import NumPy
    from lingvo_moe.tasks.mt.quality.kept_translations import KeptTranslations, TranslateLines
    from lingvo_moe.tasks.mt.quality.scoring import EvalReport
    from lingvo_moe.tasks.text.data.dev_set import DevSet


def define_flags() -> Flags:
    flags = Flags("python -m tools.evaluate", __doc__)
    _cli.define_model_flags(flags)
    _cli.define_data_flag(flags)
    flags.DEFINE_list("languages", (), "e.g. de,sw (default: all that have dev pairs)")
    flags.DEFINE_integer(
        "max_per_language", None, "dev pairs of each language (default: all)", checks.SIZE
    )
    flags.DEFINE_path(
        "output",
        None,
        "the directory for report and texts (default: RUN/eval; none for a SavedModel)",
    )
    flags.DEFINE_parsed(
        "resource_bounds",
        None,
        "the least training pairs of a high-resource and of a mid-resource language (default: thirds of the languages)",
        _bounds,
        "HIGH,MID",
    )
    flags.DEFINE_enum(
        "bleu_tokenizer",
        None,
        TOKENIZERS,
        "sacreBLEU's tokenizer of BLEU; flores200 is spBLEU (default: that of the target language)",
    )
    flags.DEFINE_path("baselines", None, "directory of bilingual runs or reports, by language")
    flags.DEFINE_boolean(
        "rescore", False, "score the texts that an earlier evaluation left in the output directory"
    )
    flags.DEFINE_integer("batch_size", 256, "lines translated at once", checks.SIZE)
    _cli.define_quiet_flag(flags)
    _cli.define_search_flags(flags)
    _mesh.define_flags(flags)
    translating = " ".join((*_cli.OF_RUNS, *_mesh.NAMES, "batch_size"))
    flags.OnlyWith(translating, "nothing is translated", rescore=False)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    resumes = "; the same command resumes from there" if _output(args) and not args.rescore else ""
    return _mesh.attempt("evaluate", lambda: _run(args), f"stopped{resumes}")


def _bounds(text: str) -> tuple[int, int]:
    try:
        high, mid = map(int, text.split(","))
    except ValueError:
        raise ValueError("must be two numbers, HIGH,MID, e.g. 100000,10000") from None
    if not high > mid > 0:
        raise ValueError("HIGH must be more than MID, and MID more than 0")
    return high, mid


def _run(args: Flags) -> int:
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

    output = _output(args)
    several = bool(args.logdir) and len(_cli.logdirs(args)) > 1
    if several and not (args.output and args.data_dir):
        raise ValueError(f"--logdir={args.logdir}: several runs need --output and --data_dir")
    if output:
        if not args.output:
            TextRunDir(args.logdir).Inside(output.name)
        _cli.check_output_directory(output)
    from lingvo_moe.tasks.mt.quality import scoring
    from lingvo_moe.tasks.mt.quality.baselines import add_baselines, read_baselines
    from lingvo_moe.tasks.mt.quality.kept_translations import KeptTranslations, identity_of
    from lingvo_moe.tasks.text.data.dev_set import DevSet
    from lingvo_moe.tasks.text.data.prepared import target_language

    data_dir = args.data_dir or _data_of_run(args)
    devset = DevSet(data_dir, args.max_per_language, args.languages)
    pairs = scoring.count_train_pairs(data_dir, devset.languages)
    if args.resource_bounds and pairs is None:
        raise ValueError(f"--resource_bounds: {data_dir} has no training pairs to count")
    baselines = read_baselines(args.baselines, devset.items()) if args.baselines else {}
    translate, about = _rescored(output, devset) if args.rescore else _translating(args)
    translations = KeptTranslations(translate)
    if output and not args.rescore:
        identity = identity_of(args.Values(), about)
        translations = KeptTranslations(translate, output / ".partial", identity)
    with LineProgress() as show:
        report = scoring.evaluate(
            translations,
            devset.items(),
            pairs,
            scoring.EvalOptions(
                args.batch_size,
                args.resource_bounds,
                about.get("target_language") or target_language(data_dir),
                args.bleu_tokenizer,
            ),
            None if args.quiet else lambda n, all_: show(_progress(translations, n, all_)),
        )
    report.seconds = translations.seconds
    report.info = {"model": about, "data_dir": str(data_dir)}
    if output:
        report.Write(output)  # before the baselines, which may have been scored in another way
        translations.Clear()
    add_baselines(report, baselines)
    if output and args.baselines:
        report.info["baselines"] = str(args.baselines)
        report.Write(output)
    _print_scores(report)
    missing = [lang for lang in devset.languages if lang not in baselines]
    if missing and args.baselines:
        print(f"no baseline: {', '.join(missing)}")
    if output:
        command = f"python -m tools.report --logdir={args.logdir} --eval_dir={output}"
        files = (Path(output) / name for name in ("report.json", "texts", "comet"))
        _cli.made(*files, next=command if args.logdir and not several else "")
    return 0


def _output(args: Flags) -> Path | None:
    """The directory of the report; None for no report."""
    if args.output:
        return Path(args.output)
    return local(args.logdir) / "eval" if args.logdir else None


def _progress(translations: "KeptTranslations", done: int, lines: int) -> str:
    text = f"evaluate: {done:,} of {lines:,} lines"
    if translations.reused:
        text += f", {translations.reused:,} of them translated before"
    if done < lines:
        seconds = translations.seconds / done * (lines - done)
        text += f", {units.clock(seconds)} left"
    return text


def _translating(args: Flags) -> "tuple[TranslateLines, dict[str, Any]]":
    """Returns the function that translates lines, and a description of the model."""
    _mesh.load_tensorflow(args)
    translator, about = _models.open_translator(args)
    return (
        lambda lines, langs: [row[0] for row in translator.Translate(lines, langs).translations],
        about,
    )


def _rescored(output: Path | None, devset: "DevSet") -> "tuple[TranslateLines, dict[str, Any]]":
    """Gives the translations of an earlier evaluation in place of a translator."""
    from lingvo_moe.tasks.mt.quality.scoring import read_translations, verify_scores

    if output is None:
        raise ValueError("--rescore: name the directory of an earlier evaluation as --output")
    translations, replaced = read_translations(Path(output) / "texts", devset.items())
    rest = iter(translations)
    before = Path(output) / "report.json"
    about = {}  # report.Write alone does not know what the model was
    if before.is_file():
        verify_scores(output, [before.name], warn=False)  # read_translations did
        try:
            about = json.loads(before.read_text("utf-8")).get("model", {})
        except (ValueError, AttributeError) as e:
            raise ValueError(f"{before}: no report of tools.evaluate, or damaged ({e})") from None
    if replaced:
        files = ", ".join(f"{lang}.hyp" for lang in replaced)
        say(
            f"evaluate: {files} in {output}/texts: not as written there; scored as another system's"
        )
        about = {
            "texts": f"other translations of {', '.join(replaced)}",
            "target_language": about.get("target_language"),
        }
    return lambda lines, langs: list(itertools.islice(rest, len(lines))), about


def _data_of_run(args: Flags) -> str:
    if not args.logdir:
        raise ValueError(
            "--data_dir is needed with --saved_model: a directory with dev/<lang>.tsv.gz"
        )
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

    with _cli.quiet_imports():  # the experiment's modules are TensorFlow's first users
        inputs = TextRunDir(args.logdir, trust_run=args.trust_run).Params().input
    return _cli.data_dir(args, inputs)


def _print_scores(report: "EvalReport") -> None:
    from lingvo_moe.core.pages.tables import show
    from lingvo_moe.tasks.mt.quality import intervals
    from lingvo_moe.tasks.mt.reports import score_tables

    scores = report.ToDict()
    for table in (score_tables.by_language(scores), score_tables.by_group(scores)):
        show(table)
        print()
    print(intervals.footnote(), *report.signatures.values(), sep="\n")


if __name__ == "__main__":
    _cli.run(main)
