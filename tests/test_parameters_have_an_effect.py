"""Every parameter that can be set changes what is built; one without effect is refused."""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.sharding import single_device, use_mesh

# Read only where another parameter has a certain value.
CONDITIONAL = {
    "task.moe.router.num_tasks",  # level=task
}


def _leaves(value: Params, path: str = "") -> Iterator[tuple[str, Params, str]]:
    for name, inner in value.IterParams():
        here = f"{path}.{name}" if path else name
        if isinstance(inner, Params):
            yield from _leaves(inner, here)
        elif name != "cls":
            yield here, value, name


def _settable() -> dict[str, str]:
    """The experiment in which each parameter of a task or an input is set, by path and class."""
    found: dict[tuple[str, type], tuple[str, str]] = {}
    for name in sorted(registry.AllNames(), key=lambda n: n != "mt.M4Tiny"):
        p = registry.GetParams(name)
        for path, owner, _ in _leaves(p):
            if isinstance(owner, InstantiableParams) and not p.WhyDerived(path):
                found.setdefault((path, owner.cls), (name, path))
    return {f"{name}:{path}": name for name, path in found.values()}


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


def _built(p: Params) -> str:
    """The parameters of each part of a task, without the templates among them."""
    task = p.task.Instantiate()
    parts = [task.optimizer.p.ToText()]

    def add(layer: Any) -> None:
        for child in layer.children.Flatten():
            own = [(k, v) for k, v in child.p.IterParams() if not isinstance(v, Params)]
            parts.append(f"{child.path} {own}")
            add(child)

    add(task)
    return "\n".join(parts)


def _is_read(cls: type, name: str) -> bool:
    """Whether the code of a class, or of a base class, names a parameter apart from its definition."""
    for each in cls.__mro__:
        if each.__module__.startswith("lingvo_moe."):
            code = inspect.getsource(sys.modules[each.__module__])
            own = each.__dict__.get("Params")
            if own is not None:
                code = code.replace(inspect.getsource(own.__func__), "")
            if re.search(
                rf"\.{name}\b|[\"']{name}[\"']|\{{side\}}_{name.partition('_')[2]}\b", code
            ):
                return True
    return False


def _read_by_a_step(p: Params, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, str]]:
    """The class and the name of each parameter that is read while a training step is made and traced."""
    reads, get = set(), Params.__getattr__

    def read(self: Params, name: str) -> Any:
        if not name.startswith("_"):
            reads.add((_kind(self), name))
        return get(self, name)

    with monkeypatch.context() as patch, use_mesh(single_device()):
        patch.setattr(Params, "__getattr__", read)
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


@pytest.mark.parametrize(
    ("experiment", "override"),
    [
        ("mt.M4Tiny", ""),
        ("mt.M4Tiny", "task.num_experts=0"),
        (
            "mt.M4Tiny",
            "task.moe.dispatcher=dropless;task.moe.router=hash;task.moe.router.table=modular",
        ),
        ("lm.Tiny", ""),
        ("image.Digits", ""),
    ],
)
def test_what_a_step_does_not_read_is_refused(
    experiment: str, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = registry.GetParams(experiment, override)
    reads, ignored = _read_by_a_step(p, monkeypatch), []
    for path, owner, name in _leaves(p.task, "task"):
        if (_kind(owner), name) not in reads and not p.WhyDerived(path) and not p.WhyUnused(path):
            ignored += [path] * all(_is_taken(p, path, other) for other in _others(p, path))
    assert ignored == []


def _is_taken(p: Params, path: str, value: Any) -> bool:
    try:
        p.Copy().Set(**{path: value}).task.Instantiate()
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("task.pipeline.schedule=gpipe", "has no effect with task.pipeline.stages=1; set that, or"),
        ("task.pipeline.splits=[1, 2]", "has no effect with task.pipeline.stages=1"),
        ("task.pipeline.micro_batches=2", "has no effect with task.pipeline.stages=1"),
        ("task.num_experts=0;task.num_groups=4", "has no effect with task.num_experts=0"),
        (
            "task.num_experts=0;task.moe.router.level=sentence",
            "has no effect with task.num_experts=0",
        ),
        ("task.moe.dispatcher=dropless;task.moe.min_capacity=8", "task.moe.dispatcher=dropless"),
        (
            "task.moe.router=hash;task.moe.router.table=modular;task.moe.router.table_seed=3",
            "table=mod",
        ),
    ],
)
def test_an_override_without_effect_is_refused(override: str, why: str) -> None:
    path, _, value = override.rpartition(";")[2].partition("=")
    with pytest.raises(registry.RegistryError, match=re.escape(f"{path}={value}: has no")) as error:
        registry.GetParams("mt.M4Tiny", override)
    assert why in str(error.value)
    p = registry.GetParams("mt.M4Tiny", override, skip_derived=True)  # of an older run
    own = f"{path}={registry.GetParams('mt.M4Tiny', override.rpartition(';')[0]).Get(path)}"
    registry.GetParams("mt.M4Tiny", f"{override.rpartition(';')[0]};{own}")  # it stays as it is
    assert p.WhyUnused(path)


@pytest.fixture(scope="module")
def settable() -> dict[str, str]:
    return _settable()


def test_every_parameter_changes_what_is_built(settable: dict[str, str]) -> None:
    without = []
    assert len(settable) > 60
    for key, experiment in settable.items():
        path = key.partition(":")[2]
        p = registry.GetParams(experiment)
        if path.count(".") == 1:  # of the task itself, or of the input
            owner, _, name = path.partition(".")
            if not _is_read(p.Get(owner).cls, name):
                without.append(path)
            continue
        if path in CONDITIONAL:
            continue
        before, others = _built(p), list(_others(p, path))
        if not any(_changes(experiment, path, other, before) for other in others):
            without.append(path)
    assert without == []


def _changes(experiment: str, path: str, value: Any, before: str) -> bool:
    p = registry.GetParams(experiment)
    p.Set(**{path: value})
    try:
        return _built(p) != before
    except ValueError as e:  # a value that does not fit the model
        return path.rpartition(".")[2] in str(e)


@pytest.mark.parametrize(
    "override, message",
    [
        ("task.moe.num_experts=8", "the model sets it from task.num_experts; set that"),
        ("task.moe.num_groups=0", "the model sets it from task.num_groups"),
        ("task.moe.hidden_dim=9", "sets it from task.expert_hidden_dim or task.hidden_dim"),
        ("task.moe.experts.model_dim=16", "the model sets it from task.model_dim"),
        ("task.moe.experts.relu_dropout_prob=0.5", "the model sets it from task.dropout"),
        ("task.moe.router=hash;task.moe.router.num_experts=8", "sets it from task.num_experts"),
        ("task.decoder_router=top_k;task.decoder_router.model_dim=8", "from task.model_dim"),
        ("task.moe.name=mixture", "a part has the name of its place in the model"),
    ],
)
def test_a_parameter_that_the_model_sets_is_refused(override: str, message: str) -> None:
    path, _, value = override.rpartition(";")[2].partition("=")
    with pytest.raises(registry.RegistryError, match=f"{path}={value}: has no effect: .*{message}"):
        registry.GetParams("mt.M4Tiny", override)
    p = registry.GetParams("mt.M4Tiny", override, skip_derived=True)  # of an older run
    assert f"{path} :" not in p.ToText()


def test_an_experiment_that_sets_such_a_parameter_is_refused() -> None:
    p = registry.GetParams("mt.M4Tiny").task
    p.moe.experts.relu_dropout_prob = 0.5
    with pytest.raises(
        ValueError, match=r"m4\.moe\.experts\.relu_dropout_prob=0\.5: has no effect"
    ):
        p.Instantiate()
