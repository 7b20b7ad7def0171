"""Compares the programs of every experiment at two commits: a rearrangement of code must change none.

    make replay BASE=<commit>
    python -m tests.replay --base=<commit> [--only=mt.M4Tiny,lm.Tiny]

Each commit lowers, in a process of its own, a small copy of each experiment (as `tools.verify` shrinks it):
the training step over eight devices, the decoding step of a translator over them, and the function that an export
would hold. The hashes are compared; the exit status is 1 where one differs or an experiment is missing. A commit that
has this file runs its own copy, since it calls functions that a rearrangement may move; for others this copy is taken.
"""

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lingvo_moe.core.console.flags import Flags

ROOT = Path(__file__).resolve().parents[1]
_DEVICES = 8
_VOCABULARY = 320  # pieces: one for each byte, and some words
# Names with a number, which may be one that TensorFlow counts up in a process.
_NUMBERED = re.compile(r'[\w/.]*_\d[\w/.]*|(?<=")\d+(?=")')


def define_flags() -> Flags:
    flags = Flags("python -m tests.replay", __doc__)
    flags.DEFINE_string("base", "HEAD", "the commit to compare the working tree with")
    flags.DEFINE_string("only", "", "experiments, separated by commas; all if empty")
    flags.DEFINE_string(
        "write", "", "write the hashes of this checkout into a file, and compare nothing"
    )
    return flags


def main() -> int:
    args = define_flags().Parse()
    if args.write:
        Path(args.write).write_text(json.dumps(dict(hashes(args.only))))
        return 0
    with tempfile.TemporaryDirectory(prefix="lingvo_moe.replay.") as directory:
        base = Path(directory, "base")
        _git("worktree", "add", "--quiet", "--detach", str(base), args.base)
        try:
            before = _hashes_in(base, args.only, Path(directory, "before.json"))
        finally:
            _git("worktree", "remove", "--force", str(base))
        after = _hashes_in(ROOT, args.only, Path(directory, "after.json"))
    differing = differences(before, after)
    print("\n".join(differing) or f"{len(after)} programs are those of {args.base}")
    return 1 if differing else 0


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for each program, by its name 'experiment part', that is not the same at both commits."""
    lines = []
    for name in sorted(before | after):
        if name not in after:
            lines.append(f"{name}: is gone")
        elif name not in before:
            lines.append(f"{name}: is new")
        elif before[name] != after[name]:
            lines.append(f"{name}: {before[name][:16]} became {after[name][:16]}")
    return lines


def hashes(only: str = "") -> Iterator[tuple[str, str]]:
    """The name 'experiment part' and the hash of every program, or of some experiments'.

    What cannot be lowered has its error as its hash, so that it is compared too.
    """
    from lingvo_moe.core.config import registry

    for model in only.split(",") if only else registry.AllNames():
        for part, hash_of in _PARTS.items():
            try:
                value = hash_of(model)
            except ValueError as e:
                value = f"{type(e).__name__}: {e}"
            if value:
                print(f"{model} {part} {value}", file=sys.stderr, flush=True)
                yield f"{model} {part}", value


def _hashes_in(checkout: Path, only: str, file: Path) -> dict[str, str]:
    """Runs the copy of this file in a checkout; one that has none runs this copy."""
    script = checkout / "tests" / "replay.py"
    if not script.exists():
        script.write_text(Path(__file__).read_text())
    command = [sys.executable, "-m", "tests.replay", f"--write={file}", f"--only={only}"]
    subprocess.run(command, cwd=checkout, check=True, env=os.environ | {"PYTHONPATH": ""})
    return json.loads(file.read_text())


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True)


def _small(model: str) -> tuple[Any, Any]:
    """The shrunk Params of an experiment, and its mesh of eight devices."""
    from lingvo_moe.analysis.explain.verifying import shrunk
    from lingvo_moe.core.config import registry
    from lingvo_moe.core.task.meshes import make_mesh

    mesh = make_mesh(registry.GetParams(model), "", _DEVICES)
    return shrunk(model, mesh), mesh


def _training_step(model: str) -> str:
    from lingvo_moe.core.engine.loop.steps import train_step
    from lingvo_moe.core.engine.lowering.lowering import lower_step

    params, mesh = _small(model)
    task, inputs = params.task.Instantiate(), params.input.Instantiate()
    program = lower_step(train_step(task, inputs, params.train.num_micro_batches), mesh)
    return f"{program.hash} {program.names_hash}"


def _decoding_step(model: str) -> str:
    if not model.startswith("mt."):
        return ""
    from lingvo_moe.core.engine.lowering.lowering import lower_step
    from lingvo_moe.tasks.mt.decode_step import decode_programs

    params, mesh = _small(model)
    return lower_step(decode_programs(params.task.Instantiate(), 2 * _DEVICES, 16)[1], mesh).hash


def _exported_function(model: str) -> str:
    if model.startswith("image."):
        return ""
    import numpy as np

    from lingvo_moe.core.nested_map import NestedMap
    from lingvo_moe.tasks.lm.generator import GenerateOptions, Generator
    from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, Translator

    p = _small(model)[0].task
    sizes = [name for name, _ in p.IterParams() if name.endswith("vocab_size")]
    task = p.Set(**dict.fromkeys(sizes, _VOCABULARY)).Instantiate()
    theta = task.VariableSpecs().Transform(lambda spec: np.zeros(spec.shape, spec.dtype))
    vocabulary = _vocabulary()
    if model.startswith("lm."):
        limits = GenerateOptions(max_length=16, max_source_length=16)
        return graph_hash(Generator(task, theta, vocabulary, limits).generate)
    options = TranslateOptions(max_length=16, max_source_length=16)
    vocabularies = NestedMap(source=vocabulary, target=vocabulary)
    languages = ["de", "fr"] if task.RoutesByTask(p) else []
    return graph_hash(Translator(task, theta, vocabularies, options, languages).translate)


def _vocabulary() -> bytes:
    from tests.toy_translation import sentences, train_vocab

    return train_vocab(sentences(300), _VOCABULARY)


def graph_hash(function: Any) -> str:
    """SHA-256 of a function's graph. A function that a node calls counts by its own hash: its name has a number."""
    graph = function.get_concrete_function().graph.as_graph_def()
    functions = {each.signature.name: each for each in graph.library.function}

    @functools.cache
    def called(name: str) -> str:
        definition = functions[name]
        definition.signature.name = ""
        definition.attr.clear()
        return nodes_hash(definition.node_def, definition)

    def nodes_hash(nodes: Iterable[Any], *rest: Any) -> str:
        for node in nodes:
            node.attr.pop("_gradient_op_type", None)  # has a number too
            for value in node.attr.values():
                for target in [value.func] if value.HasField("func") else value.list.func:
                    target.name = called(target.name)
        text = "".join(str(message) for message in (*nodes, *rest))
        names: dict[str, str] = {}  # by order of appearance
        text = _NUMBERED.sub(lambda name: names.setdefault(name[0], f"_{len(names)}"), text)
        return hashlib.sha256(text.encode()).hexdigest()

    return nodes_hash(graph.node)


_PARTS: dict[str, Callable[[str], str]] = {
    "training step": _training_step,
    "decoding step": _decoding_step,
    "export": _exported_function,
}

if __name__ == "__main__":
    sys.exit(main())
