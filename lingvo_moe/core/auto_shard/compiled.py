"""Reads the cost of a compiled program on the machine of a search, to check the search's own costs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from lingvo_moe.core.auto_shard.function import auto_shard
from lingvo_moe.core.auto_shard.machine import MeshMachine
from lingvo_moe.core.auto_shard.strategy import Strategy
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import CompiledProgram, PjrtEngine
from lingvo_moe.core.hlo.module import parse_module
from lingvo_moe.core.partitioner.known_faults import OFF
from lingvo_moe.core.planner.costs import costs

# Collectives are the same, and compiling is faster.
_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def compiled_step(
    fn: Callable[..., Any],
    strategy: Strategy,
    specs: Sequence[TensorSpec],
    by: Sequence[int],
    on: MeshMachine,
) -> float:
    """Seconds of a device for a function and its gradient in one program, compiled for this process's devices.

    Args:
        fn: of tensors; returns one tensor.
        strategy: for these arguments.
        specs: of the arguments.
        by: the numbers of the arguments whose gradients are computed.
        on: the machine.
    """
    return compiled_seconds(compile_step(fn, strategy, specs, by).HloText(), on)


def compile_step(
    fn: Callable[..., Any], strategy: Strategy, specs: Sequence[TensorSpec], by: Sequence[int]
) -> CompiledProgram:
    """The program of `compiled_step`: it returns the function's value, then the gradients."""
    sharded = auto_shard(fn, strategy.mesh, strategy=strategy, known_faults=OFF)

    def step(*args: tf.Tensor) -> list[tf.Tensor]:
        chosen = [args[i] for i in by]
        with tf.GradientTape() as tape:
            tape.watch(chosen)
            y = sharded(*args)
        return [y, *tape.gradient(y, chosen)]

    args = [
        replace(s, split=t.mapping, name=t.name)
        for s, t in zip(specs, strategy.arguments, strict=True)
    ]
    (result,) = strategy.results
    wanted = [TensorSpec(result.shape, "float32", result.mapping), *(args[i] for i in by)]
    engine = PjrtEngine(strategy.mesh, known_faults=OFF)
    return engine.Compile(engine.Lower(step, args, results=wanted, name="step"), _OPTIONS)


def compiled_seconds(text: str, on: MeshMachine) -> float:
    """Seconds of one device: its products and memory traffic, and its collectives.

    Args:
        text: of the compiled module.
        on: the machine.
    """
    total = 0.0
    for cost in costs(parse_module(text)):
        use = cost.collective
        if use is None:
            total += cost.times * on.Computing(cost.flops, cost.bytes)
        else:
            total += cost.times * on.SecondsAmong(use.kind, use.bytes, use.participants)
    return total
