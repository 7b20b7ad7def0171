"""Every parameter of a task that can be set is read by its training step; one without effect is refused."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.sharding import single_device, use_mesh


def _leaves(value: Params, path: str = "") -> Iterator[tuple[str, Params, str]]:
    for name, inner in value.IterParams():
        here = f"{path}.{name}" if path else name
        if isinstance(inner, Params):
            yield from _leaves(inner, here)
        elif name != "cls":
            yield here, value, name


def _others(p: Params, path: str) -> Iterator[Any]:
    """Other values that a parameter accepts."""
    value, check = p.Get(path), p.Range(path)
    names = [*getattr(check, "names", ()), *(p._param(path).choices or ())]
    candidates = [*names, True, False, 1, 2, 4, 0.25, 0.75, "bfloat16", "float32"]
    candidates += ["other", ["de"], [2, 1], {"B": "expert"}, {}, {"M": "expert"}, {"H": "expert"}]
    for other in candidates:
        if type(other) is not type(value) and value is not None and not isinstance(value, float):
            continue
        if other != value and not check(other):
            yield other


def _read_by_a_step(p: Params, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, str]]:
    """The class and the name of each parameter that is read while a training step is made and traced."""
    reads, get = set(), Params.__getattr__

    def read(self: Params, name: str) -> Any:
        if not name.startswith("_"):
            reads.add((_kind(self), name))
        return get(self, name)

    with monkeypatch.context() as patch, use_mesh(single_device()):
        patch.setattr(Params, "__getattr__", read)
        # Tracing the backward pass takes most of the time, and would read nothing more.
        patch.setattr(tf.GradientTape, "gradient", lambda _, y, xs: [*map(tf.zeros_like, xs)])
        inputs = p.input.Instantiate()
        step = train_step(p.task.Instantiate(), inputs, p.train.num_micro_batches)
        trees = [
            tree.Transform(lambda s: tf.TensorSpec(s.shape, s.dtype)) for tree in step.arg_specs
        ]

        def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
            rest = iter(tensors)
            return step.fn(*(tree.Transform(lambda _: next(rest)) for tree in trees))[0].Flatten()

        specs = [spec for tree in trees for spec in tree.Flatten()]
        tf.function(flat, autograph=False).get_concrete_function(*specs)
    return reads


def _kind(p: Params) -> Any:
    own = dict(p.IterParams())
    return own.get("cls", frozenset(own))


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "override"), [
    ("mt.M4Tiny", ""),
    ("mt.M4Tiny", "task.num_experts=0"),
    ("mt.M4Tiny", "task.moe.dispatcher=dropless;task.moe.router=hash;task.moe.router.table=modular"),
    ("lm.Tiny", ""),
    (
        "lm.Tiny",
        "task.num_experts=4;task.moe.router=top_k;task.attention=extended;task.attention.qk_norm=head;"
        "task.attention.biases=True;task.attention.sinks=True;task.attention.window=3;task.moe.experts.biases=True;"
        "task.nth_attention=latent;task.position=yarn;task.multi_token_weight=0.5;task.fprop_dtype=bfloat16",
    ),
    ("image.Digits", ""),
])  # fmt: skip
def test_what_a_step_does_not_read_is_refused(experiment, override, monkeypatch):
    p = registry.GetParams(experiment, override)
    reads, ignored = _read_by_a_step(p, monkeypatch), []
    for path, owner, name in _leaves(p.task, "task"):
        if name in ("length_alpha", "exchange_factor"):  # which inference reads
            continue
        if (_kind(owner), name) not in reads and not p.WhyDerived(path) and not p.WhyUnused(path):
            ignored += [path] * all(_is_taken(p, path, other) for other in _others(p, path))
    assert ignored == []


def _is_taken(p: Params, path: str, value: Any) -> bool:
    try:
        p.Copy().Set(**{path: value}).task.Instantiate()
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("override", "why"), [
    ("task.pipeline.schedule=gpipe", "has no effect with task.pipeline.stages=1; set that, or"),
    ("task.num_experts=0;task.num_groups=4", "has no effect with task.num_experts=0"),
    ("task.num_experts=0;task.moe.router.level=sentence", "has no effect with task.num_experts=0"),
    ("task.moe.dispatcher=dropless;task.moe.min_capacity=8", "task.moe.dispatcher=dropless"),
    ("task.moe.router=hash;task.moe.router.table=modular;task.moe.router.table_seed=3", "table=mod"),
])  # fmt: skip
def test_an_override_without_effect_is_refused(override, why):
    path, _, value = override.rpartition(";")[2].partition("=")
    with pytest.raises(registry.RegistryError, match=re.escape(f"{path}={value}: has no")) as error:
        registry.GetParams("mt.M4Tiny", override)
    assert why in str(error.value)
    p = registry.GetParams("mt.M4Tiny", override, skip_derived=True)  # of an older run
    own = f"{path}={registry.GetParams('mt.M4Tiny', override.rpartition(';')[0]).Get(path)}"
    registry.GetParams("mt.M4Tiny", f"{override.rpartition(';')[0]};{own}")  # it stays as it is
    assert p.WhyUnused(path)


@pytest.mark.parametrize("override, message", [
    ("task.moe.num_experts=8", "the model sets it from task.num_experts; set that"),
    ("task.moe.hidden_dim=9", "sets it from task.expert_hidden_dim or task.hidden_dim"),
    ("task.moe.experts.model_dim=16", "the model sets it from task.model_dim"),
    ("task.moe.experts.relu_dropout_prob=0.5", "the model sets it from task.dropout"),
    ("task.moe.router=hash;task.moe.router.num_experts=8", "sets it from task.num_experts"),
    ("task.moe.name=mixture", "a part has the name of its place in the model"),
])  # fmt: skip
def test_a_parameter_that_the_model_sets_is_refused(override, message):
    path, _, value = override.rpartition(";")[2].partition("=")
    with pytest.raises(registry.RegistryError, match=f"{path}={value}: has no effect: .*{message}"):
        registry.GetParams("mt.M4Tiny", override)
    p = registry.GetParams("mt.M4Tiny", override, skip_derived=True)  # of an older run
    assert f"{path} :" not in p.ToText()


def test_an_experiment_that_sets_such_a_parameter_is_refused():
    p = registry.GetParams("mt.M4Tiny").task
    p.moe.experts.relu_dropout_prob = 0.5
    message = r"m4\.moe\.experts\.relu_dropout_prob=0\.5: has no effect"
    with pytest.raises(ValueError, match=message):
        p.Instantiate()
