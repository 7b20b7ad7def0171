"""The package's own contenders of benchmarks/moe_layer.py.

    python -m benchmarks.moe_layer_worker tf_graph.index '{"num_experts": 8, ...}'

ENGINE.DISPATCHER is an MoE layer, ENGINE.dense a feed-forward layer of as many FLOPs, ENGINE.matmul the
matrix products alone.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.peers.stepping import arrays, keep_memory, serve

# The layer that is measured, and its numbers of experts.
SIZE: dict[str, Any] = {"groups": 4, "group_size": 1024, "model_dim": 512, "hidden_dim": 2048}
EXPERTS = (8, 32, 128)


def main() -> None:
    name, size = sys.argv[1], json.loads(sys.argv[2])
    keep_memory()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(size["threads"])
    tf.config.threading.set_inter_op_parallelism_threads(1)
    engine, _, kind = name.partition(".")
    # NumPy's arrays are not kept: they would count as the layer's memory.
    if kind == "matmul":
        serve(_step(engine, *_matmul(size)), version=tf.__version__)
    else:
        step = _step(engine, gradients_of(kind, size), arguments(kind, size))
        serve(step, version=tf.__version__)


def _step(engine_name: str, fn: Callable, args: tuple, repeat: int = 1) -> Callable[[], None]:
    """`fn(*args)`, that many times, as the engine runs it."""
    from lingvo_moe.core.engine.engines import make_engine
    from lingvo_moe.core.engine.lowering.specs import TensorSpec
    from lingvo_moe.core.sharding import Mesh

    engine = make_engine(engine_name, Mesh.parse("expert:1"))
    specs = [a.Transform(lambda v: TensorSpec(v.shape, "float32")) for a in args]
    run = engine.Build(fn, specs)
    args = tuple(engine.Put(a, s) for a, s in zip(args, specs, strict=True))

    def step() -> None:
        for _ in range(repeat):
            result = run(*args)
            if engine_name == "pjrt":
                import jax

                jax.block_until_ready(result.Flatten())

    return step


def arguments(kind: str, size: dict[str, Any]) -> tuple[Any, Any]:
    """Weights and data of an MoE layer, or of a feed-forward layer (kind 'dense'). Needs no TensorFlow.

    Args:
        kind: a dispatcher's name, or 'dense'.
        size: num_experts, groups, group_size, model_dim, hidden_dim.

    Returns:
        NestedMaps of float32 arrays: theta, and x and dy [groups, group_size, model_dim].
    """
    from lingvo_moe.core.nested_map import NestedMap

    if kind == "dense":
        size = _as_wide_as_two_experts(size)
    x, dy, wg, wi, wo = arrays(size)
    shape = [size["groups"], size["group_size"], size["model_dim"]]
    data = NestedMap(x=x.reshape(shape), dy=dy.reshape(shape))
    if kind == "dense":
        return NestedMap(wi=wi[0], wo=wo[0]), data
    return NestedMap(router=NestedMap(wg=wg), experts=NestedMap(wi=wi, wo=wo)), data


def flops(size: dict[str, Any]) -> int:
    """FLOPs of the products of a layer: two experts a token, two products each, forward and twice as much backward."""
    tokens = size["groups"] * size["group_size"]
    return 3 * 2 * 2 * 2 * tokens * size["model_dim"] * size["hidden_dim"]


def gradients_of(kind: str, size: dict[str, Any]) -> Callable:
    """The function of theta and data that a contender runs: a layer's output, and the gradients of inputs and weights.

    Args:
        kind: as `arguments`.
        size: as `arguments`; `fprop_dtype` of the layer, by default float32.
    """
    params = _dense(size) if kind == "dense" else _layer(kind, size)
    return _gradients(params.Instantiate())


def _layer(dispatcher: str, size: dict[str, Any]) -> Any:
    """The parameters of an MoE layer."""
    from lingvo_moe.core.moe.layer import MoELayer

    params = MoELayer.Params().Set(
        name="moe",
        model_dim=size["model_dim"],
        hidden_dim=size["hidden_dim"],
        num_experts=size["num_experts"],
        min_capacity=1,
        dispatcher=dispatcher,
        fprop_dtype=size.get("fprop_dtype", "float32"),
    )
    params.router.second_expert_policy = "all"
    return params


def _dense(size: dict[str, Any]) -> Any:
    """The parameters of a feed-forward layer of twice the width, which costs as much as two experts a token."""
    from lingvo_moe.core.layers.feed_forward import FeedForward

    return FeedForward.Params().Set(
        name="ffn",
        model_dim=size["model_dim"],
        hidden_dim=_as_wide_as_two_experts(size)["hidden_dim"],
        fprop_dtype=size.get("fprop_dtype", "float32"),
    )


def _as_wide_as_two_experts(size: dict[str, Any]) -> dict[str, Any]:
    return {**size, "num_experts": 1, "hidden_dim": 2 * size["hidden_dim"]}


def _gradients(layer: Any) -> Callable:
    import tensorflow as tf

    from lingvo_moe.core.nested_map import NestedMap

    def fn(theta: Any, data: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([data.x, *theta.Flatten()])
            paddings = tf.zeros(data.x.shape[:2])
            x = tf.cast(data.x, layer.fprop_dtype)
            y, extras = layer.FProp(theta, x, paddings, seed=tf.constant([1, 2]))
            loss = tf.reduce_sum(tf.cast(y, tf.float32) * data.dy) + extras.get("aux_loss", 0.0)
        gradients = tape.gradient(loss, [data.x, *theta.Flatten()])
        return NestedMap(y=y, gradients=gradients)

    return fn


def _matmul(size: dict[str, Any]) -> tuple[Callable, tuple, int]:
    """One product of two rows a token, six times: forward and backward of two layers."""
    import tensorflow as tf

    from lingvo_moe.core.nested_map import NestedMap

    two = {**size, "groups": 2 * size["groups"], "num_experts": 1}
    x, _, _, wi, _ = arrays(two)
    return (
        lambda data: NestedMap(y=tf.matmul(data.x, data.w)),
        (NestedMap(x=x, w=wi[0]),),
        6,
    )


if __name__ == "__main__":
    main()
