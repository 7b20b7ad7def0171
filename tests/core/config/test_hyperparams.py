"""Params: definitions, dotted paths, text, copies, and errors with suggestions."""

import pytest
from hypothesis import given, settings, strategies as st
from refusals import refuses

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params


class Thing:
    def __init__(self, params, extra=None):
        self.params, self.extra = params, extra


def _params():
    inner = InstantiableParams(Thing)
    inner.Define("hidden_dim", 64, "H.")
    inner.Define("rate", 0.5, "A rate.")
    p = Params()
    p.Define("model", inner, "The model.")
    p.Define("layers", [inner.Copy(), inner.Copy()], "A list.")
    p.Define("split", {"E": "expert"}, "A map.")
    p.Define("name", "x", "A name.")
    p.Define("flag", False, "A flag.")
    p.Define("nothing", None, "Anything.")
    return p


def test_set_get_by_path_and_copy_is_deep():
    p = _params()
    q = p.Copy().Set(name="y", **{"model.hidden_dim": 128})
    assert q.Get("model.hidden_dim") == 128 and p.model.hidden_dim == 64
    q.Set(**{"layers[1].rate": 0.75})
    assert (q.layers[1].rate, p.layers[1].rate) == (0.75, 0.5)
    q.split["G"] = "data"
    assert p.split == {"E": "expert"}
    assert p.Get("layers[1].rate") == 0.5 and p.Help("model.hidden_dim") == "H."


@pytest.mark.parametrize(
    "path, near", [("modle", "model"), ("model.hiden_dim", "hidden_dim"), ("layers[0].rte", "rate")]
)
def test_unknown_names_suggest_the_nearest(path, near):
    for use in (lambda p: p.Get(path), lambda p: p.SetFromText(path, "1")):
        with pytest.raises(AttributeError, match=f"did you mean.*{near}"):
            use(_params())
    with pytest.raises(AttributeError, match="name"):
        _params().nme = 3


def test_definitions_are_checked():
    p = _params()
    for bad in ("name", "a b", "Copy", "_x"):
        with pytest.raises(AttributeError):
            p.Define(bad, 1, "")
    assert "model" not in p.Delete("model")


def test_frozen_params_do_not_change_and_their_copies_do():
    p = _params().Freeze()
    for change in (
        lambda: p.Set(name="z"),
        lambda: p.model.Set(rate=0.1),
        lambda: p.Delete("name"),
    ):
        with pytest.raises(AttributeError, match="frozen"):
            change()
    with pytest.raises(AttributeError, match="frozen"):
        p.layers[0].rate = 1.0
    assert p.Copy().Set(name="z").name == "z"


def test_text_round_trip():
    p = _params()
    q = p.Copy().Set(**{"model.rate": 0.25}, name="a = b : 'c'\n", split={"G": ("x", "y")})
    q.layers[1].hidden_dim = 7
    assert p.Copy().FromText(q.ToText()) == q


@settings(max_examples=20)
@given(
    st.text(),
    st.integers(-(2**31), 2**31 - 1),
    st.floats(-1e38, 1e38).filter(lambda x: not 0 < abs(x) < 1e-37),
    st.booleans(),
)
def test_any_value_survives_text(name, number, rate, flag):
    p = _params().Set(name=name, flag=flag, **{"model.hidden_dim": number, "model.rate": rate})
    assert _params().FromText(p.ToText()).ToText() == p.ToText()


@refuses(
    ValueError,
    ("model.hidden_dim : many", "line 2: model.hidden_dim"),
    ("model.hidden_dim : 1.5", "expected int"),
    ("model.hidden_dim : None", "expected int"),
    ("model.cls : type/no_such_module/Thing", "names no class"),
    ("model.cls : Thing", "names no class"),
    ("no separator", "line 2"),
    ("model.nme : 1", AttributeError, "nme"),
)
def test_bad_text_names_the_line(line):
    _params().FromText(f"# comment\n{line}\n")


def test_text_is_read_as_the_type_that_is_there():
    p = _params()
    for path, text, value in [
        ("flag", "true", True),
        ("model.rate", "1", 1.0),
        ("name", "plain words", "plain words"),
        ("nothing", "bfloat16", "bfloat16"),
        ("split", "{'G': 'd'}", {"G": "d"}),
    ]:
        p.SetFromText(path, text)
        assert p.Get(path) == value


# --- ranges


class Layer(Thing):
    @classmethod
    def Params(cls):
        p = InstantiableParams(cls)
        p.Define("name", "layer", "A name.")
        p.Define("dim", 0, "A width; a parent sets it.", check=checks.SIZE)
        p.Define("rate", 0.5, "A rate.", check=checks.SHARE)
        p.Define(
            "names", ["a", "b"], "Names.", check=checks.ListOf(checks.TEXT, "a list of strings")
        )
        return p


def _nested():
    p = Params()
    p.Define("layers", [Layer.Params(), Layer.Params()], "Layers.")
    p.Define("layer", Layer.Params(), "A layer.", choices={"one": Layer, "two": Layer})
    return p


@pytest.mark.parametrize(("path", "value", "message"), [
    ("layer.dim", -16, "layer.dim=-16: must be an integer of at least 1"),
    ("layer.dim", True, "layer.dim=True: must be an integer of at least 1"),
    ("layers[1].rate", 1.0, "layers[1].rate=1.0: must be a number in [0, 1)"),
    ("layers[1].rate", "x", "layers[1].rate='x': must be a number in [0, 1)"),
    ("layer.names[1]", 3, "layer.names[1]=3: must be a list of strings"),
    ("layer.name", 3, "layer.name=3: must be a string"),
    ("layer", None, "layer=None: must be one of one, two, or Params of a class"),
    ("layer", 3, "layer=3: must be one of one, two, or Params of a class"),
    ("layer.dim", 1 << 16609, "layer.dim=an integer of 16610 bits: must be an integer"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_value_out_of_range_is_refused_by_path_and_changes_nothing(path, value, message):
    p = _nested()
    before = p.ToText()
    with pytest.raises(ParamError) as e:
        p.Set(**{path: value})
    assert str(e.value).startswith(message)
    assert p.ToText() == before


def test_a_default_may_be_out_of_range_until_it_is_used():
    p = _nested()
    assert p.FromText(p.ToText()) == p
    p.layer.Set(dim=3).Set(dim=0)
    with pytest.raises(ParamError, match=r"^layer\.dim=0: must be an integer of at least 1$"):
        p.layer.Instantiate()
    assert p.layer.Set(dim=3).Instantiate().params.dim == 3
    p.layer.names.append(7)  # no assignment that could be checked
    with pytest.raises(ParamError, match=r"layer\.names=.*7\]: must be a list of strings"):
        p.layer.Instantiate()


@pytest.mark.parametrize("path", ["layers[2].dim", "layers[x].dim", "layer.dim[0]", "layer[0].dim"])
def test_items_that_are_not_there_are_named(path):
    for use in (lambda p: p.Get(path), lambda p: p.Set(**{path: 1})):
        with pytest.raises(AttributeError, match=r"no parameter .*layer"):
            use(_nested())
