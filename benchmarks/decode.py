"""Decoding on a CPU, here and in CTranslate2 and Hugging Face, in one run.

    python -m benchmarks.decode --peers=PEERS/bin/python

6+6 layers, d 512, ff 2048, 8 heads, vocabulary 32,000, random weights, float32, one thread; sources of 30
tokens, exactly 30 tokens out; batches of 1 and 32, greedy and with a beam of 4; and 32 sources of 5 to 60
tokens, with as many out for each, and for all as many as for the longest. Each contender is a process of its
own, alone on its core while it runs: they take steps in turn, and the table has each one's least CPU time.
PEERS is the environment that benchmarks/install_peers.sh makes; without it only our own contenders run.
--update writes the table into docs/speed.md.

    python -m benchmarks.decode --from=DIR --peers=PEERS/bin/python --batches=1,8

has all contenders translate with the weights of one checkpoint, which benchmarks/peers/decode_peers.py made: imported
here, and converted by CTranslate2. What those of float32 find greedily for the first line must be the same ids; a beam
ends by other rules in each.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compile_time import host
from benchmarks.contenders import (
    ROOT,
    Contender,
    define_contender_flags,
    import_published,
    kinds_of,
    take_turns,
    update_page,
)
from benchmarks.decode_kinds import NAMES, OURS, PEERS
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.pages.tables import Table, markdown, words
from tools import _cli

PAGE = ROOT / "docs" / "speed.md"
SIZE = {
    "model_dim": 512,
    "hidden_dim": 2048,
    "num_heads": 8,
    "vocab_size": 32000,
    "num_layers": 6,
    "num_experts": 8,
}
_BATCHES = ("1", "8", "32", "mixed")
# Contenders that translate with the weights of a checkpoint; those of float32 come first.
_OF_CHECKPOINTS = ("here", "ct2", "hf", "here_int8", "ct2_int8")
MIXED = [5 + 55 * i // 31 for i in range(32)]


def _setting(
    beam: int, sources: list[int], targets: list[int], only: Sequence[str] = ()
) -> dict[str, Any]:
    return {
        "batch": len(sources),
        "beam": beam,
        "source_lengths": sources,
        "target_lengths": targets,
        "only": only,
    }


SETTINGS = {
    "1, greedy": _setting(1, [30], [30]),
    "1, beam 4": _setting(4, [30], [30]),
    "8, greedy": _setting(1, [30] * 8, [30] * 8),
    "8, beam 4": _setting(4, [30] * 8, [30] * 8),
    "32, greedy": _setting(1, [30] * 32, [30] * 32),
    "32, beam 4": _setting(4, [30] * 32, [30] * 32),
    "32 of 5 to 60, as many out, beam 4": _setting(4, MIXED, MIXED, ["here", "hf"]),
    "32 of 5 to 60, 60 out, beam 4": _setting(4, MIXED, [60] * 32, ["here"]),
}


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.decode", __doc__)
    define_contender_flags(flags, OURS, PEERS)
    flags.DEFINE_path("from", None, "a checkpoint of benchmarks/peers/decode_peers.py")
    flags.DEFINE_list("batches", ("1", "32", "mixed"), f"some of {','.join(_BATCHES)}", _BATCHES)
    flags.DEFINE_integer("rounds", 8, "timed steps of each contender", checks.SIZE)
    flags.DEFINE_boolean("update", False, f"write the table into {PAGE.relative_to(ROOT)}")
    flags.Refuse(["from", "only"], _others)
    flags.OnlyWith("update", "the page has the table of random weights", **{"from": False})
    return flags


def _others(values: Mapping[str, Any]) -> str:
    """Says that some contenders do not go with --from; '' where all do."""
    others = [name for name in values["only"] if name not in _OF_CHECKPOINTS]
    if not values["from"] or not others:
        return ""
    return f"--only={others[0]} has random weights; with --from it is some of {', '.join(_OF_CHECKPOINTS)}"


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("decode", lambda: _run(args), "interrupted; nothing was written")


def _run(args: Flags) -> int:
    names, checkpoint = kinds_of(args, OURS, PEERS), getattr(args, "from")
    points: dict[str, list[Contender]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        sizes = SIZE
        if checkpoint:
            names = tuple(kind for kind in _OF_CHECKPOINTS if kind in names)
            sizes = _prepare(args, names, Path(checkpoint), Path(scratch))
        for name, setting in SETTINGS.items():
            if ("mixed" if " of " in name else str(setting["batch"])) in args.batches:
                kinds = [kind for kind in names if _can(kind, setting)]
                points[name] = measure(args, kinds, {**sizes, **setting, "threads": 1})
                print(table({name: points[name]}, args.rounds), file=sys.stderr, flush=True)
                if checkpoint and setting["beam"] == 1:
                    _check_same(points[name])
    text = table(points, args.rounds)
    print(text)
    if args.update:
        update_page(PAGE, "benchmarks.decode", f"{text}\nMeasured on {host()}.")
    return 0


def _prepare(args: Flags, names: Sequence[str], checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """Imports a checkpoint and converts it. Returns the sizes that contenders are given."""
    size = {"checkpoint": str(checkpoint.resolve()), "threads": 1}
    size |= {"run": str(scratch / "run"), "converted": str(scratch / "converted")}
    size["vocab_size"] = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    import_published(checkpoint, scratch / "run")
    if any(name.startswith("ct2") for name in names):
        command = [*_script(args, "ct2"), "convert", json.dumps(size)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise ChildProcessError("CTranslate2 did not convert the checkpoint; see above")
    return size


def _check_same(contenders: Sequence[Contender]) -> None:
    """Raises ChildProcessError: two contenders of float32 gave the first line other ids."""
    ids = {c.name: c.answers[0]["ids"] for c in contenders if not c.name.endswith("int8")}
    for name, found in ids.items():
        if found != next(iter(ids.values())):
            raise ChildProcessError(f"other ids came out of {name}: {ids}")


def _can(kind: str, setting: dict[str, Any]) -> bool:
    """Whether it is measured in this setting: without caches there is greedy search alone."""
    if setting["only"] and kind not in setting["only"]:
        return False
    return setting["beam"] == 1 or kind in PEERS or not OURS[kind].full


def measure(args: Flags, kinds: list[str], size: dict[str, Any]) -> list[Contender]:
    """All of these kinds at one setting."""
    commands = {kind: [*_script(args, kind), kind, json.dumps(size)] for kind in kinds}
    return take_turns(commands, size["threads"], args.rounds)


def _script(args: Flags, kind: str) -> list[str]:
    if kind in PEERS:
        return [args.peers, str(ROOT / "benchmarks" / "peers" / "decode_peers.py")]
    return [sys.executable, "-m", "benchmarks.decode_worker"]


def least(contender: Contender) -> float:
    """The least CPU time of a step."""
    return min(answer["cpu_seconds"] for answer in contender.answers)


def table(points: dict[str, list[Contender]], rounds: int) -> str:
    """Markdown: CPU seconds and tokens a CPU second for each setting; and the first call's time."""
    rows = []
    for kind, name in NAMES.items():
        cells, first = [], "-"
        for setting, contenders in points.items():
            own = [c for c in contenders if c.name == kind]
            if own:
                seconds = least(own[0])
                cells.append(f"{seconds:.3f} ({own[0].answers[0]['tokens'] / seconds:,.0f})")
                if setting == "1, beam 4":
                    first = f"{own[0].about['first_seconds']:.1f}"
            else:
                cells.append("-")
        if set(cells) != {"-"}:
            rows.append([name, *cells, first])
    about = f"CPU seconds, the least of {rounds}, and tokens a CPU second; one thread, float32 but for int8."
    heads = words("batch", *points, "first call, batch 1, beam 4")
    return f"{about}\n\n{markdown(Table(heads, rows))}"


if __name__ == "__main__":
    _cli.run(main)
