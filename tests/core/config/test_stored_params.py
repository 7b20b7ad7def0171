"""The Params of a run, from its text: as they were, whatever its experiment has become since."""

import hypothesis
import hypothesis.strategies as st
import pytest
from toy_task import LinearModel

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.class_names import own_class
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.config.stored_params import (
    StoredParamsError,
    difference,
    restore,
    stored_values,
)


def _restored(now: Params, text: str) -> Params:
    params = now.Copy()
    restore(params, text, own_class)
    registry.configure(params)
    return params


@pytest.mark.parametrize("task", ["image", "lm", "mt"])
def test_each_experiment_is_made_of_any_other_of_its_task(task):
    """Classes, parts that only one has, and sizes: all that an edit of an experiment can change."""
    params = [registry.GetParams(name) for name in registry.AllNames(task)]
    for then in params:
        for now in (params[0], params[-1]):
            assert _restored(now, then.ToText()).ToText() == then.ToText()


def test_what_a_parameter_was_counts_not_what_it_is_now():
    then = registry.GetParams(
        "mt.M4Tiny", "task.moe.router=top_k;task.moe.router.k=1;train.max_steps=7"
    )
    now = registry.GetParams("mt.M4Tiny", "task.activation=gelu;task.num_kv_heads=1")
    now.task.moe.router.Define("temperature", 1.0, "Did not exist then.")
    now.task.moe.router.temperature = 2.0
    assert _restored(now, then.ToText()) == then
    text = then.ToText().replace("task.num_kv_heads : 0\n", "")
    assert _restored(now, text).task.num_kv_heads == 0  # its default
    now = registry.GetParams("mt.M4Tiny")
    now.task.moe.router.Define("temperature", 1.0, "Did not exist then.")
    now.task.moe.router.temperature = 2.0
    was = registry.GetParams("mt.M4Tiny").ToText()
    assert _restored(now, was).task.moe.router.temperature == 1.0


@pytest.mark.parametrize("path, value, message", [
    ("task.activation", "'swoosh'", "task.activation='swoosh' then, 'relu' now: must be one of"),
    ("task.swoosh", "3", "task.swoosh=3 then, nothing now: no parameter"),
    ("task.activation", "3 +", r"task.activation=3 \+ then, 'relu' now: is no literal"),
    ("task.activation", "__import__('os')", "then, 'relu' now: is no literal"),
    ("task.activation", "(" * 10_000, "is no literal"),
    ("task.moe.router.cls", "type/os/path", "'type/os/path' is not of lingvo_moe"),
    ("task.moe.router.cls", "type/lingvo_moe.core.moe.gone/Router", "names no class"),
])  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name_with_both_values(path, value, message):
    now = registry.GetParams("mt.M4Tiny")
    then = stored_values(now.ToText()) | {path: value}
    with pytest.raises(StoredParamsError, match=message):
        _restored(now, "".join(f"{path} : {value}\n" for path, value in then.items()))


def test_what_only_says_how_a_run_runs_is_never_missed():
    now = registry.GetParams("mt.M4Tiny")
    text = now.ToText() + "train.gone : 3\ntask.num_heads : 2\ntrain.max_steps : -5\n"
    assert _restored(now, text).train.max_steps == now.train.max_steps


def test_a_class_of_the_users_counts_where_the_experiment_of_today_names_it():
    then, now = registry.GetParams("toy_task.Line"), registry.GetParams("toy_task.Line")
    then.task.name = "other"
    assert _restored(now, then.ToText()).task.cls is LinearModel
    with pytest.raises(StoredParamsError, match="is not of lingvo_moe"):
        _restored(registry.GetParams("mt.M4Tiny"), then.ToText())


_NOW = registry.GetParams("mt.M4Tiny")
_LINES = _NOW.ToText().splitlines()


@hypothesis.given(st.lists(st.tuples(st.sampled_from(_LINES), st.text("[(0'\"a.:/-") | st.text())))
def test_any_text_is_taken_whole_or_refused(lines):
    """Each value that is not refused stands in the Params."""
    text = "\n".join(f"{line.split(' : ')[0]} : {value}" for line, value in lines)
    try:
        params = _restored(_NOW, text)
    except (StoredParamsError, registry.RegistryError):
        return
    assert not difference(stored_values(text), params)
