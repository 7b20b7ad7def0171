"""Writes a trained model as a SavedModel: strings in, translations and scores out, in TensorFlow alone.

    python -m tools.export --logdir=RUN --output=DIR

Using it needs tensorflow and tensorflow_text, and nothing of this package:

    import tensorflow as tf, tensorflow_text
    translate = tf.saved_model.load("DIR").signatures["serving_default"]
    translate(text=tf.constant(["Guten Tag"]))["translations"]
"""

import sys

from lingvo_moe.core.directories import EXPORTED
from tools import _cli


def main(argv: list[str] | None = None) -> int:
    parser = _cli.Parser(prog="python -m tools.export", description=__doc__)
    parser.add_argument(
        "--logdir", type=_cli.portable_path, required=True, help="the run, as given to the trainer"
    )
    parser.add_argument(
        "--output",
        type=_cli.portable_path,
        required=True,
        help="directory to write; a SavedModel is replaced",
    )
    parser.add_argument(
        "--top_k", type=int, help="translations of a line (default: as --beam_size); 1 is faster"
    )
    _cli.add_search_flags(parser)
    args = parser.parse_args(argv)
    _cli.check_at_least(parser, args, top_k=1)
    try:
        _cli.check_output_directory(args.output, replaces=EXPORTED)
        _cli.load_tensorflow()
        from lingvo_moe.tasks.mt.serving.export import export

        top_k = args.top_k if args.top_k is not None else (args.beam_size or 4)
        options = _cli.search_options(args, top_k)
        translator, about = _cli.load_from_run(args, options)
        export(translator, args.output, about)
    except (ValueError, OSError) as e:
        print(f"export: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(
        f"{args.output}: {about['model']} at step {about['step']}, beam {options.beam_size},"
        f" weights {about['weights']}{', with a shortlist' if args.shortlist else ''}"
    )
    return 0


if __name__ == "__main__":
    _cli.run(main)
