"""Fixtures of the input's tests: one corpus and one cache for all of them."""

from pathlib import Path

import pytest
from made_up_languages import SIZES, write_corpus


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("input") / "data", SIZES)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
