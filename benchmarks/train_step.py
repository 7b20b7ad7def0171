"""A whole training step of a small translation model with experts, here and in PyTorch, in one run.

    python -m benchmarks.train_step --peers=PEERS/bin/python

4+4 layers, every second one with experts, M=256, H=1024, 8 heads, vocabulary 8192, 32 rows of 64 + 64
tokens, E=16, top-2, capacity factor 2, float32, Adafactor, label smoothing 0.1: forward, backward and
update. Each contender is a process of its own on one core, which the others leave alone while it runs:
they take steps in turn, and the table gives medians over the rounds. `--update` writes it into the page.
PEERS is the environment that benchmarks/install_peers.sh makes; without it only our own engines run.
"""

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.compile_time import host
from benchmarks.contenders import (
    ROOT,
    Contender,
    define_contender_flags,
    kinds_of,
    take_turns,
    update_page,
)
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.pages.tables import Table, markdown, words
from tools import _cli

PAGE = ROOT / "docs" / "speed.md"

OURS = {
    "tf_graph": "here, `--engine=tf_graph`",
    "tf": "here, `--engine=tf` (XLA)",
    "pjrt": "here, `--engine=pjrt` (XLA)",
    "tf_graph_dense": "here, `--engine=tf_graph`, no experts",
}
PEERS = {
    "torch_moe": "PyTorch, batched experts",
    "hf_nllb_moe": "Hugging Face NLLB-MoE",
    "torch_dense": "PyTorch, no experts",
}
NAMES = {**OURS, **PEERS}
SIZE: dict[str, Any] = {
    "model_dim": 256,
    "hidden_dim": 1024,
    "num_heads": 8,
    "vocab_size": 8192,
    "num_layers": 4,
    "num_experts": 16,
    "batch": 32,
    "length": 64,
    "label_smoothing": 0.1,
}


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.train_step", __doc__)
    define_contender_flags(flags, OURS, PEERS)
    flags.DEFINE_integer("rounds", 7, "timed steps of each contender", checks.SIZE)
    flags.DEFINE_float(
        "dropout", 0.0, "dropout of embeddings, residuals, hidden layers", checks.NOT_NEGATIVE
    )
    flags.DEFINE_integer("threads", 1, "cores for each contender", checks.SIZE)
    flags.DEFINE_boolean("update", False, f"write the table into {PAGE.relative_to(ROOT)}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    kinds = kinds_of(args, OURS, PEERS)
    interrupted = "interrupted; nothing was written"
    return _cli.attempt("train_step", lambda: _run(args, kinds), interrupted)


def _run(args: Flags, kinds: Sequence[str]) -> int:
    size = {**SIZE, "dropout": args.dropout, "threads": args.threads}
    contenders = run(kinds, args.peers, size, args.rounds)
    text = table(contenders, size, args.rounds)
    print(text)
    if args.update:
        update_page(PAGE, "benchmarks.train_step", f"{text}\nMeasured on {host()}.")
    bad = [c.name for c in contenders if not learns(c)]
    if bad:
        print(f"train_step: no loss that falls: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def run(kinds: Sequence[str], peers: str, size: dict[str, Any], rounds: int) -> list[Contender]:
    """All of these kinds, steps in turn."""
    commands = {kind: [*_script(peers, kind), kind, json.dumps(size)] for kind in kinds}
    return take_turns(commands, size["threads"], rounds)


def _script(peers: str, kind: str) -> list[str]:
    if kind in PEERS:
        return [peers, str(ROOT / "benchmarks" / "peers" / "train_torch.py")]
    return [sys.executable, "-m", "benchmarks.train_worker"]


def learns(contender: Contender) -> bool:
    """Whether all losses are finite, and the last lies below the first."""
    losses = [a["loss"] for a in contender.answers]
    return all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def table(contenders: list[Contender], size: dict[str, Any], rounds: int) -> str:
    """Markdown, the fastest first."""
    tokens = 2 * size["batch"] * size["length"]
    rows = []
    for c in sorted(contenders, key=lambda c: c.Median("seconds")):
        name = NAMES[c.name]
        seconds, cpu = c.Median("seconds"), c.Median("cpu_seconds")
        losses = f"{c.answers[0]['loss']:.2f} to {c.answers[-1]['loss']:.2f}"
        speed = f"{tokens / seconds:,.0f}", f"{1000 * seconds:,.0f}", f"{1000 * cpu:,.0f}"
        rows.append([name, *speed, f"{c.about['parameters'] / 1e6:.1f} M", losses])
    figures = "tokens/s", "step, ms", "CPU time, ms", "parameters", "loss, first to last step"
    about = f"Medians of {rounds} steps; {size['threads']} thread(s), dropout {size['dropout']}."
    return f"{about}\n\n{markdown(Table(words('', *figures), rows))}"


if __name__ == "__main__":
    _cli.run(main)
