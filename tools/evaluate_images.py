"""Scores a run of image classification on held-out images: top-1 and top-5 accuracy.

    python -m tools.evaluate_images --logdir=RUN
    python -m tools.evaluate_images --logdir=RUN --data_dir=FOLDER --output=scores.json

FOLDER holds validation/<class>/<name>.jpg (or val, or test) beside the images that the run trained on. The scores are
printed and written as JSON.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lingvo_moe.core.console.flags import Flags

from . import _cli


def define_flags() -> Flags:
    flags = Flags("python -m tools.evaluate_images", __doc__)
    _cli.define_logdir_flag(flags)
    flags.DEFINE_path("data_dir", None, "the folder of images (default: what RUN trained on)")
    _cli.define_step_flag(flags)
    flags.DEFINE_path("output", None, "the file to write (default: RUN/scores.json)")
    _cli.define_ema_flag(flags)
    _cli.define_trust_flag(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("evaluate_images", lambda: _run(args), "interrupted; nothing was written")


def _run(args: Flags) -> int:
    from lingvo_moe.core.files.files import write_json
    from lingvo_moe.core.runs.run_dir import RunDir

    run = RunDir(args.logdir, trust_run=args.trust_run)
    _ = run.experiment  # before anything slow: is it there?
    output = Path(args.output) if args.output else run.Inside("scores.json")
    _cli.check_output_file(output)
    _cli.load_tensorflow()
    from lingvo_moe.tasks.image.evaluation import evaluate

    data_dir, inputs = args.data_dir or "", run.Params().input
    if "data_dir" in inputs:  # digits are in no directory
        data_dir = _cli.data_dir(args, inputs)
    step = _cli.checkpoint_step(args)
    scores = evaluate(args.logdir, data_dir, step, args.use_ema, args.trust_run)
    write_json(output, asdict(scores))
    which = f"step {scores.step}{', moving average' if scores.ema else ''}"
    print(
        f"{which}, {scores.images:,} held-out images: top-1 {scores.top1:.2%}, top-5 {scores.top5:.2%}, "
        f"{scores.nll:.4f} nats an image"
    )
    _cli.made(output)
    return 0


if __name__ == "__main__":
    _cli.run(main)
