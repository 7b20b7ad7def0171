"""Every parameter that can be set changes what is built; one without effect is refused."""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lingvo_moe.core import registry
from lingvo_moe.core.hyperparams import InstantiableParams, Params

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
