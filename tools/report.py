"""Writes one HTML file about a run: scores, curves, sample translations, and the experts of each language.

    python -m tools.report --logdir=RUN
    python -m tools.report --logdir=RUN --data_dir=CORPUS --languages=de,fr,sw --out=report.html --png_dir=pictures

The page shows the scores and translations that tools.evaluate wrote to RUN/eval, the curves of the trainer's summaries,
and for each MoE layer the share of each language's tokens at each expert, measured by running the model on the held-out
pairs of CORPUS/dev. For a missing part it names the command that makes it. The numbers are in a .json file next to the
page.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.command import as_typed
from lingvo_moe.core.console.flags import Flags, same_place

from . import _cli

if TYPE_CHECKING:  # they import NumPy
    from lingvo_moe.tasks.mt.reports.routing import RoutingReport
    from lingvo_moe.tasks.mt.reports.run_report import Missing
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir


def define_flags() -> Flags:
    flags = Flags("python -m tools.report", __doc__)
    _cli.define_logdir_flag(flags)
    _cli.define_data_flag(flags)
    flags.DEFINE_list(
        "languages",
        (),
        "measure the routing of these, e.g. de,sw (default: all that have dev pairs)",
    )
    flags.DEFINE_integer(
        "max_per_language", None, "dev pairs of each language (default: all)", checks.SIZE
    )
    flags.DEFINE_boolean("no_routing", False, "do not run the model")
    flags.DEFINE_path("eval_dir", None, "what tools.evaluate wrote (default: RUN/eval)")
    flags.DEFINE_integer("samples", 4, "sample translations of each kind", checks.SIZE)
    flags.DEFINE_integer("seed", 0, "seed for drawing the sample translations", checks.COUNT)
    _cli.define_run_flags(flags)
    flags.DEFINE_path("out", None, "the page to write (default: RUN/report.html)")
    flags.DEFINE_path("png_dir", None, "also write a picture of each layer to this directory")
    flags.DEFINE_path(
        "tables_dir",
        None,
        "also write encoder.npy and decoder.npy to this directory: the experts that each token id is sent to most, for "
        "a run with task.moe.router=hash;task.moe.router.table=file",
    )
    flags.DEFINE_integer("batch_size", 16, "packed rows at once", checks.SIZE)
    _cli.define_quiet_flag(flags)
    flags.Refuse(["out", "png_dir"], same_place)
    measuring = "data_dir languages max_per_language batch_size png_dir tables_dir"
    checkpoint = "checkpoint_step average_last use_ema"
    flags.OnlyWith(f"{measuring} {checkpoint} quiet", "the model is not run", no_routing=False)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("report", lambda: _run(args))


def _run(args: Flags) -> int:
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

    run = TextRunDir(args.logdir, trust_run=args.trust_run)
    _ = run.experiment  # before anything slow: is it there?
    page = Path(args.out) if args.out else run.Inside("report.html")
    numbers = page.with_suffix(".json") if args.out else run.Inside("report.json")
    for file in (page, numbers):
        _cli.check_output_file(file, "--out")
    if page.suffix == ".json":
        raise ValueError(f"--out={page}: the numbers go there; name the page, e.g. report.html")
    for name in ("png_dir", "tables_dir"):
        if directory := getattr(args, name):
            _cli.check_output_directory(directory, f"--{name}")
    if args.eval_dir and not Path(args.eval_dir).is_dir():
        raise ValueError(f"--eval_dir={args.eval_dir}: no such directory")
    _cli.load_tensorflow()
    import numpy as np

    from lingvo_moe.core.files.files import write_atomic, write_json
    from lingvo_moe.core.pages import drawing
    from lingvo_moe.core.pages.tables import show
    from lingvo_moe.tasks.mt.reports import report_page, routing_page
    from lingvo_moe.tasks.mt.reports.run_report import Missing, gather

    routing = _routing(args, run)
    gathered = gather(args.logdir, routing, args.eval_dir, args.samples, args.seed, args.trust_run)
    written = [page, numbers]
    write_atomic(page, report_page.html_report(gathered).encode("utf-8", "replace"))
    write_json(numbers, gathered.ToDict())
    if not isinstance(routing, Missing):
        for layer in routing.layers if args.png_dir else ():
            written.append(Path(args.png_dir) / f"{layer.name.replace('/', '_')}.png")
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            picture = drawing.png(routing_page.plot_layer(layer, routing))
            write_atomic(written[-1], picture)
        for stack, table_LV in routing.tables.items():
            written.append(Path(args.tables_dir) / f"{stack}.npy")
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            np.save(written[-1], table_LV)
        show(routing_page.table_of(routing), wide=False)
    for what in ("metrics", "scores", "routing"):
        missing = getattr(gathered, what)
        if isinstance(missing, Missing):
            print(as_typed(f"no {what}: {missing.why}; {missing.command}").removesuffix("; "))
    _cli.made(*written, next=f"python -m tools.serve --logdir={args.logdir}")
    return 0


def _routing(args: Flags, run: "TextRunDir") -> "RoutingReport | Missing":
    """The RoutingReport of the run's model, or why there is none."""
    from lingvo_moe.core.console.waiting import LineProgress
    from lingvo_moe.tasks.mt.mt_model import MtModel
    from lingvo_moe.tasks.mt.reports import routing
    from lingvo_moe.tasks.mt.reports.run_report import Missing
    from lingvo_moe.tasks.text.data.dev_set import DevSet

    command = f"python -m tools.report --logdir={args.logdir}"
    if args.no_routing:
        return Missing("the model was not run", command)
    if not run.Task(MtModel).Metrics().Layers():
        return Missing("the model is dense, nothing is routed")
    try:
        data_dir = _cli.data_dir(args, run.Params().input)
        devset = DevSet(data_dir, args.max_per_language, args.languages)
    except ValueError as e:
        if args.data_dir or args.languages:  # which were asked for
            raise
        return Missing(str(e), f"{command} --data_dir=CORPUS")
    with LineProgress() as show:
        measured = routing.measure_routing(
            run,
            devset,
            _cli.chosen(args),
            rows=args.batch_size,
            progress=lambda n, all_: (
                None if args.quiet else show(f"report: {n} of {all_} languages")
            ),
            with_tables=bool(args.tables_dir),
        )
    measured.about["data_dir"] = str(data_dir)
    return measured


if __name__ == "__main__":
    _cli.run(main)
