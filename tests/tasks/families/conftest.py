"""Copies of recorded checkpoints, with a tokenizer."""

import json
import shutil
from pathlib import Path

import pytest

TESTDATA = Path(__file__).parent / "testdata"
TOKENS = [f"<{i}>" for i in range(37)]


@pytest.fixture
def checkpoint(tmp_path):
    """Copies a checkpoint of a name, and gives it a tokenizer."""

    def copy(name):
        directory = tmp_path / name
        shutil.copytree(TESTDATA / name, directory)
        (directory / "expected.npz").unlink()
        model = {
            "type": "WordLevel",
            "vocab": {t: i for i, t in enumerate(TOKENS)},
            "unk_token": TOKENS[0],
        }
        (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
        marks = {"bos_token": TOKENS[1], "eos_token": TOKENS[2]}
        (directory / "tokenizer_config.json").write_text(json.dumps(marks))
        return directory

    return copy
