"""Chooses whether a task recomputes activations in the backward pass, where its parameters leave that open.

The choice follows from the parameters, the mesh, the engine and the total memory of the devices. What is free at the
moment plays no part, so a run that is resumed on the same machine goes on with the same program, bit for bit.
"""

from dataclasses import replace

import tensorflow as tf

from lingvo_moe.analysis.plans.memory.state import held, parts_of_batch
from lingvo_moe.analysis.plans.memory.step_bytes import BESIDE
from lingvo_moe.core import randomness
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.console import units
from lingvo_moe.core.engine import kept_programs
from lingvo_moe.core.engine.device_memory import Memory
from lingvo_moe.core.engine.engines import engine_class
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.tracing import trace
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pipeline.params import micro_batches_of
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.forms import Forms
from lingvo_moe.core.task.step import Step
from lingvo_moe.core.tensors import origin

# The blocks of all stacks that are unrolled at most: each adds to the time that the program takes to compile.
MOST_BLOCKS = 8
# The share of the memory that the step may need by the estimate: the rest is for what the estimate leaves out, and
# for other programs.
SHARE = 0.5
_GIVEN = frozenset(("Const", "Placeholder"))  # weights, batch and constants


def chosen_form(
    params: Params, mesh: Mesh, memory: Memory, engine: str = "pjrt"
) -> tuple[InstantiableParams, str]:
    """Returns Params of the task in the form that is trained, and a line that says why.

    Activations are kept if the step then takes at most SHARE of the memory, by an estimate, and if it has at most
    MOST_BLOCKS blocks to unroll. If not, they are recomputed, which is the form that always works.

    Returns:
        (Params, line): `params.task` itself and '' if it leaves nothing open.
    """
    forms = params.task.cls.Strategy(params.task).OpenForms()
    if forms is None:
        return params.task, ""
    blocks = sum(forms.num_blocks.values())
    why = ""
    if blocks > MOST_BLOCKS:
        why = f"unrolling {blocks} blocks of layers would take long to compile (at most {MOST_BLOCKS} are unrolled)"
    elif memory.size is None:
        why = f"it is not known how much memory there is ({memory.whose})"
    else:
        need = memory.devices * step_bytes(forms, params, mesh, engine)
        size = f"{memory.whose} {units.size(memory.size, 1)}"
        if need > SHARE * memory.size:
            why = f"without recomputation the step needs about {units.size(need, 1)}, more than {SHARE:.0%} of {size}"
    name = forms.parameter
    if why:
        return forms.recomputing, f"{name}: on, since {why}; {name}=False turns it off"
    fits = f"the step needs about {units.size(need, 1)} of {size} without recomputation"
    return forms.keeping, f"{name}: off, since {fits}; {name}=True recomputes"


def step_bytes(forms: Forms, params: Params, mesh: Mesh, engine: str = "pjrt") -> int:
    """Estimates the bytes that a training step without recomputation needs on one device.

    They are the state, the gradients, and the activations. These count as sharded only where their rows are.

    Args:
        params: the experiment's parameters: `input` gives the batch, `train` the number of its micro-batches.
        engine: as for chosen_form.
    """
    task = forms.keeping.Instantiate()
    state = held(task, mesh)
    _, num = micro_batches_of(params)
    activations = activation_bytes(forms, params, mesh, engine)
    return state.total + state.Sums(num) + activations // parts_of_batch(task, params, mesh)


def activation_bytes(forms: Forms, params: Params, mesh: Mesh, engine: str = "pjrt") -> int:
    """Estimates the bytes of activations in a step without recomputation, on all devices together.

    They are the values that the backward pass takes from the forward pass, and what is beside the largest of these
    while it is differentiated. They are of the whole batch, whatever train.num_micro_batches is, and are read from the
    traced forward and backward pass of `forms.one_block`; what a block keeps counts once for each of its repetitions.
    Arguments are those of step_bytes. Nothing is compiled; the number is kept for the next start.
    """
    task = forms.one_block.Instantiate()
    step = train_step(task, params.input.Instantiate())
    state, batch = step.arg_specs
    text = f"{step.text}{engine} {forms.num_blocks}" if step.text else ""
    key = kept_programs.key_of(replace(step, name="activation_bytes", text=text), mesh)
    if (saved := kept_programs.find_bytes(key)) is not None:
        return int(saved)
    forward: set[str] = set()

    def gradients(theta: NestedMap, batch: NestedMap, step: tf.Tensor) -> list[tf.Tensor]:
        def compute() -> tuple[tf.Tensor, NestedMap]:
            result = task.FProp(theta, batch, seed=randomness.make_seed(task.p.seed, step))
            forward.update(op.name for op in result[0].graph.get_operations())
            return result

        return [g for g in task.Differentiate(theta, compute)[2].Flatten() if g is not None]

    specs = (state.theta, batch, state.step)
    # As the engine will trace it: TensorFlow's kernels keep other values than XLA's.
    graph = trace(Step("gradients", gradients, specs), mesh, engine_class(engine).XLA).graph
    values = {
        value.ref(): value
        for op in graph.get_operations()
        if op.name not in forward
        for value in map(origin, op.inputs)
        if value.op.name in forward and value.op.type not in _GIVEN
    }
    total = BESIDE * max(map(_num_bytes, values.values()), default=0)
    for value in values.values():
        total += _num_bytes(value) * forms.num_blocks.get(forms.StackOf(value.op.name), 1)
    kept_programs.keep_bytes(key, str(total).encode())
    return total


def _num_bytes(value: tf.Tensor) -> int:
    # A resource has no static shape; a step's own tensors do.
    return (value.shape.num_elements() or 0) * value.dtype.size
