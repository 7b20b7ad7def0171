"""SmolLM2's tokens a CPU second, here and in llama.cpp and Hugging Face, in one run.

    python -m benchmarks.generate --model=SmolLM2-135M-Instruct.Q4_1.gguf --peers=PEERS/bin/python

Greedy search continues prompts of 64 tokens that are drawn at random, one prompt and eight at once; one thread. All
read the weights of one GGUF (docs/importing.md says where it is from), as float32, or as integers of 8 bits: here with
a scale for each column, and inputs of 8 bits with one for each row; in llama.cpp Q8_0, with a scale for each 32
numbers. A draft, the same model in 8 bits, proposes tokens that the one in float32 verifies. Each contender is a
process of its own, alone on its core while it runs: they take steps in turn, and the table has each one's least CPU
time. PEERS is the environment that benchmarks/install_peers.sh makes; without it only our own contenders run. --update
writes the table into docs/importing.md.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
from benchmarks.decode import least
from benchmarks.peers.stepping import keep_memory, prompts, serve
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.core.pages.tables import Table, markdown, words
from tools import _cli

PAGE = ROOT / "docs" / "importing.md"
OURS = {"float32": "here", "draft": "here, its own int8 as the draft", "int8": "here, int8"}
PEERS = {
    "hf": "Hugging Face",
    "llama_f32": "llama.cpp, F32",
    "llama_q8_0": "llama.cpp, Q8_0",
}
NAMES = {**OURS, **PEERS}
_OURS = "from benchmarks.generate import contend; contend()"


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.generate", __doc__)
    flags.DEFINE_path("model", None, "the GGUF", required=True)
    define_contender_flags(flags, OURS, PEERS)
    flags.DEFINE_integer("tokens", 128, "new tokens of each prompt", checks.SIZE)
    flags.DEFINE_integer("rounds", 5, "timed steps of each contender", checks.SIZE)
    flags.DEFINE_boolean("update", False, f"write the table into {PAGE.relative_to(ROOT)}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("generate", lambda: _run(args), "interrupted; nothing was written")


def _run(args: Flags) -> int:
    kinds = kinds_of(args, OURS, PEERS)
    points: dict[int, list[Contender]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        import_published(args.model, run)
        for batch in (1, 8):
            size = {"batch": batch, "prompt": 64, "tokens": args.tokens, "scratch": scratch}
            size |= {"model": str(Path(args.model).resolve()), "run": str(run)}
            commands = {kind: [*_script(args, kind), kind, json.dumps(size)] for kind in kinds}
            points[batch] = take_turns(commands, 1, args.rounds)
    text = table(points, args)
    print(text)
    if args.update:
        update_page(PAGE, "benchmarks.generate", f"{text}\nMeasured on {host()}.")
    return 0


def _script(args: Flags, kind: str) -> list[str]:
    if kind in PEERS:
        return [args.peers, str(ROOT / "benchmarks" / "peers" / "generate_peers.py")]
    return [sys.executable, "-c", _OURS]


def contend() -> None:
    """The process of one of our own contenders; its arguments are the kind and the sizes."""
    kind, size = sys.argv[1], json.loads(sys.argv[2])
    keep_memory()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from lingvo_moe.tasks.lm.generator import GenerateOptions, load_draft, load_generator

    options = GenerateOptions(weights="int8" if kind == "int8" else "float32")
    generator, _ = load_generator(size["run"], options)
    rows, ids = size["batch"], tf.constant(prompts(size))
    same = {"max_tokens": size["tokens"], "top_p": 1.0, "repetition_penalty": 1.0}
    specs = generator.generate.input_signature[2:]
    settings = [tf.cast(tf.fill([rows, *s.shape[1:]], same.get(s.name, 0)), s.dtype) for s in specs]

    def step() -> dict[str, Any]:
        out = generator.Call([ids, tf.fill([rows], size["prompt"]), *settings])
        return _answer(size, out["ids"].numpy())

    def drafted() -> dict[str, Any]:
        answers = [generator.Begin(row, Sampling(size["tokens"])) for row in ids.numpy().tolist()]
        for _ in generator._Running(answers):
            pass
        return _answer(size, np.array([answer.text.new for answer in answers]))

    if kind == "draft":
        generator.DraftBy(load_draft(size["run"], options, trust_run=False))
    serve(drafted if kind == "draft" else step)


def _answer(size: dict[str, Any], ids: np.ndarray) -> dict[str, Any]:
    if ids.shape != (size["batch"], size["tokens"]):
        raise RuntimeError(f"{ids.shape} tokens came out")
    return {"tokens": ids.size, "ids": ids[0].tolist()}


def table(points: dict[int, list[Contender]], args: Flags) -> str:
    """Markdown: tokens a CPU second of each batch, and CPU seconds."""
    rows = []
    for kind, name in NAMES.items():
        cells = []
        for contenders in points.values():
            for one in [c for c in contenders if c.name == kind]:
                seconds = least(one)
                cells.append(f"{one.answers[0]['tokens'] / seconds:,.1f} ({seconds:.2f})")
        if cells:
            rows.append([name, *cells])
    about = (
        f"Tokens a CPU second, and CPU seconds, the least of {args.rounds}; prompts of 64 tokens, {args.tokens} new "
        "ones each, one thread."
    )
    heads = words("batch", *map(str, points))
    return f"{about}\n\n{markdown(Table(heads, rows))}"


if __name__ == "__main__":
    _cli.run(main)
