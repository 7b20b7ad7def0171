"""Writes the programs of benchmarks/moe_layer to files, for a GPU machine that has no TensorFlow.

    python -m benchmarks.gpu.programs --output=PROGRAMS

On that machine `python -m benchmarks.gpu.layer --programs=PROGRAMS` runs them. A file holds StableHLO, which is the
same for every platform; a manifest beside them says what each one computes. Nothing is run here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import moe_layer_worker
from benchmarks.gpu.layer import FORMATS, MANIFEST, VERSION
from benchmarks.moe_layer_worker import EXPERTS, SIZE
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from tools import _cli

KINDS = ("index", "dropless", "einsum", "dense")


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.gpu.programs", __doc__)
    flags.DEFINE_path("output", None, "the directory to write to", required=True)
    flags.DEFINE_list("kinds", KINDS, "dispatchers, and dense", KINDS)
    flags.DEFINE_list("formats", FORMATS, "of activations", FORMATS)
    flags.DEFINE_numbers("experts", EXPERTS, "numbers of experts", checks.Integer(2))
    for name, value in SIZE.items():
        flags.DEFINE_integer(name, value, "of the layer", checks.SIZE)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    size = {name: getattr(args, name) for name in SIZE}
    wanted = size, args.kinds, args.formats, args.experts
    return _cli.attempt("programs", lambda: write(Path(args.output), *wanted))


def write(
    directory: Path,
    size: dict[str, Any],
    kinds: Sequence[str],
    formats: Sequence[str],
    experts: Sequence[int],
) -> int:
    """Lowers every program and writes it, and the manifest last. Returns the exit status, 0.

    Args:
        directory: is made if it is missing.
        size: groups, group_size, model_dim, hidden_dim of the layer.
        kinds: some of KINDS; 'dense' has no experts, so there is one program of it for each format.
        formats: some of FORMATS.
        experts: numbers of experts.
    """
    _cli.check_output_directory(directory)
    (directory / MANIFEST).unlink(missing_ok=True)  # its programs are replaced one after another
    entries = []
    for kind in kinds:
        for number in experts[:1] if kind == "dense" else experts:
            for number_format in formats:
                whole = {**size, "num_experts": number}
                name = f"{kind}-E{number}-{number_format}.program"
                _lower(kind, {**whole, "fprop_dtype": number_format}).Save(str(directory / name))
                entries.append(
                    {"file": name, "kind": kind, "num_experts": number, "format": number_format}
                )
                print(f"wrote {name}", flush=True)
    manifest = {"version": VERSION, "size": size, "programs": entries}
    files.write_json(directory / MANIFEST, manifest)
    return 0


def _lower(kind: str, size: dict[str, Any]) -> Any:
    from lingvo_moe.core.engine.lowering.lowering import lower
    from lingvo_moe.core.engine.lowering.specs import TensorSpec
    from lingvo_moe.core.sharding import Mesh

    specs = [
        tree.Transform(lambda v: TensorSpec(v.shape, "float32"))
        for tree in moe_layer_worker.arguments(kind, size)
    ]
    function = moe_layer_worker.gradients_of(kind, size)
    return lower(function, specs, Mesh.parse("expert:1"), name=kind)


if __name__ == "__main__":
    _cli.run(main)
