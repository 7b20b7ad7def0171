"""Each range accepts its values, refuses others, and states the range in the error."""

import math

import numpy as np
import pytest

from lingvo_moe.core.config import checks

TEXTS = checks.ListOf(checks.TEXT, "a list of strings")


@pytest.mark.parametrize(("check", "allowed", "refused", "message"), [
    (checks.SIZE, (1, 2**31 - 1, np.int64(3)), 0, "must be an integer of at least 1"),
    (checks.SIZE, (), 2**31, "must be an integer of at least 1 and at most 2147483647"),
    (checks.SIZE, (), True, "must be an integer of at least 1"),
    (checks.SIZE, (), 1.0, "must be an integer of at least 1"),
    (checks.COUNT, (0, 5), -1, "must be an integer of at least 0"),
    (checks.Integer(), (-5, 0), None, "must be an integer"),
    (checks.Integer(1, 9), (1, 9), 10, "must be an integer from 1 to 9"),
    (checks.SHARE, (0, 0.0, 0.99), 1, "must be a number in [0, 1)"),
    (checks.Number(0, 1, open_low=True), (1, 0.5), 0.0, "must be a number in (0, 1]"),
    (checks.POSITIVE, (1e-30, 3), 0, "must be a positive number"),
    (checks.Number(2, open_low=True), (2.5,), 2, "must be a number above 2"),
    (checks.Number(high=2), (-5, 2), 3, "must be a number of at most 2"),
    (checks.NOT_NEGATIVE, (0, 3e38), -1, "must be a number of at least 0"),
    (checks.NOT_NEGATIVE, (), math.inf, "must be a number of at least 0, finite in float32"),
    (checks.NOT_NEGATIVE, (), math.nan, "must be a number of at least 0, finite in float32"),
    (checks.Number(), (-1e38, 0), 1e39, "must be a number, finite in float32"),
    (checks.Number(), (), 10**400, "must be a number, finite in float32"),
    (checks.POSITIVE, (), 1e-40, "must be a positive number, not so small that float32 makes it 0"),
    (checks.Number(), (), True, "must be a number"),
    (checks.Number(), (), "1", "must be a number"),
    (checks.one_of("ab"), ("a",), "c", "must be one of a, b"),
    (checks.one_of(("yes", "no")), (), "yess", "must be one of yes, no (did you mean 'yes'?)"),
    (checks.or_none(checks.SIZE), (1, None), 0, "must be an integer of at least 1, or None"),
    (checks.SizeOr(("auto",)), ("auto", 3), 0, "must be auto or an integer of at least 1"),
    (checks.FLAG, (True, False), 1, "must be True or False"),
    (checks.TEXT, ("", "x"), b"x", "must be a string"),
    (TEXTS, ([], ["a"], ("a",)), [1, 2], "must be a list of strings"),
    (TEXTS, (), "de, sw", "must be a list of strings, e.g. ['de', 'sw']"),
])  # fmt: skip
def test_ranges(check, allowed, refused, message):
    for value in allowed:
        assert check(value) == ""
    assert check(refused) == message
    assert message.startswith(f"must be {check}")


@pytest.mark.parametrize(("value", "hint"), [
    ({"Q": "expert"}, "unknown letter 'Q' (known: E, H)"),
    ({"wi.Q": "expert"}, "unknown letter 'wi.Q' (known: E, H)"),
    ({3: "expert"}, "unknown letter 3 (known: E, H)"),
    ({"E": 3}, "3, for 'E', is no axis, tuple of different axes or None"),
    ({"E": ("data", "data")}, "('data', 'data'), for 'E', is no axis"),
])  # fmt: skip
def test_maps_from_letters_to_axes(value, hint):
    check = checks.Letters({"E": "experts", "H": "hidden units"})
    for fine in ({}, {"E": None, "wi.H": "model"}, {"E": ("data", "expert")}):
        assert check(fine) == ""
    assert check([]) == "must be a map from letters to mesh axes, e.g. {'E': 'expert'}"
    assert hint in check(value)


@pytest.mark.parametrize(("text", "value"), [
    ("none", "none"),
    ("'none'", "none"),
    ("['slots', '*.w']", ["slots", "*.w"]),
    ("(slots, master)", ["slots", "master"]),
    ("('slots')", ["slots"]),
    ("(1)", [1]),
    ("[{[]}]", ["{[]}"]),
])  # fmt: skip
def test_texts_of_names(text, value):
    assert checks.OFFLOAD.Read(text) == value


@pytest.mark.parametrize("default", [True, 3, 0.5, "x", {}, [], (), int], ids=repr)
def test_the_type_of_a_default_is_a_range(default):
    check = checks.of_type(default)
    assert check(default) == "" and check(object()).startswith("must be ")


def test_errors_name_path_value_and_range():
    error = checks.ParamError("k", "0", "must be more").Within("router").Within("moe")
    assert str(error) == "moe.router.k=0: must be more"
    assert str(error.At("task.k", "zero", "line 3: ")) == "line 3: task.k=zero: must be more"
    assert len(str(checks.ParamError("k", "9" * 5000, "no"))) < 100
