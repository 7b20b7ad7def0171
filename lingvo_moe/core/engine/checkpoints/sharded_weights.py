"""The weights of a run on the devices of an engine, for models that are larger than a host."""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.engine.base import Engine
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.checkpoints.run_weights import check_average
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.task.adapters import ADAPTERS, adapted, scale_of
from lingvo_moe.core.task.step import Step


def weights_on_devices(
    engine: Engine,
    params: InstantiableParams,
    checkpointer: Checkpointer,
    steps: Sequence[int],
    use_ema: bool = False,
) -> NestedMap:
    """The weights that a model computes with, sharded as in training; each process reads its part of them.

    Args:
        params: of the run's task; adapters are added to the weights.
        steps: several to take the mean of their weights.
        use_ema: whether to read the moving average of the weights.

    Raises CheckpointError: as Checkpointer.Restore; or the run keeps no moving average.
    """
    if use_ema:
        check_average(checkpointer, params)
    task, name = params.Instantiate().Unpacked(), "ema" if use_ema else "theta"
    specs, part = task.VariableSpecs(), NestedMap({name: task.StateSpecs()[name]})
    thetas = [checkpointer.Restore(part, engine, step)[0][name] for step in steps]
    scale = scale_of(params)
    if len(steps) == 1 and not use_ema and not scale:
        return thetas[0]

    def in_use(*thetas: NestedMap) -> NestedMap:
        def mean(spec: VariableSpec, *weights: tf.Tensor) -> tf.Tensor:
            whole = weights[-1]
            if len(weights) > 1 and whole.dtype.is_floating:
                whole = tf.add_n([tf.cast(w, tf.float32) for w in weights]) / len(weights)
            return tf.cast(whole, spec.dtype)

        theta = map_structure(mean, specs, *thetas)
        return adapted(theta, specs, scale) if scale else theta

    results = NestedMap({name: spec for name, spec in specs.items() if name != ADAPTERS})
    program = Step("weights_in_use", in_use, [part[name]] * len(steps), results=results)
    weights: NestedMap = engine.Once(program, *thetas)
    return weights
