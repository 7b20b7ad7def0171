"""Writes docs/reproduction.md, which compares the paper's systems claims with plans of the same models;
docs/validation.md, which holds plans against steps that others measured; and docs/open_models.md, plans of published
language models.

    python -m tools.reproduce                     # the pages, from recorded plans
    python -m tools.reproduce --plans             # makes every plan again and compares: hours
    python -m tools.reproduce --plans --only=M4MoE2048E36L-v3_32x32 --update

Recorded plans are docs/plans/NAME.json; `--list` lists their names. The exit status is 0, or 1 for a
mistake, for plans that are missing, or for new plans that differ from the recorded ones.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from lingvo_moe.reproduction import goldens, making, open_models, published, requests

from . import _cli

# Plans of the page on reproduction, of published steps, and of published models.
REQUESTS = {**requests.REQUESTS, **published.REQUESTS, **open_models.REQUESTS}
GROUPS = {
    **requests.GROUPS,
    "published": tuple(published.REQUESTS),
    "open": tuple(open_models.REQUESTS),
}
DOCS = Path(__file__).resolve().parent.parent / "docs"


def define_flags() -> Flags:
    flags = Flags("python -m tools.reproduce", __doc__)
    flags.DEFINE_path("docs", str(DOCS), "directory with the pages and plans/")
    flags.DEFINE_boolean("list", False, "list all plans, and whether each is recorded")
    flags.DEFINE_boolean("plans", False, "make the plans again instead of the pages")
    about = f"with --plans: only these, by names of plans or of groups: {', '.join(GROUPS)}"
    flags.DEFINE_list("only", (), about, {*REQUESTS, *GROUPS})
    flags.DEFINE_boolean("missing", False, "with --plans: only those that are not recorded")
    flags.DEFINE_boolean("update", False, "with --plans: record the new plans")
    _cli.define_cache_flag(flags)
    flags.OnlyWith("only missing update cache_dir", plans=True)
    flags.OnlyWith("plans", list=False)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    interrupted = "interrupted; plans that were recorded are kept"
    return _cli.attempt("reproduce", lambda: _run(args), interrupted)


def _run(args: Flags) -> int:
    names = chosen(args.only)
    if args.list:
        return show_list(Path(args.docs) / "plans")
    return make_plans(args, names) if args.plans else write_page(args)


def chosen(only: Sequence[str]) -> list[str]:
    """The plans that --only names; all, where it names none."""
    names = (plan for name in only or REQUESTS for plan in GROUPS.get(name, (name,)))
    return list(dict.fromkeys(names))


def show_list(directory: Path) -> int:
    """Prints every plan with its model and topology, and marks those that are recorded."""
    for name, wanted in REQUESTS.items():
        mark = "x" if goldens.path_of(directory, name).exists() else " "
        kind = "" if wanted.what == "train" else f", {wanted.what}"
        override = f", {wanted.override}" if wanted.override else ""
        print(f"[{mark}] {name}: {wanted.model} on {wanted.topology}{kind}{override}")
    return 0


def write_page(args: Flags) -> int:
    """Writes each page of which plans are recorded."""
    from lingvo_moe.reproduction import page, validation

    docs = Path(args.docs)
    plans = docs / "plans"
    recorded = goldens.read_all(plans, requests.REQUESTS)
    pages = {"reproduction.md": page.write(recorded, goldens.read(plans, goldens.COMPILE_TIME))}
    if any(goldens.path_of(plans, name).exists() for name in published.REQUESTS):
        pages["validation.md"] = validation.page(plans)
    if any(goldens.path_of(plans, name).exists() for name in open_models.REQUESTS):
        pages["open_models.md"] = open_models.page(plans)
    for name, text in pages.items():
        files.write_atomic(docs / name, text.encode())
    _cli.made(*(docs / name for name in pages))
    return 0


def make_plans(args: Flags, names: list[str]) -> int:
    """Makes plans, compares them with the recorded ones, and records them where asked to."""
    directory = Path(args.docs) / "plans"
    _cli.plan_cache(args.cache_dir)  # before any work: can it be written?
    if args.missing:
        names = [name for name in names if not goldens.path_of(directory, name).exists()]
    bad, started = [], time.monotonic()
    for i, name in enumerate(names, 1):
        wanted = REQUESTS[name]
        print(f"[{i}/{len(names)}] {name}: {wanted.model} on {wanted.topology}", flush=True)
        try:
            plan = making.in_own_process(name, make_one, name, args.cache_dir)
        except making.MakingFailed as e:
            print(f"    {e}", flush=True)
            bad.append(name)
            continue
        recorded = goldens.read(directory, name)
        different = (
            ["it was not recorded"] if recorded is None else goldens.differences(recorded, plan)
        )
        for line in different:
            print(f"    {line}", flush=True)
        if args.update:
            goldens.write(directory, name, plan)
        elif different:
            bad.append(name)
    minutes = (time.monotonic() - started) / 60
    done = "recorded" if args.update else "as recorded"
    print(f"{len(names) - len(bad)} of {len(names)} plans {done}, {minutes:.0f} min")
    if bad:
        print(f"not {done}: {', '.join(bad)}", file=sys.stderr)
        if not args.update:
            print("--update records plans that differ", file=sys.stderr)
    return 1 if bad else 0


def make_one(path: Path, name: str, cache_dir: str | None) -> None:
    """Writes the plan of a request to `path`; runs in a process of its own."""
    cache = _cli.plan_cache(cache_dir)
    with _cli.CompilerProgress() as progress:

        def make() -> Any:
            _cli.load_tensorflow()
            return making.make_plan(REQUESTS[name], cache, progress)

        plan = progress.Watch(make)
    files.write_json(path, plan)


if __name__ == "__main__":
    _cli.run(main)
