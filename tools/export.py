"""Writes a trained model as a SavedModel: strings in, strings out, with TensorFlow only.

    python -m tools.export --logdir=RUN --output=DIR

To use it one needs tensorflow and tensorflow_text, not this package:

    import tensorflow as tf, tensorflow_text
    translate = tf.saved_model.load("DIR").signatures["serving_default"]
    translate(text=tf.constant(["Guten Tag"]))["translations"]

A language model takes prompts and settings, and gives their continuations (docs/language_models.md); one with a
tokenizer.json takes and gives ids, for TensorFlow cannot run that.
"""

from collections.abc import Sequence

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.runs.directories import EXPORTED

from . import _cli, _models, _published


def define_flags() -> Flags:
    flags = Flags("python -m tools.export", __doc__)
    _cli.define_logdir_flag(flags)
    _published.define_from_flag(flags)
    flags.DEFINE_path(
        "output",
        None,
        "the directory or the address to write; it replaces a SavedModel",
        required=True,
        portable=True,
        address=True,
    )
    flags.DEFINE_integer(
        "top_k", None, "translations of a line (default: as --beam_size); 1 is faster", checks.SIZE
    )
    _cli.define_search_flags(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("export", lambda: _run(args))


def _run(args: Flags) -> int:
    _cli.check_output_directory(args.output, replaces=EXPORTED)
    _cli.load_tensorflow()
    _published.imported(args)
    from lingvo_moe.tasks.text.decoding.export import export

    top_k = args.top_k if args.top_k is not None else (args.beam_size or 4)
    options = _cli.search_options(args, top_k)
    if _models.is_language_model(args):
        return _export_generator(args)
    translator, about = _models.load_from_run(args, options)
    export(translator, args.output, about)
    print(
        f"{about['model']} at step {about['step']}, beam {options.beam_size},"
        f" weights {about['weights']}{', their moving average' if args.use_ema else ''}"
        f"{', with a shortlist' if args.shortlist else ''}"
    )
    _cli.made(args.output, next=f"python -m tools.serve --saved_model={args.output}")
    return 0


def _export_generator(args: Flags) -> int:
    from lingvo_moe.tasks.text.decoding.export import export

    if args.top_k is not None:
        raise ValueError(
            f"--top_k={args.top_k}: a language model gives one text for a prompt; leave it out"
        )
    generator, about = _models.generator_from_run(args)
    export(generator, args.output, about)
    shown = f"beam {generator.options.beam_size}, weights {about['weights']}"
    print(f"{about['model']} at step {about['step']}, {shown}")
    _cli.made(args.output, next=f"python -m tools.generate --saved_model={args.output}")
    return 0


if __name__ == "__main__":
    _cli.run(main)
