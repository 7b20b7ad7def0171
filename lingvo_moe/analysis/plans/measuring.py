"""Measures a training step of an experiment on the devices of this process, on made-up data."""

import statistics
import time
from typing import Any

import numpy as np

from lingvo_moe.analysis.plans.recomputing import chosen_form
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.device_memory import memory_of
from lingvo_moe.core.engine.loop.steps import initial_state, train_step
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.meshes import check_divisible

_STEPS = 5


def measured_step(
    model: str, override: str, mesh: Mesh, memory: int, known_faults: str
) -> dict[str, Any]:
    """Runs a few steps of an experiment.

    Args:
        mesh: of as many devices as there are at most.
        memory: bytes of a device that a program may use. A program that needs more is not run.

    Returns:
        `memory` and `time` of a plan (step_plan.py), as far as they are known here; `work` is empty. The seconds of a
        step are the median.

    Raises:
        ValueError: of some subclass: an override or mesh that cannot be, or a known fault.
    """
    params = registry.GetParams(model, override)
    form, _ = chosen_form(params, mesh, memory_of("pjrt", mesh))  # as the trainer would run it
    task, inputs = form.Instantiate(), params.input.Instantiate()
    check_divisible(params, task, mesh)
    task.CheckInput(params.task, params.input)
    engine = PjrtEngine(mesh, known_faults=known_faults)
    step = train_step(task, inputs, params.train.num_micro_batches)
    run = engine.Compile(lower_step(step, mesh))
    used = run.Memory()
    needed = used["arguments"] + used["outputs"] - used["aliased"] + used["temporaries"]
    fits = needed <= memory
    measured: dict[str, Any] = {
        "memory": {
            "fits": fits,
            "needed": needed,
            "hbm": memory,
            "misses_by": max(0, needed - memory),
        },
        "work": [],
        "time": None,
    }
    if fits:
        batch = task.SampleBatch(inputs, np.random.RandomState(0))
        state, _ = run(initial_state(task, engine, 1), batch)
        seconds = []
        for _ in range(_STEPS):
            began = time.perf_counter()
            state, metrics = run(state, batch)
            engine.Get(metrics)  # waits for the step
            seconds.append(time.perf_counter() - began)
        measured["time"] = {"step_seconds": statistics.median(seconds), "collective_seconds": None}
    return measured
