"""The registry: both names of an experiment, overrides, and names that are taken."""

import hypothesis
import hypothesis.strategies as st
import pytest

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import Params


def test_short_and_long_names_are_one_class():
    assert registry.GetExperiment("mt.M4Tiny") is registry.GetExperiment("mt.demo.M4Tiny")
    # By an older version's name of the module.
    assert registry.GetExperiment("lm.Tiny") is registry.GetExperiment("lm.demo.Tiny")
    model = registry.GetExperiment("lm.Mixtral8x7B")
    assert registry.GetExperiment("lm.open_models.Mixtral8x7B") is model
    assert "mt.M4MoE2048E36L" in registry.AllNames()


def test_overrides_are_applied_by_type():
    p = registry.GetParams("mt.M4Tiny", "task.num_experts=4; input.batch_size=2;train.max_steps=7")
    assert (p.task.num_experts, p.input.batch_size, p.train.max_steps) == (4, 2, 7)


def test_a_list_of_names_is_read_from_text():
    for text in ("['hidden', 'dispatched']", '["hidden","dispatched"]', "[hidden, dispatched]"):
        params = registry.GetParams("mt.M4Tiny", f"task.remat={text}")
        assert params.task.remat == ["hidden", "dispatched"]
        assert params.task.Instantiate().encoder.blocks.p.remat == ["hidden", "dispatched"]
    assert registry.GetParams("mt.M4Tiny", 'task.remat="dots"').task.remat == "dots"


def test_a_name_cannot_be_taken_twice():
    first = type("Same", (registry.Experiment,), {"__module__": "lingvo_moe.params.zz.one"})
    second = type("Same", (registry.Experiment,), {"__module__": "lingvo_moe.params.zz.two"})
    registry.Register(first)
    message = r"both .*params\.zz\.one and .*params\.zz\.two"
    with pytest.raises(registry.RegistryError, match=message):
        registry.Register(second)


@hypothesis.given(st.text() | st.text("\\;\n'\" \t=ax"), st.text("\\;\n'\" =x"))
def test_escaping_a_value_is_undone_by_reading_it(value, other):
    p = Params()
    p.Define("a", "", "A text.")
    p.Define("b", "", "Another.")
    for path, text in registry.split_override(
        f"a={registry.escape(value)};b={registry.escape(other)}"
    ):
        p.SetFromText(path, text)
    assert (p.a, p.b) == (value, other)


@pytest.mark.parametrize(
    "path", ["/data/a corpus", "/data/a;b", "/data/a\\b", "/data/it's", "/data/é=[1]"]
)
def test_a_plain_path_is_written_as_by_earlier_versions(path):
    assert registry.escape(path) == path.replace(";", "\\;")
