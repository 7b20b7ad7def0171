"""Copies of recorded checkpoints, with a tokenizer."""

import pytest
from published import copied


@pytest.fixture
def checkpoint(tmp_path):
    """Copies a checkpoint of a name, and gives it a tokenizer."""
    return lambda name: copied(name, tmp_path / name)
