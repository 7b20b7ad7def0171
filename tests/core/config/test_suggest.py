"""Words of errors: choices in a sentence."""

import pytest

from lingvo_moe.core.config.checks import either


@pytest.mark.parametrize(
    "choices, text", [([1], "1"), ((1, 2), "1 or 2"), ((1, 2, 4), "1, 2 or 4")]
)
def test_choices_in_a_sentence(choices, text):
    assert either(choices) == text
