"""A whole training step of a small translation model with experts, here and in PyTorch, in one run.

    python -m benchmarks.train_step --peers=PEERS/bin/python

4+4 layers, every second one with experts, M=256, H=1024, 8 heads, vocabulary 8192, 32 rows of 64 + 64
tokens, E=16, top-2, capacity factor 2, float32, Adafactor, label smoothing 0.1: forward, backward and
update. Each contender is a process of its own on one core, which the others leave alone while it runs:
they take steps in turn, and the table gives medians over the rounds. `--update` writes it into the page.
PEERS is the environment that benchmarks/install_peers.sh makes; without it only our own engines run.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lingvo_moe.core import files

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "moe_speed.md"
MARKERS = ("<!-- benchmarks.train_step: begin -->", "<!-- benchmarks.train_step: end -->")

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


class Contender:
    """A process that takes a training step when asked."""

    def __init__(self, kind: str, python: str, size: dict[str, Any]):
        script = ["-m", "benchmarks.train_worker"]
        if kind in PEERS:
            script = [str(ROOT / "benchmarks" / "peers" / "train_torch.py")]
        threads = str(size["threads"])
        environment = {
            **os.environ,
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false" if threads == "1" else "",
        }
        self.kind, self.answers = kind, list[dict[str, float]]()
        self._process = subprocess.Popen(
            [python, *script, kind, json.dumps(size)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # One thread is one core: what a runtime does in helper threads counts too.
        cores = sorted(os.sched_getaffinity(0))[-size["threads"] :]
        os.sched_setaffinity(self._process.pid, cores)

    def WaitUntilReady(self) -> "Contender":
        """Returns once it has taken its first step."""
        self.parameters = int(self._Line("ready").split()[1])
        return self

    def Step(self, count: bool) -> None:
        """One step; `count`: its times are kept. The loss always is."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.answers.append({**json.loads(self._Line("{")), "count": count})

    def Median(self, name: str) -> float:
        """Of what was counted."""
        return statistics.median(a[name] for a in self.answers if a["count"])

    def Stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _Line(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        errors = self._process.communicate()[1].strip()
        raise RuntimeError(f"{self.kind} ended: {errors[-2000:]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__)
    add = parser.add_argument
    add("--peers", default="", help="the Python of the peers' environment")
    add("--only", default="", help=f"some of {', '.join([*OURS, *PEERS])}, comma-separated")
    add("--rounds", type=int, default=7, help="steps of each that are timed (%(default)s)")
    add("--dropout", type=float, default=0.0, help="on embeddings, residuals, hidden layers")
    add("--threads", type=int, default=1, help="cores for each (%(default)s)")
    add("--update", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    known = {**OURS, **(PEERS if args.peers else {})}
    kinds = [k for k in args.only.split(",") if k] or list(known)
    if not set(kinds) <= set(known):
        parser.error(f"--only={args.only}: some of {', '.join(known)} (peers need --peers)")
    if args.rounds < 1 or not 0 <= args.dropout < 1 or args.threads < 1:
        parser.error("--rounds and --threads are 1 or more, --dropout lies in [0, 1)")
    size = {**SIZE, "dropout": args.dropout, "threads": args.threads}
    try:
        contenders = run(kinds, args.peers, size, args.rounds)
    except RuntimeError as e:
        print(f"train_step: {e}", file=sys.stderr)
        return 1
    text = table(contenders, size, args.rounds)
    print(text)
    if args.update:
        update(text)
    return 0 if all(learns(c) for c in contenders) else 1


def run(kinds: list[str], peers: str, size: dict[str, Any], rounds: int) -> list[Contender]:
    """Starts all, two at a time, and has each take its steps in turn: one to warm the caches that the
    others used, one that counts."""
    contenders: list[Contender] = []

    def start(kind: str) -> Contender:
        contender = Contender(kind, peers if kind in PEERS else sys.executable, size)
        contenders.append(contender)
        contender.WaitUntilReady()
        print(f"{kind} is ready", file=sys.stderr, flush=True)
        return contender

    try:
        with ThreadPoolExecutor(max_workers=2) as pool:
            ready = list(pool.map(start, kinds))
        for number in range(rounds):
            for contender in ready if number % 2 == 0 else ready[::-1]:
                for count in (False, True):
                    contender.Step(count)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        return ready
    finally:
        for contender in contenders:
            contender.Stop()


def learns(contender: Contender) -> bool:
    """Whether all losses are finite, and the last lies below the first."""
    losses = [a["loss"] for a in contender.answers]
    return all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def table(contenders: list[Contender], size: dict[str, Any], rounds: int) -> str:
    """Markdown, the fastest first."""
    tokens = 2 * size["batch"] * size["length"]
    rows = [
        f"Medians of {rounds} steps; {size['threads']} thread(s), dropout {size['dropout']}.",
        "",
        "| | tokens/s | step, ms | CPU time, ms | parameters | loss, first to last step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for c in sorted(contenders, key=lambda c: c.Median("seconds")):
        name = {**OURS, **PEERS}[c.kind]
        seconds, cpu = c.Median("seconds"), c.Median("cpu_seconds")
        losses = f"{c.answers[0]['loss']:.2f} to {c.answers[-1]['loss']:.2f}"
        rows.append(
            f"| {name} | {tokens / seconds:,.0f} | {1000 * seconds:,.0f} | {1000 * cpu:,.0f} | "
            f"{c.parameters / 1e6:.1f} M | {losses} |"
        )
    return "\n".join(rows)


def update(text: str) -> None:
    """Puts the table between its markers in the page."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = MARKERS
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{PAGE}: it lacks the lines {begin} and {end}")
    files.write_atomic(str(PAGE), f"{head}{begin}\n{text}\n{end}{tail}".encode())


if __name__ == "__main__":
    sys.exit(main())
