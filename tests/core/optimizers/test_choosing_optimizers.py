"""Optimizers and schedules by name on the command line, and each of them over devices."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import compare
from optimizer_testing import spec
from refusals import refuses
from slots import init_slots

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import GShardAdafactor
from lingvo_moe.core.optimizers.adam import Adam
from lingvo_moe.core.optimizers.registry import OPTIMIZERS
from lingvo_moe.core.optimizers.schedules import Cosine, Transformer
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.inspect import print_optimizer


def _optimizer(override):
    return registry.GetParams("mt.M4Tiny", override).task.Instantiate().optimizer


def test_both_are_chosen_by_name_in_any_order():
    rate = "task.optimizer.learning_rate"
    optimizer = _optimizer(
        f"task.optimizer=adam;{rate}=cosine;{rate}.total_steps=20;{rate}.value=0.5;task.optimizer.beta2=0.98"
    )
    assert (type(optimizer), type(optimizer.learning_rate)) == (Adam, Cosine)
    assert (optimizer.p.beta2, optimizer.p.learning_rate.value) == (0.98, 0.5)


def test_the_paper_s_recipe_has_a_name_and_is_that_of_its_models():
    assert registry.GetParams("mt.M4MoE2048E36L").task.optimizer.cls is GShardAdafactor
    named = registry.GetParams("mt.M4Tiny", "task.optimizer=gshard").task.optimizer
    assert named == registry.GetParams("mt.M4MoE2048E36L").task.optimizer


def test_transformer_s_schedule_takes_the_model_s_width():
    override = "task.optimizer=adam;task.optimizer.learning_rate=transformer;task.model_dim=64"
    rate = _optimizer(override).learning_rate
    assert isinstance(rate, Transformer) and rate.p.model_dim == 64


def test_a_mistake_in_an_optimizer_is_named_by_its_place():
    override = "task.optimizer=adamw;task.optimizer.decay_exclude=['*.router']"
    task = registry.GetParams("mt.M4Tiny", override).task.Instantiate()
    with pytest.raises(ValueError, match=r"^task\.optimizer\.decay_exclude=.*matches no variable"):
        task.StateSpecs()


def test_a_warning_of_a_schedule_has_the_override_that_mends_it():
    rate = "task.optimizer.learning_rate"
    override = f"{rate}=linear;{rate}.total_steps=20"
    warned = registry.GetParams("mt.M4Tiny", override).task.Instantiate().Warnings(max_steps=10)
    assert warned == [
        f"{rate}.total_steps=20: the run ends at step 10, before the rate has decayed; "
        f"--model_params_override='{rate}.total_steps=10' ends both together"
    ]


def test_the_state_of_a_trillion_parameters_is_only_described():
    override = "task.optimizer=adamw;task.ema_decay=0.999;train.mesh=expert:2048"
    specs = registry.GetParams("mt.M4MoE2048E60L", override).task.Instantiate().StateSpecs()

    def count(part):
        return sum(int(np.prod(s.shape, dtype=np.int64)) for s in specs[part].Flatten())

    assert count("theta") > 1e12
    assert (count("slots"), count("ema")) == (2 * count("theta"), count("theta"))
    of_weights, of_ema = ([s.split for s in specs[part].Flatten()] for part in ("theta", "ema"))
    assert of_weights == of_ema


def test_inspecting_a_model_says_what_training_keeps(capsys):
    override = (
        "task.optimizer=adamw;task.ema_decay=0.999;task.optimizer.decay_exclude=['*.router.wg'];"
        "task.optimizer.slow=['*.router.*']"
    )
    task = registry.GetParams("mt.M4Demo", override).task.Instantiate()
    print_optimizer(task, Mesh.parse("expert:1"))
    assert capsys.readouterr().out == (
        "optimizer AdamW: 8 bytes a parameter, 32.8 MiB on each device\n"
        "weight decay 0.01 on 32 of 60 variables: *.k, *.o, *.q, *.v, *.wi, *.wo\n"
        "0.1 times the learning rate for 2 of 60 variables: *.wg\n"
        "moving average of the weights: 4 bytes a parameter, 16.4 MiB on each device\n"
    )


@pytest.mark.parametrize(
    "name, expected", [("adafactor", "0.4"), ("gshard", "0.4"), ("adam", "8"), ("sgd", "4")]
)
def test_bytes_of_state_are_those_of_the_page(name, expected, capsys):
    task = registry.GetParams("mt.M4Demo", f"task.optimizer={name}").task.Instantiate()
    print_optimizer(task, Mesh.parse("expert:8"))
    assert f": {expected} bytes a parameter, " in capsys.readouterr().out


@pytest.mark.parametrize("name, params, slots", [
    ("adam", {}, ["mean", "square"]),
    ("adam", {"beta1": 0.0}, ["square"]),
    ("adamw", {}, ["mean", "square"]),
    ("sgd", {"momentum": 0.5}, ["velocity"]),
    ("sgd", {"momentum": 0.0}, []),
])  # fmt: skip
def test_slots_are_float32_and_sharded_like_the_weight(name, params, slots):
    """No slot holds an average of nothing."""
    optimizer = OPTIMIZERS[name].Params().Set(**params).Instantiate()
    found = optimizer.SlotSpecs(NestedMap(w=spec((4, 6), "ME").Stacked(3))).w
    assert sorted(found) == slots
    for slot in found.Flatten():
        assert (slot.shape, slot.letters, slot.dtype) == ((3, 4, 6), "LME", "float32")
        assert slot.split == (None, None, "expert") and slot.path.startswith("w.")


@refuses(
    ValueError,
    ("adam", {"epsilon": 0.0}, "epsilon=0.0: must be a"),
    ("adafactor", {"multiply_by_parameter_scale": False, "epsilon2": 0.5}, "epsilon2=0.5: has no"),
    ("sgd", {"momentum": 0.0, "nesterov": True}, "nesterov=True: has no effect without momentum"),
    plain=True,
)
def test_parameters_that_are_refused(name, params):
    OPTIMIZERS[name].Params().Set(**params).Instantiate()


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "gshard"])
def test_over_devices_it_is_that_of_one(name):
    """Sharded weights, gradients and slots; only the sums of squares cross between devices."""
    optimizer = OPTIMIZERS[name].Params().Set(weight_decay=0.1).Instantiate()
    specs = NestedMap(wi=spec((8, 4, 6), "EMH").Stacked(2))
    theta, grads = (specs.Transform(lambda s, i=i: s.Init(make_seed(i, 0)).numpy()) for i in (1, 2))
    slots = init_slots(optimizer, specs, make_seed(0, 0), theta).Transform(
        lambda x: x.numpy() + 0.5
    )

    def update(state, grads):
        return optimizer.Update(state, grads, specs)

    args = [NestedMap(theta=theta, slots=slots, step=np.int32(3)), grads]
    splits = [
        NestedMap(theta=specs, slots=optimizer.SlotSpecs(specs), step=TensorSpec((), "int32")),
        specs,
    ]
    got, collectives = compare(update, args, splits, tol=1e-5)
    assert set(collectives) == {"all-reduce"}
    assert not tf.reduce_all(got[0].wi == theta.wi)
