"""What would make a program fit that does not: estimates by hand-made sizes, and the sentences about them."""

from dataclasses import replace

import pytest

from lingvo_moe.core.planner.memory.remedies import Choice, remedies, saved

_GIB = 2**30
NOW = Choice(
    {},
    weights=4 * _GIB,
    slots=8 * _GIB,
    gradients=4 * _GIB,
    written=0,
    gathered=0,
    weight_size=4,
    narrow=False,
)
KINDS = {"weights": 4, "slots": 8, "gradients": 3, "weight_copies": 1, "activations": 6}
MEMORY = {
    "kinds": {kind: n * _GIB for kind, n in (KINDS | {"temporaries": 2}).items()},
    "float32": {"activations": 4 * _GIB, "temporaries": _GIB},
    "misses_by": 5 * _GIB,
}


def _choice(name="a", value="1", **changes):
    return replace(NOW, changes={name: value}, **changes)


@pytest.mark.parametrize(
    "changes, gib",
    [
        ({}, 0),
        ({"slots": _GIB}, 7),
        # Of 4 GiB of gradients 3 are live at the peak; copies of weights are a quarter of these.
        ({"weights": 2 * _GIB, "gradients": _GIB}, 2 + 3 * 3 / 4 + 0.5),
        # The new weights take the place of the gradients.
        ({"slots": _GIB, "gradients": 0, "written": 4 * _GIB}, 7),
        ({"weights": 2 * _GIB, "gathered": _GIB}, 2 + 0.5 - 1),
        # Half of what is float32, less a copy of the weights of 2 GiB instead of 1.
        ({"narrow": True}, 2.5 - 1),
        ({"narrow": True, "weights": 2 * _GIB, "weight_size": 2}, 2.5 + 2 + 0.5),
        ({"carries": _GIB}, 5),
        ({"carries": _GIB, "narrow": True}, 5 + 0.5 - 1),
    ],
)
def test_bytes_that_a_choice_saves(changes, gib):
    assert saved(MEMORY, NOW, _choice(**changes)) == gib * _GIB


def test_without_a_schedule_gradients_are_among_the_temporaries():
    kinds = {"weights": 4 * _GIB, "slots": 8 * _GIB, "temporaries": 9 * _GIB}
    other = _choice(gradients=_GIB)
    assert saved({"kinds": kinds}, NOW, other) == 3 * _GIB


def test_one_change_is_enough():
    others = [_choice("a", "1", slots=7 * _GIB), _choice("a", "2", slots=3 * _GIB)]
    assert remedies(MEMORY, NOW, others) == [
        "By estimate a device would need less: 5.00 GiB with a=2, 1.00 GiB with a=1.",
        "a=2 would make it fit. That is enough for 5.00 GiB.",
    ]


def test_the_smallest_combination_is_enough():
    both, more = {"a": "1", "b": "1"}, {"a": "1", "b": "1", "c": "1"}
    others = [
        replace(NOW, changes=more, slots=0),
        replace(NOW, changes=both, slots=2 * _GIB),
        _choice("a", slots=4 * _GIB),
        _choice("b"),
    ]
    found = remedies(MEMORY, NOW, others)
    assert found == [
        "By estimate a device would need less: 4.00 GiB with a=1.",
        "None of them alone makes it fit. By estimate a=1 and b=1 together do: 6.00 GiB less, and 5.00 GiB are "
        "missing.",
    ]


def test_nothing_is_enough():
    others = [_choice("b", slots=9 * _GIB), _choice("a", slots=6 * _GIB)]
    assert remedies(MEMORY, NOW, others)[1] == (
        "None of a, b makes it fit, nor do they together: by estimate 2.00 GiB less at most, and 5.00 GiB are missing."
    )
    assert remedies(MEMORY, NOW, []) == []
