"""Who is routed where: for each MoE layer of a trained model, the share of each language's tokens at each expert.

    python -m tools.report --logdir=RUN --data_dir=CORPUS
    python -m tools.report --logdir=RUN --languages=de,fr,sw --out=routing.html --png_dir=pictures

Runs the model over the held-out pairs of CORPUS/dev, as in inference, and leaves a page with a picture of each
layer, the numbers beside it (.json), and if asked the pictures alone.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tools import _cli


def main(argv: list[str] | None = None) -> int:
    parser = _cli.Parser(prog="python -m tools.report", description=__doc__)
    add = parser.add_argument
    add("--logdir", metavar="RUN", required=True, help="a run, as given to the trainer")
    add("--data_dir", metavar="CORPUS", help="the pairs (default: what RUN trained on)")
    add(
        "--languages",
        type=_cli.names,
        default=(),
        help="e.g. de,sw (default: all that have dev pairs)",
    )
    add("--max_per_language", type=int, help="dev pairs of a language (default: all)")
    add("--checkpoint_step", type=int, help="which checkpoint (default: the newest)")
    add("--out", metavar="FILE", help="the page (default: RUN/routing.html)")
    add("--png_dir", metavar="DIR", help="also a picture of each layer there")
    add("--batch_size", type=int, default=16, help="packed rows at once (%(default)s)")
    add("--quiet", action="store_true", help="no progress on standard error")
    args = parser.parse_args(argv)
    _cli.check_at_least(parser, args, batch_size=1, max_per_language=1)
    try:
        return _run(args)
    except (ValueError, OSError) as e:
        print(f"report: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(args: Any) -> int:
    from lingvo_moe.tasks.mt.run_dir import RunDir

    run = RunDir(args.logdir)
    _ = run.experiment  # before anything slow: is it there?
    page = Path(args.out or Path(args.logdir) / "routing.html")
    _cli.check_output_file(page, "--out")
    if page.suffix == ".json":
        raise ValueError(f"--out={page}: the numbers go there; name the page, e.g. routing.html")
    if args.png_dir:
        _cli.check_output_directory(args.png_dir, "--png_dir")
    _cli.load_tensorflow()
    from lingvo_moe.core.engine.progress import LineProgress
    from lingvo_moe.core.files import write_atomic
    from lingvo_moe.tasks.mt import report as pages
    from lingvo_moe.tasks.mt import routing, routing_page
    from lingvo_moe.tasks.mt.input.dev_set import DevSet

    data_dir = args.data_dir or run.Params().input.data_dir
    devset = DevSet(data_dir, args.max_per_language, args.languages)
    with LineProgress() as show:
        found = routing.measure_routing(
            args.logdir,
            devset,
            args.checkpoint_step,
            args.batch_size,
            lambda n, all_: None if args.quiet else show(f"report: {n} of {all_} languages"),
        )
    found.about["data_dir"] = str(data_dir)
    written = [page, page.with_suffix(".json")]
    write_atomic(page, routing_page.html_report(found).encode())
    write_atomic(written[1], json.dumps(found.ToDict(), indent=1).encode() + b"\n")
    for layer in found.layers if args.png_dir else ():
        written.append(Path(args.png_dir) / f"{layer.name.replace('/', '_')}.png")
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        write_atomic(written[-1], pages.png(routing_page.plot_layer(layer, found)))
    _print_table(routing_page.table_of(found))
    print(f"written: {', '.join(map(str, written))}")
    return 0


def _print_table(rows: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [[row[0], *row[2:]] for row in rows]  # 80 columns: the page names the routers
    table = Table(*rows[0], box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
