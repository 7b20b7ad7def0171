"""One contender of benchmarks/quality_peers.py: trains an experiment for some CPU seconds and scores held-out pairs.

    python -m benchmarks.quality_worker SETUP.json

The step, the input, the summaries and the checkpoints are the trainer's, on one device with --engine=tf_graph.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.budget import Budget, report
from benchmarks.peers.stepping import keep_memory


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
    parameters, step = train(setup, pairs)
    report(
        "end",
        parameters=parameters,
        version=f"TensorFlow {tf.__version__}",
        hypotheses=translate(setup, pairs, step),
    )


def train(setup: dict[str, Any], pairs: list[list[str]]) -> tuple[int, int]:
    """Trains, and reports the scores at each point; returns the number of parameters and of steps."""
    from lingvo_moe.core.config import registry
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
    from lingvo_moe.core.engine.engines import make_engine
    from lingvo_moe.core.engine.loop.prefetch import Prefetched
    from lingvo_moe.core.engine.loop.steps import initial_state, train_step
    from lingvo_moe.core.engine.loop.summaries import Summaries
    from lingvo_moe.core.sharding import Mesh
    from lingvo_moe.core.task import inspect
    from lingvo_moe.tasks.mt.runs.run_dir import RunDir

    params = registry.GetParams(setup["model"], setup["override"])
    task, inputs = params.task.Instantiate(), params.input.Instantiate()
    task.CheckInput(params.task, params.input)
    inputs.Prepare()
    run = RunDir(setup["run"])
    run.Write(setup["model"], setup["override"], inputs.Artifacts())
    engine = make_engine("tf_graph", Mesh.parse("expert:1"))
    step_fn = engine.BuildStep(train_step(task, inputs))
    state = initial_state(task, engine, params.task.seed)
    budget, step, seen = Budget(setup["points"]), 0, 0
    every = params.train.summary_interval_steps
    with (
        Checkpointer(str(run.checkpoint_dir), keep=len(setup["points"])) as saved,
        Summaries(str(run.summaries_dir)) as summaries,
        Prefetched(iter(inputs)) as batches,
    ):
        while not budget.done:
            state, metrics = step_fn(state, next(batches))
            step += 1
            seen += int(engine.Get(metrics.tokens))
            if step % every == 0 or step == 1:
                summaries.Write(step, engine.Get(metrics), task.MetricLayers())
            if budget.Due():
                used = budget.used
                with budget.Scoring():
                    saved.Save(step, state, {"input": batches.GetState()})
                    saved.Wait()
                    point = {"step": step, "cpu_seconds": used, "trained_tokens": seen}
                    report("point", **point, **held_out(setup, pairs, step))
            else:
                budget.Note(step, lambda loss=metrics.loss: float(engine.Get(loss)))
    return inspect.count_parameters(task.VariableSpecs().Flatten()), step


def held_out(setup: dict[str, Any], pairs: list[list[str]], step: int) -> dict[str, float]:
    """The log-probability of all targets in nats, and their number of tokens, of a checkpoint."""
    from lingvo_moe.core.engine.checkpoints.run_weights import Chosen
    from lingvo_moe.tasks.mt.quality.forced_decoding import Scorer

    scorer = Scorer(setup["run"], chosen=Chosen(step, use_ema=setup["use_ema"]))
    languages, sources, targets = zip(*pairs, strict=True)
    scores = scorer.Score(sources, targets, languages)
    return {
        "log_prob": sum(score.log_prob for score in scores),
        "tokens": sum(len(score.pieces) for score in scores),
    }


def translate(setup: dict[str, Any], pairs: list[list[str]], step: int) -> list[str]:
    """The translation of each source."""
    from lingvo_moe.core.engine.checkpoints.run_weights import Chosen
    from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions
    from lingvo_moe.tasks.mt.serving.export import load_translator

    options = TranslateOptions(
        beam_size=setup["beam_size"],
        length_alpha=setup["length_alpha"],
        max_length=setup["max_length"],
    )
    translator, _ = load_translator(setup["run"], options, Chosen(step, use_ema=setup["use_ema"]))
    languages, sources, _ = zip(*pairs, strict=True)
    return [row[0] for row in translator.Translate(sources, languages).translations]


if __name__ == "__main__":
    main()
