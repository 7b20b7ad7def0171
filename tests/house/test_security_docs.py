"""docs/security.md is true: its commands work, and the tools that it names have the flag."""

import importlib
import re
import subprocess

import numpy as np
import pytest
import toy_translation as toy

from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.run_description import RunDirError
from lingvo_moe.core.runs.run_dir import MANIFEST
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.training import flags as trainer_flags
from tools.import_graph import ROOT

_PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_a_run_without_a_list_gets_one_by_the_command_of_the_page(tmp_path):
    vocab = toy.train_vocab(toy.sentences(200))
    run = TextRunDir(tmp_path / "RUN")
    run.Write("mt.M4Tiny", "", text_artifacts({"source": vocab, "target": vocab}))
    was = (run.path / MANIFEST).read_bytes()
    (run.path / MANIFEST).unlink()
    with pytest.raises(RunDirError, match=r"docs/security\.md"):
        _ = run.vocabs
    command = _command(MANIFEST)
    subprocess.run(["bash", "-e", "-c", command], cwd=tmp_path, check=True)
    assert (run.path / MANIFEST).read_bytes() == was
    assert run.vocabs.source == vocab


def test_every_tool_with_the_flag_is_on_the_page_and_no_other():
    (sentence,) = re.findall(r"that opens a run \((.*?)\)", _PAGE, re.DOTALL)
    named = set(re.findall(r"tools\.(\w+)", sentence))
    having = set()
    for path in (ROOT / "tools").glob("*.py"):
        if "def define_flags()" in path.read_text("utf-8"):
            flags = importlib.import_module(f"tools.{path.stem}").define_flags()
            if "trust_run" in flags.Names():
                having.add(path.stem)
    assert named == having
    assert "trust_run" in trainer_flags.define_flags().Names()


def test_every_tool_that_opens_a_run_has_the_flag():
    """All tools that take a run as --logdir."""
    for path in (ROOT / "tools").glob("*.py"):
        text = path.read_text("utf-8")
        if re.search(r"define_(logdir|model)_flags?\(", text) and not path.stem.startswith("_"):
            assert f"tools.{path.stem}`" in _PAGE, path.stem


def test_a_checkpoint_without_a_list_gets_one_by_the_command_of_the_page(tmp_path):
    directory = tmp_path / "RUN" / "checkpoints"
    state = NestedMap(w=np.arange(5.0), step=np.int32(3))
    with Checkpointer(str(directory)) as checkpointer:
        checkpointer.Save(3, state)
    (directory / "3" / "files.xxh128").unlink()
    with Checkpointer(str(directory), read_only=True) as checkpointer:
        message = r"files\.xxh128, .* is missing.*docs/security\.md"
        with pytest.raises(CheckpointError, match=message):
            checkpointer.RestoreToNumpy()
    command = _command("files.xxh128").replace("STEP", "3")
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True)
    with Checkpointer(str(directory), read_only=True) as checkpointer:
        np.testing.assert_array_equal(checkpointer.RestoreToNumpy()[0].w, state.w)


def _command(written: str) -> str:
    """The one command of the page that writes this list."""
    (command,) = (c for c in re.findall(r"```bash\n(.*?)```", _PAGE, re.DOTALL) if written in c)
    return command
