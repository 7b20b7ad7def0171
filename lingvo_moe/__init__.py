"""GShard for TensorFlow 2: Mixture-of-Experts Transformers, annotated once and partitioned by XLA on any devices."""

from pathlib import Path

from lingvo_moe import moved_modules

# `params`, `reproduction` and `tools` lie inside this package in a wheel, and beside it in a checkout. They are
# lingvo_moe.params, ... in both, so that directories of the user's with these names are never taken for them.
if not Path(__file__).with_name("params").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

# The module that core/engine/program_analysis.py asks about programs; core imports nothing of `analysis`.
PROGRAM_ANALYSIS = "lingvo_moe.analysis.programs.for_engines"
moved_modules.follow_moves()
