"""Every numeric parameter of mt.M4Tiny with any number gives an error that names it, or a training step."""

import functools
import importlib
import math
import os
import pkgutil

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
import toy_translation
from hypothesis import strategies as st

from lingvo_moe.core import kernels, layers, moe, optimizers
from lingvo_moe.core.base_layer import BaseLayer
from lingvo_moe.core.config import checks, registry
from lingvo_moe.core.config.hyperparams import ParamError, Params
from lingvo_moe.core.kernels import tensorflow
from lingvo_moe.core.moe.layer import ROUTERS
from lingvo_moe.core.optimizers.base_optimizer import BaseOptimizer
from lingvo_moe.core.optimizers.schedules import LearningRateSchedule
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.task.meshes import check_divisible
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.text.batches.order import PairOrder
from lingvo_moe.training.memory import check_memory

# Small batches and no loop: a step of TensorFlow's own kernels then takes half a second, run eagerly.
SMALL = (
    "task.repeat=False;"
    "input.batch_size=2;input.source_length=4;input.target_length=4;"
    "task.num_groups=2;task.num_experts=2;task.moe.dispatcher=index"
)
# The other routers have parameters of their own.
VARIANTS = ["", *(f"task.moe.router={name}" for name in ROUTERS if name != "expert_choice")]
VARIANTS.append("task.moe.router=expert_choice;task.decoder_router=top2")
# So have the other optimizers and schedules.
RATE = "task.optimizer.learning_rate"
OPTIMIZERS = [
    f"task.optimizer=adam;{RATE}=transformer",
    f"task.optimizer=adamw;{RATE}=cosine;{RATE}.total_steps=20;task.ema_decay=0.5",
    f"task.optimizer=sgd;{RATE}=inverse_sqrt",
]
VARIANTS += OPTIMIZERS
# The machine's memory that check_memory assumes, so that a step stays small.
MEMORY = 2**20

NASTY = (0, 1, 2, 3, 7, -1, 2**31 - 1, 2**31, -(2**31), 10**12, 10**400, 0.5, 1.0, 1.5, -0.5)
NASTY += (1e-300, 1e-40, 1e-30, 1e30, 1e300, math.inf, -math.inf, math.nan, True)


def _leaves(value, path=""):
    """(path, the Params that own it, name) of all parameters."""
    if isinstance(value, Params):
        for name, inner in value.IterParams():
            here = f"{path}.{name}" if path else name
            yield here, value, name
            yield from _leaves(inner, here)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")


def _is_numeric(check):
    return check is not checks.ANYTHING and any(map(check.Allows, (1000, 0.5)))


@functools.cache
def _numeric(variant):
    p = registry.GetParams("mt.M4Tiny", _override(variant))
    leaves = [leaf for leaf in _leaves(p) if not p.WhyDerived(leaf[0])]
    return [path for path, owner, name in leaves if _is_numeric(owner.Range(name))]


def _override(*parts):
    return ";".join((SMALL, *filter(None, parts)))


def _text(value):
    """The value as a user writes it."""
    return str(value).replace("inf", "1e999")


def _checked(variant, path, value):
    """Returns Params, task and input with one value changed, after all checks of the trainer; raises ValueError."""
    p = registry.GetParams("mt.M4Tiny", _override(variant, f"{path}={_text(value)}"))
    task, inputs = p.task.Instantiate(), p.input.Instantiate()
    check_divisible(p, task, single_device())
    task.CheckInput(p.task, p.input)
    check_memory(p, task, inputs, single_device(), available=MEMORY)
    return p, task, inputs


def _refusal(path, value, variant=""):
    """Returns the message that refuses a value and names the parameter; '' for an accepted value."""
    try:
        _checked(variant, path, value)
        return ""
    except ValueError as e:
        message = str(e)
    assert path.rpartition(".")[2] in message, f"{path}={value}: {message}"
    assert "\n" not in message and len(message) < 700
    return message


def _key(task, inputs):
    """Identifies the step of a task: the Params of its layers, and the batch."""
    own = [(name, value) for name, value in task.p.IterParams() if not isinstance(value, Params)]
    layers = [task.optimizer.p.ToText()]

    def add(layer):
        for child in layer.children.Flatten():
            layers.append(child.p.ToText())
            add(child)

    add(task)
    return repr((own, layers, inputs.BatchSpec().FlattenItems()))


_stepped: dict[str, tuple[float, float]] = {}


def _step(p, task, inputs):
    """(loss, skipped) of one step from random weights on random pairs, computed once for each program."""
    order = PairOrder({"aa": 1000, "bb": 10, "cc": 1}, p.input.temperature, p.input.seed)
    assert 0 <= next(order)[0] < 3
    key = _key(task, inputs)
    if key in _stepped:
        return _stepped[key]
    rng = np.random.default_rng(0)

    def value(path, spec):
        if path.startswith("theta"):
            return tf.cast(rng.normal(0.0, 0.1, spec.shape), spec.dtype)
        return tf.zeros(spec.shape, spec.dtype)

    specs = task.StateSpecs()
    state = specs.Pack([value(path, spec) for path, spec in specs.FlattenItems()])
    vocab = min(p.task.source_vocab_size, p.task.target_vocab_size)
    batch = toy_translation.batch(inputs.BatchSpec(), max(vocab, 5))
    batch = batch.Transform(lambda ids: tf.constant(np.minimum(ids, vocab - 1)))
    if p.input.task_ids:
        batch.src.task_ids, batch.tgt.task_ids = (
            tf.zeros_like(x.ids) for x in (batch.src, batch.tgt)
        )
    with use_mesh(single_device()), kernels.using(tensorflow):
        state, metrics = task.TrainStep(state, batch)
    _stepped[key] = float(metrics.loss), float(metrics.skipped)
    return _stepped[key]


def test_every_number_has_a_range_where_it_is_defined():
    """No numeric parameter of a layer, router, optimizer, schedule, input or run accepts every number."""

    def subclasses(cls):
        for sub in cls.__subclasses__():
            yield from (sub, *subclasses(sub))

    registry.AllNames()  # imports the tasks
    for package in (layers, moe, optimizers):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    classes = {
        MtInput,
        *(c for base in (BaseLayer, BaseOptimizer, LearningRateSchedule) for c in subclasses(base)),
    }
    found = [c.Params() for c in classes if c.__module__.startswith("lingvo_moe.")]
    assert len(found) > 30
    everything = [leaf for p in [*found, registry.TrainParams()] for leaf in _leaves(p)]
    numeric = [leaf for leaf in everything if _is_numeric(leaf[1].Range(leaf[2]))]
    assert len(numeric) > 150
    wide = (checks.Integer(), checks.Number())
    assert [path for path, owner, name in numeric if owner.Range(name) in wide] == []
    # Templates of layers that a parent may leave out.
    loose = {name for _, owner, name in everything if owner.Range(name) == checks.ANYTHING}
    assert loose == {"body", "cross_atten_tpl", "first", "position"}


@pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda v: v.split("=")[1].split(";")[0] if v else "top2"
)
def test_any_number_is_taken_or_refused_by_name(variant):
    paths = _numeric(variant)
    assert len(paths) > 35
    own = "optimizer." if variant in OPTIMIZERS else "router." if variant else ""
    for number, path in enumerate(path for path in paths if own in path):
        for value in NASTY[number % 2 :: 2]:
            _refusal(path, value, variant)
        p = registry.GetParams("mt.M4Tiny", _override(variant))
        for value in (math.inf, -math.inf, math.nan, True, "1", 10**400, -(2**31)):
            with pytest.raises(ParamError) as e:
                p.Set(**{path: value})
            assert str(e.value).startswith(f"{path}=")


def test_a_router_s_table_holds_every_token():
    path = "task.moe.router.vocab_size"
    message = (
        r"^task\.moe\.router\.vocab_size=399: must be at least 400, the ids that it is asked for"
    )
    with pytest.raises(ParamError, match=message):
        _checked("task.moe.router=hash", path, 399)
    assert _checked("task.moe.router=hash", path, 400)[0].Get(path) == 400


numbers = st.one_of(
    st.sampled_from(NASTY),
    st.integers(-3, 12),
    st.integers(0, 2**31),
    st.floats(width=32),
    st.floats(0, 1),
)


# Continuous builds draw the same 30 every time; `make fuzz` draws as many others as requested.
@hypothesis.settings(max_examples=int(os.environ.get("FUZZ_NUMBERS", "30")))
@hypothesis.seed(int(os.environ.get("FUZZ_SEED", "0")))
@hypothesis.given(variant=st.sampled_from(VARIANTS), data=st.data())
def test_any_number_is_refused_by_name_or_trains(variant, data):
    path = data.draw(st.sampled_from(_numeric(variant)))
    value = data.draw(numbers)
    if _refusal(path, value, variant):
        return
    loss, skipped = _step(*_checked(variant, path, value))
    assert math.isfinite(loss) or skipped == 1, (path, value, loss, skipped)
