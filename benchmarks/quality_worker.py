"""One contender of benchmarks/quality_peers.py: trains an experiment for some CPU seconds and scores held-out pairs.

    python -m benchmarks.quality_worker SETUP.json

Each run is one of the trainer, on one device with --engine=tf_graph. Compiling does not count as training.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.budget import report
from benchmarks.peers.stepping import keep_memory

RATE = "task.optimizer.learning_rate"
NEVER = 1_000_000_000  # steps


def main() -> None:
    setup = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    keep_memory()
    from lingvo_moe.core.console.tensorflow_import import import_tensorflow

    import_tensorflow()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    pairs = json.loads(Path(setup["held_out"]).read_text())
    pairs = [pair for pair in pairs if pair[0] in setup.get("languages", pair)]
    parameters, run, step = train(setup, pairs)
    report(
        "end",
        parameters=parameters,
        version=f"TensorFlow {tf.__version__}",
        hypotheses=translate(setup, run, pairs, step),
    )


def train(setup: dict[str, Any], pairs: list[list[str]]) -> tuple[int, str, int]:
    """Trains for each number of CPU seconds, and reports its scores.

    Returns the number of parameters, and the directory and the last step of the last run.

    A run at a stable rate is trained on from one number to the next. Before each, a branch of it decays: it takes over
    the run's state and has the last part of the time. Experts that have not grown out of dense layers by then do so
    where the branch begins. Runs that an earlier process began go on, and branches that it ended are only scored.
    """
    from lingvo_moe.core.config import registry
    from lingvo_moe.core.task import inspect
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

    stable, whole = setup["run"], registry.GetParams(setup["model"], setup["override"])
    share = 1.0 - whole.task.optimizer.learning_rate.decay_share
    for seconds in setup["points"]:
        decayed = f"{stable}-{seconds:g}"
        if last_step(decayed)[1]["cpu_seconds"] < seconds:
            train_to(
                setup, stable, f"train.max_cpu_seconds={share * seconds};{RATE}.total_steps={NEVER}"
            )
            from_stable = f"--init_from={begun(stable)}", "--init_from_state"
            train_to(setup, decayed, f"train.max_cpu_seconds={seconds}", *from_stable)
        step, used = last_step(decayed)
        point = {"cpu_seconds": used["cpu_seconds"], "trained_tokens": int(used["units"])}
        report("point", step=step, **point, **held_out(setup, decayed, pairs, step))
    parameters = inspect.count_parameters(TextRunDir(decayed).Task().VariableSpecs().Flatten())
    return parameters, decayed, step


def last_step(run: str) -> tuple[int, dict[str, float]]:
    """The last step that a run saved, and the CPU seconds and units that it has used; of a run that has none, zeros."""
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
    from lingvo_moe.core.runs.run_dir import RunDir

    directory = Path(RunDir(run).checkpoint_dir)
    if directory.is_dir():
        with Checkpointer(str(directory), read_only=True) as saved:
            if (step := saved.LatestStep()) is not None:
                return step, saved.ReadExtra(step)["used"]
    return 0, {"cpu_seconds": 0.0, "units": 0.0}


def begun(run: str) -> str:
    """The directory of a run that has begun: the dense model's, until experts have grown out of it."""
    return run if Path(run).is_dir() else f"{run}-dense"


def train_to(setup: dict[str, Any], logdir: str, override: str, *flags: str) -> None:
    """Trains a run, or goes on with it, to the end that an override sets."""
    from lingvo_moe import trainer

    override = f"{setup['override']};train.max_steps={NEVER};{override}"
    command = [f"--model={setup['model']}", f"--logdir={logdir}", "--engine=tf_graph", *flags]
    if status := trainer.main([*command, f"--model_params_override={override}"]):
        sys.exit(status)


def held_out(setup: dict[str, Any], run: str, pairs: list[list[str]], step: int) -> dict[str, Any]:
    """The log-probability of each target in nats, and the tokens of all, of a checkpoint."""
    from lingvo_moe.core.engine.checkpoints.run_weights import Chosen
    from lingvo_moe.tasks.text.quality.forced_decoding import Scorer

    scorer = Scorer(run, chosen=Chosen(step, use_ema=setup["use_ema"]))
    languages, sources, targets = zip(*pairs, strict=True)
    scores = scorer.Score(sources, targets, languages)
    return {
        "log_probs": [score.log_prob for score in scores],
        "tokens": sum(len(score.pieces) for score in scores),
    }


def translate(setup: dict[str, Any], run: str, pairs: list[list[str]], step: int) -> list[str]:
    """The translation of each source."""
    from lingvo_moe.core.engine.checkpoints.run_weights import Chosen
    from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, load_translator

    options = TranslateOptions(
        beam_size=setup["beam_size"],
        length_alpha=setup["length_alpha"],
        max_length=setup["max_length"],
    )
    translator, _ = load_translator(run, options, Chosen(step, use_ema=setup["use_ema"]))
    languages, sources, _ = zip(*pairs, strict=True)
    return [row[0] for row in translator.Translate(sources, languages).translations]


if __name__ == "__main__":
    main()
