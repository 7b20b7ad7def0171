"""One contender of benchmarks/train_step.py: a training step of the package on one of its engines.

    python -m benchmarks.train_worker tf_graph '{"model_dim": 256, ...}'

KIND is an engine, with `_dense` behind it for the model without experts.
"""

import json
import sys
from typing import Any

import numpy as np

from benchmarks.peers.stepping import keep_memory, serve


def main() -> None:
    kind, size = sys.argv[1], json.loads(sys.argv[2])
    keep_memory()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(size["threads"])
    tf.config.threading.set_inter_op_parallelism_threads(1)
    engine, run, state, batch = build(kind, size)
    parameters = sum(int(np.prod(w.shape)) for w in state.theta.Flatten())

    def step() -> dict[str, float]:
        nonlocal state
        state, metrics = run(state, batch)
        return {"loss": float(engine.Get(metrics).loss)}

    serve(step, parameters=parameters, version=tf.__version__)


def build(kind: str, size: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """(engine, the compiled step, its state, a batch) for an engine's name, with '_dense' behind it for
    the model without experts."""
    from lingvo_moe.core.config import registry
    from lingvo_moe.core.engine.engines import make_engine
    from lingvo_moe.core.engine.loop.steps import train_step
    from lingvo_moe.core.engine.lowering.specs import TensorSpec
    from lingvo_moe.core.optimizers.schedules import Constant
    from lingvo_moe.core.sharding import Mesh

    params = registry.GetParams("mt.M4Demo", "")
    params.task.Set(
        source_vocab_size=size["vocab_size"],
        target_vocab_size=size["vocab_size"],
        model_dim=size["model_dim"],
        hidden_dim=size["hidden_dim"],
        num_heads=size["num_heads"],
        key_dim=size["model_dim"] // size["num_heads"],
        num_encoder_layers=size["num_layers"],
        num_decoder_layers=size["num_layers"],
        num_experts=0 if kind.endswith("_dense") else size["num_experts"],
        num_groups=8,
        dropout=size["dropout"],
        label_smoothing=size["label_smoothing"],
        repeat=False,
        aux_loss_weight=0.01,  # as in the peers, like rate and capacity below
    )
    params.task.optimizer.learning_rate = Constant.Params().Set(value=0.01)
    params.task.moe.Set(dispatcher="index", capacity_factor=2.0)
    params.task.moe.router.Set(reading="paper", second_expert_policy="all")
    params.input.Set(
        source_vocab_size=size["vocab_size"],
        target_vocab_size=size["vocab_size"],
        source_length=size["length"],
        target_length=size["length"],
        batch_size=size["batch"],
    )
    task = params.task.Instantiate()
    step = train_step(task, params.input.Instantiate())
    engine = make_engine(kind.removesuffix("_dense"), Mesh.parse("expert:1"))
    init = engine.Build(task.InitState, [TensorSpec((), "int32")], results=step.arg_specs[0])
    batch = step.arg_specs[1].Transform(lambda spec: np.ones(spec.shape, np.int32))
    rng = np.random.RandomState(1)
    for side in (batch.src, batch.tgt):
        side.ids = rng.randint(4, size["vocab_size"], side.ids.shape).astype(np.int32)
        side.segment_pos *= np.arange(size["length"], dtype=np.int32)
    batch.tgt.labels = rng.randint(4, size["vocab_size"], batch.tgt.ids.shape).astype(np.int32)
    run = engine.BuildStep(step)
    return engine, run, init(np.int32(1234)), engine.Put(batch, step.arg_specs[1])


if __name__ == "__main__":
    main()
