"""The MoE layer alone, forward and backward, here and in its peers, in one run.

    python -m benchmarks.moe_layer --peers=PEERS/bin/python

float32, 4096 tokens (G=4, S=1024), M=512, H=2048, top-2, capacity factor 2, E in 8, 32, 128: output, and
gradients of inputs, router and experts. Also measured: a feed-forward layer and a matrix product of equal FLOPs. Each
contender is a separate process on --threads cores. They take steps in turn, so that only one runs at a time, and the
table gives medians over the rounds. A group of contenders that fits into memory is alive at a time; the contender
--reference is in each group.

Percentages are relative to the fastest product of the run. PEERS is the environment that
benchmarks/install_peers.sh makes; without it only our own contenders run. --cost compares numbers of
experts instead, at smaller M and H, since the weights of 2048 experts would not fit into the memory.
--update writes the table into docs/speed.md, whose picture is that of --plot.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compile_time import host
from benchmarks.contenders import ROOT, Contender, take_turns, update_page
from benchmarks.moe_layer_worker import EXPERTS, SIZE, flops
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from lingvo_moe.core.pages import drawing
from lingvo_moe.core.pages.tables import Table, markdown, words
from tools import _cli

PAGE = ROOT / "docs" / "speed.md"
OURS = {
    "tf_graph.index": "here: `tf_graph`, index",
    "tf_graph.dropless": "here: `tf_graph`, dropless",
    "tf_graph.einsum": "here: `tf_graph`, einsum",
    "pjrt.index": "here: `pjrt` (XLA), index",
    "pjrt.dropless": "here: `pjrt` (XLA), dropless",
    "pjrt.einsum": "here: `pjrt` (XLA), einsum",
}
REFERENCES = {
    "tf_graph.dense": "dense layer, here: `tf_graph`",
    "pjrt.dense": "dense layer, here: `pjrt` (XLA)",
    "tf_graph.matmul": "product alone, `tf_graph`",
}
PEERS = {
    "torch_batched": "PyTorch, batched products",
    "torch_looped": "PyTorch, an expert at a time",
    "torch_grouped": "PyTorch, grouped_mm",
    "hf_nllb": "Hugging Face NLLB-MoE",
    "hf_grouped_mm": "Hugging Face, grouped_mm experts",
    "tutel": "Tutel",
    "lingvo": "Lingvo, under XLA",
    "lingvo_graph": "Lingvo, without XLA",
    "torch_dense": "dense layer, PyTorch",
    "torch_matmul": "product alone, PyTorch",
}
NAMES = {**OURS, **REFERENCES, **PEERS}
SAME_FOR_ALL_E = ("dense", "matmul")
COST = {"model_dim": 128, "hidden_dim": 512}
COST_EXPERTS = (2, 8, 32, 128, 512, 2048)
COST_NAMES = (
    "tf_graph.index",
    "tf_graph.dropless",
    "pjrt.index",
    "torch_batched",
    "tf_graph.matmul",
)


@dataclass(frozen=True)
class Request:
    """The layers to measure.

    Attributes:
        names: of the contenders.
        experts: numbers of experts.
        threads: numbers of cores.
        size: of the layer.
    """

    names: list[str]
    experts: list[int]
    threads: list[int]
    size: dict[str, Any]


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.moe_layer", __doc__)
    flags.DEFINE_string("peers", "", "the Python of the peers' environment")
    flags.DEFINE_string("peers_lingvo", "", "the Python of Lingvo's environment")
    flags.DEFINE_list("only", (), f"contenders: some of {', '.join(NAMES)}", NAMES)
    flags.DEFINE_enum("reference", "tf_graph.index", tuple(NAMES), "contender in every group")
    flags.DEFINE_boolean("cost", False, "measure cost against the number of experts")
    some, many = (",".join(map(str, numbers)) for numbers in (EXPERTS, COST_EXPERTS))
    about = f"numbers of experts (default: {some}; with --cost {many})"
    flags.DEFINE_numbers("experts", (), about, checks.Integer(2))  # for top-2
    flags.DEFINE_numbers("threads", (1,), "numbers of cores for each contender", checks.SIZE)
    flags.DEFINE_integer("rounds", 7, "measured steps of each contender", checks.SIZE)
    flags.DEFINE_float(
        "memory_gb",
        0.0,
        "memory for contenders that run at a time; 0: what is free",
        checks.NOT_NEGATIVE,
    )
    flags.DEFINE_path("output", "", "a JSON file for the figures")
    flags.DEFINE_path("plot", "", "a PNG file for a picture of them")
    flags.DEFINE_boolean("update", False, f"write into {PAGE.relative_to(ROOT)}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    wanted = request(args)
    return _cli.attempt("moe_layer", lambda: _run(args, wanted), "interrupted; nothing was written")


def _run(args: Flags, wanted: Request) -> int:
    _cli.check_output_files(args, "output", "plot")
    points: list[dict[str, Any]] = []
    for threads in wanted.threads:
        for experts in wanted.experts:
            size = {**wanted.size, "num_experts": experts, "threads": threads}
            done = {p["name"] for p in points if p["threads"] == threads}
            points += measure(args, size, [n for n in wanted.names if _has_experts(n, done)])
    result = {"rounds": args.rounds, "host": host(), "size": wanted.size, "points": points}
    text = "\n".join(table(result, threads) for threads in wanted.threads)
    print(text)
    if args.output:
        files.write_json(args.output, result)
    if args.update:
        block = f"benchmarks.moe_layer {'cost' if args.cost else wanted.threads[0]}"
        update_page(PAGE, block, text + f"\nMeasured on {host()}.")
    if args.plot:
        files.write_atomic(args.plot, drawing.png(plot(result)))
    return 0


def request(args: Flags) -> Request:
    """Reads the request from the flags. Ends the process where they do not go together."""
    experts = args.experts or (COST_EXPERTS if args.cost else EXPERTS)
    available = [n for n in (COST_NAMES if args.cost else NAMES) if _python(args, n)]
    names = list(args.only) or available
    for name in [*names, args.reference]:
        if not _python(args, name):
            args.Fail(f"{name} needs --peers{'_lingvo' * name.startswith('lingvo')}")
    if args.update and len(args.threads) > 1:
        args.Fail("--update writes the table of one number of --threads")
    size = {**SIZE, **(COST if args.cost else {})}
    return Request(names, list(experts), list(args.threads), size)


def measure(args: Flags, size: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """Measures these contenders at one size."""
    points = []
    for group in groups(args, size, names):
        print(f"E={size['num_experts']}, {size['threads']} threads: {', '.join(group)}", flush=True)
        commands = {name: _command(args, name, size) for name in group}
        contenders = take_turns(commands, size["threads"], args.rounds, leave_out=True)
        points += [describe(c, size) for c in contenders]
    return points


def groups(args: Flags, size: dict[str, Any], names: list[str]) -> list[list[str]]:
    """The contenders that run at the same time, in groups that fit into memory."""
    available = args.memory_gb * 1e9 or _free_bytes()
    weights = 8 * size["num_experts"] * size["model_dim"] * size["hidden_dim"]
    # Weights, their gradients, what is made while starting, activations and the program.
    each = 3 * weights + 1.2e9
    many = max(2, int(available / each))
    rest = [n for n in names if n != args.reference]
    step = many - 1
    found = [[args.reference, *rest[i : i + step]] for i in range(0, len(rest), step)]
    return found or [[args.reference]]


def describe(contender: Contender, size: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of one contender at one size."""
    return {
        "name": contender.name,
        "num_experts": size["num_experts"],
        "threads": size["threads"],
        "gflops": flops(size) / contender.Median("seconds") / 1e9,
        "seconds": [a["seconds"] for a in contender.answers],
        "cpu_seconds": contender.Median("cpu_seconds"),
        "peak_bytes": contender.Median("peak_bytes"),
        **contender.about,
    }


def shares(result: dict[str, Any], threads: int) -> dict[tuple[str, int], float]:
    """Each contender's share of the fastest product, by name and E; medians over its groups."""
    found: dict[tuple[str, int], list[float]] = {}
    points = [p for p in result["points"] if p["threads"] == threads]
    peak = max([p["gflops"] for p in points if p["name"].endswith("matmul")], default=0.0)
    for p in points:
        same = p["name"].endswith(SAME_FOR_ALL_E)
        for experts in {q["num_experts"] for q in points} if same else {p["num_experts"]}:
            found.setdefault((p["name"], experts), []).append(p["gflops"] / (peak or 1.0))
    return {key: statistics.median(values) for key, values in found.items()}


def table(result: dict[str, Any], threads: int) -> str:
    """Markdown: per cent of the product, milliseconds and megabytes for each E."""
    points = [p for p in result["points"] if p["threads"] == threads]
    experts = sorted({p["num_experts"] for p in points})
    share = shares(result, threads)
    names = [n for n in NAMES if any(key[0] == n for key in share)]
    names.sort(key=lambda n: -max(v for (name, _), v in share.items() if name == n))
    size = result["size"]
    peak = max([p["gflops"] for p in points if p["name"].endswith("matmul")], default=0.0)
    lines = []
    for name in names:
        same = name.endswith(SAME_FOR_ALL_E)
        own = [p for p in points if p["name"] == name]
        rows = {e: [p for p in own if same or p["num_experts"] == e] for e in experts}
        cells = [f"{100 * share[name, e]:.0f}" if rows[e] else "-" for e in experts]
        for key, scale in (("seconds", 1e3), ("peak_bytes", 1e-6)):
            for e in experts:
                values = [
                    statistics.median(p[key]) if key == "seconds" else p[key] for p in rows[e]
                ]
                cells.append(f"{scale * statistics.median(values):,.0f}" if values else "-")
        lines.append([NAMES[name], *cells])
    heads = [form.format(e) for form in ("E={}: %", "ms, E={}", "MB, E={}") for e in experts]
    return (
        f"{threads} thread{'s' * (threads > 1)}, M={size['model_dim']}, H={size['hidden_dim']}, medians of "
        f"{result['rounds']}; 100% is {peak:.0f} GFLOP/s.\n\n{markdown(Table(words('', *heads), lines))}"
    )


@drawing.styled
def plot(result: dict[str, Any]) -> drawing.Figure:
    """Shares of the product against E, a panel for each number of threads."""
    threads = sorted({p["threads"] for p in result["points"]})
    size = 7 * len(threads), 4.5
    figure, axes = drawing.plt.subplots(1, len(threads), figsize=size, squeeze=False)
    for axis, count in zip(axes[0], threads, strict=True):
        share = shares(result, count)
        for name, label in NAMES.items():
            line = sorted((e, 100 * v) for (n, e), v in share.items() if n == name)
            if line:
                style = {"linewidth": 2.5} if name in OURS else {"linewidth": 1.2}
                dash = "--" if name.endswith(SAME_FOR_ALL_E) else "-"
                axis.plot(*zip(*line), marker="o", label=label.replace("`", ""), ls=dash, **style)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 105)
        axis.set_xlabel("experts")
        axis.set_ylabel("% of the matrix product")
        axis.set_title(f"{count} thread{'s' * (count > 1)}")
    handles, labels = axes[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    return figure


def _has_experts(name: str, done: set[str]) -> bool:
    """Whether it is to be measured at one more number of experts: not where all are the same to it."""
    return not (name.endswith(SAME_FOR_ALL_E) and name in done)


def _python(args: Flags, name: str) -> str:
    """The interpreter of a contender, '' where there is none."""
    if name.startswith("lingvo"):
        return args.peers_lingvo
    return args.peers if name in PEERS else sys.executable


def _command(args: Flags, name: str, size: dict[str, Any]) -> list[str]:
    script = ["-m", "benchmarks.moe_layer_worker"]
    if name in PEERS:
        library = "lingvo" if name.startswith("lingvo") else "torch"
        script = [str(ROOT / "benchmarks" / "peers" / f"moe_layer_{library}.py")]
    return [_python(args, name), *script, name, json.dumps(size)]


def _free_bytes() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("MemAvailable"))
    return 0.85 * 1024 * int(line.split()[1])


if __name__ == "__main__":
    _cli.run(main)
