"""Makes a run of published weights, which generate, score, serve, export and --init_from read as any other.

    python -m tools.import_checkpoint --from=DIR --output=RUN
    python -m tools.import_checkpoint --from=model.gguf --output=RUN

DIR is a checkpoint as it is published: config.json, tokenizer.json with tokenizer_config.json, and weights in
safetensors or PyTorch's .bin. Every tensor has its place in the model, or nothing is written. A table says which. The
command goes on where it was killed.
"""

from collections.abc import Sequence
from pathlib import Path

from lingvo_moe.core.console.allocator import keep_freed_memory
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.console.waiting import LineProgress
from lingvo_moe.core.runs.directories import RUN

from . import _cli


def define_flags() -> Flags:
    flags = Flags("python -m tools.import_checkpoint", __doc__)
    what = "the directory of a checkpoint, here or in a bucket, or a GGUF"
    flags.DEFINE_path("from", None, what, required=True, address=True)
    flags.DEFINE_path("output", None, "the run that is made", required=True, portable=True)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("import_checkpoint", lambda: _run(args), "run it again to go on")


def _run(args: Flags) -> int:
    _cli.check_output_directory(args.output, replaces=RUN)
    keep_freed_memory()
    _cli.load_tensorflow()
    from lingvo_moe.core.pages import tables
    from lingvo_moe.tasks.families.importing import import_checkpoint, open_published, placement

    published = open_published(getattr(args, "from"))
    with LineProgress() as progress:
        import_checkpoint(published, Path(args.output), progress)
    print(*tables.lines(placement(Path(args.output))), sep="\n")
    use = "generate --logdir={} <prompts.txt"
    if published.codes:
        use = "translate --logdir={} --language=SOURCE-TARGET <lines.txt"
    _cli.made(args.output, next=f"python -m tools.{use.format(args.output)}")
    return 0


if __name__ == "__main__":
    _cli.run(main)
