"""Writes a run's weights as others read them: safetensors, config.json and the files of its tokenizer.

    python -m tools.export_checkpoint --logdir=RUN --output=DIR

For runs of published models' families, imported or not: docs/importing.md. `transformers` reads DIR, and so does
tools.import_checkpoint. What was imported, and not trained since, comes out byte for byte, in the types that it had.
"""

from collections.abc import Sequence
from pathlib import Path

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.console.waiting import LineProgress
from lingvo_moe.core.runs.directories import OutputKind

from . import _cli

_DTYPES = ("float32", "bfloat16", "float16")


def define_flags() -> Flags:
    flags = Flags("python -m tools.export_checkpoint", __doc__)
    _cli.define_logdir_flag(flags)
    flags.DEFINE_path("output", None, "a new directory", required=True, portable=True)
    help = "the type of all tensors (default: as they were imported, else float32)"
    flags.DEFINE_enum("dtype", None, _DTYPES, help)
    help = "the most bytes of a file, unless a tensor has more"
    flags.DEFINE_integer("max_shard_bytes", 5_000_000_000, help, checks.Integer(1, 1 << 50))
    help = "write the adapters of task.adapter_rank alone, as peft does (default: added to the weights)"
    flags.DEFINE_boolean("adapters", False, help)
    _cli.define_step_flag(flags)
    _cli.define_ema_flag(flags)
    _cli.define_trust_flag(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("export_checkpoint", lambda: _run(args), "interrupted; nothing was written")


def _run(args: Flags) -> int:
    _cli.check_output_directory(args.output, replaces=OutputKind("an export", (), ()))
    _cli.load_tensorflow()
    from lingvo_moe.core.engine.checkpoints.run_weights import Chosen
    from lingvo_moe.tasks.families.exporting import ExportOptions, export_checkpoint
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

    run = TextRunDir(args.logdir, trust_run=args.trust_run)
    chosen = Chosen(_cli.checkpoint_step(args), use_ema=args.use_ema)
    options = ExportOptions(args.dtype, args.max_shard_bytes, args.adapters)
    with LineProgress() as progress:
        line = export_checkpoint(run, Path(args.output), chosen, options, progress)
    print(line)
    _cli.made(args.output)
    return 0


if __name__ == "__main__":
    _cli.run(main)
