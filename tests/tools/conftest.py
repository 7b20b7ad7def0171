"""A small exported model, for all tests of commands that use one."""

from pathlib import Path

import pytest
import toy_translation as toy

from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
from lingvo_moe.tasks.mt.decoding.translator import Translator


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model; see toy.save_export."""
    return tmp_path_factory.mktemp("saved") / "model"


@pytest.fixture(scope="session")
def translator(saved_model: Path) -> Translator:
    """The translator that was exported."""
    return toy.save_export(saved_model)


@pytest.fixture(scope="session")
def opened(saved_model: Path, translator: Translator) -> SavedTranslator:
    """The exported model, opened again."""
    return SavedTranslator(saved_model)
