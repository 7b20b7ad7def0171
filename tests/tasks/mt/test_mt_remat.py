"""task.remat in the translation model: its choices; tests/spmd/test_dispatch_in_loops.py has what it saves."""

import pytest
from refusals import refuses
from toy_translation import SMALL

from lingvo_moe.core.config import registry


@refuses(
    ValueError,
    ("task.remat=dost", "task.remat=dost: must be full, dots or a list of names (did you mean 'dots'?)"),
    (
        "task.remat=['query', 'hiden']",
        "task.remat=['query', 'hiden']: no layer of this model has 'hiden' (did you mean 'hidden'?); the model's "
        "names are query, key, value, attention, hidden, feed_forward, router, dispatched, returned, "
        "experts_hidden, combined",
    ),
    ("task.remat=none", "task.repeat=False keeps every activation"),
    ("task.remat=dots;task.repeat=False", "; set task.repeat=True, or task.remat=full"),
    plain=True,
)  # fmt: skip
def test_what_is_no_choice_is_refused(override):
    registry.GetParams("mt.M4Tiny", override).task.Instantiate()


def test_names_that_no_layer_of_the_model_has_are_refused():
    """mt.M4Tiny without experts has none of the names of theirs."""
    params = registry.GetParams("mt.M4Tiny", f"{SMALL};task.remat=['hidden', 'returned']")
    with pytest.raises(ValueError) as e:
        params.task.Instantiate()
    assert str(e.value) == (
        "task.remat=['hidden', 'returned']: no layer of this model has 'returned'; the model's names are query, key, "
        "value, attention, hidden, feed_forward"
    )


def test_a_list_is_read_from_text():
    for text in ("['hidden', 'dispatched']", '["hidden","dispatched"]', "[hidden, dispatched]"):
        params = registry.GetParams("mt.M4Tiny", f"task.remat={text}")
        assert params.task.remat == ["hidden", "dispatched"]
        assert params.task.Instantiate().encoder.blocks.p.remat == ["hidden", "dispatched"]
    assert registry.GetParams("mt.M4Tiny", 'task.remat="dots"').task.remat == "dots"
