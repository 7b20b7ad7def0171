"""--runner: Apache Beam makes the same files as processes of one machine, whatever the workers, also after a kill."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from apache_beam_installed import needs_beam, runner_flags

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decoding import saved_translator
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.decoding.saved_functions import MANIFEST
from lingvo_moe.tasks.text.preparing import beam, read_stage
from tools import _models, prepare, translate

ROOT = Path(__file__).parents[2]
_PREPARING = "lingvo_moe.tasks.text.preparing"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Four files of two languages, with repeats within and between them, and lines that cannot be used."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abdefgiklmnoprstuvw", k=5)) for _ in range(60)]
    directory = tmp_path / "texts"
    for folder in ("a", "b"):
        (directory / folder).mkdir(parents=True)
        for lang in ("de", "zh-TW"):
            with open(directory / folder / f"{lang}.tsv", "w") as file:
                for _ in range(400):
                    text = " ".join(rng.choices(words, k=rng.randint(1, 4)))
                    file.write(f"{text[::-1]}\t{text}\n" if rng.random() < 0.98 else "bad\n")
    return directory


def _flags(texts: Path, output: Path) -> list[str]:
    sizes = ["--source_vocab_size=330", "--target_vocab_size=330", "--pairs_per_shard=50"]
    inputs = [f"--input={texts / folder}" for folder in "ab"]
    return [*inputs, f"--output={output}", "--any_script", "--dev_share=0.1", *sizes]


def _contents(directory: Path) -> dict[str, bytes]:
    """All files; of prepared.json, and the list that has its digest, all but the time."""
    found = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "prepared.sha256"
    }
    lines = found["prepared.json"].splitlines()
    found["prepared.json"] = b"\n".join(line for line in lines if b'"made"' not in line)
    return found


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of hashes, and several blocks of pairs, in a language of some hundred pairs."""
    monkeypatch.setattr(f"{_PREPARING}.dedup.HASHES_AT_ONCE", 150)
    monkeypatch.setattr(f"{_PREPARING}.prepare._BLOCK", 100)


@needs_beam
def test_the_same_files_whatever_the_workers_also_after_a_kill(texts, tmp_path, monkeypatch):
    assert prepare.main([*_flags(texts, tmp_path / "local"), "--workers=1"]) == 0
    local = _contents(tmp_path / "local")
    about = json.loads(local["prepared.json"])["languages"]
    assert len([name for name in local if name.startswith("records/de-")]) > 4
    assert about["zh-TW"]["dropped"]["duplicate"] and about["de"]["dropped"]["no_tab"]
    assert prepare.main([*_flags(texts, tmp_path / "four"), *runner_flags(4)]) == 0
    assert _contents(tmp_path / "four") == local

    command = [sys.executable, "-m", "tools.prepare", *_flags(texts, tmp_path / "killed")]
    work = tmp_path / ".killed.preparing"
    with subprocess.Popen(
        [*command, *runner_flags(2)], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        until = time.monotonic() + 120
        while not list(work.glob("read-*/0000?")) and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    done = {path.name for path in work.glob("read-*/0000?")}
    assert done and not (tmp_path / "killed").exists()
    read: list[str] = []
    run = read_stage._LineReader.Run

    def noted(self, told: Callable[[int], None]) -> None:
        read.append(Path(self._job.output).name)
        run(self, told)

    monkeypatch.setattr(read_stage._LineReader, "Run", noted)
    assert prepare.main([*_flags(texts, tmp_path / "killed"), *runner_flags(1)]) == 0
    assert not done & set(read) and done | set(read) == {f"0000{i}" for i in range(4)}
    assert _contents(tmp_path / "killed") == local


@needs_beam
def test_errors_of_workers_are_those_of_one_process(texts, tmp_path, capfd):
    (texts / "a" / "de.tsv").write_bytes(b"no tab\n")
    arguments = _flags(texts, tmp_path / "data")
    assert prepare.main([*arguments, *runner_flags(1)]) == 1
    ours = capfd.readouterr().err.splitlines()[-1]
    assert prepare.main([*arguments, "--workers=1"]) == 1
    assert ours == capfd.readouterr().err.splitlines()[-1]
    assert "de.tsv: no line can be used" in ours
    assert prepare.main([*arguments, "--runner=NoSuchRunner"]) == 1
    assert "--runner=NoSuchRunner: " in capfd.readouterr().err


def test_a_runner_needs_beam(monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam.runners.runner", None)
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(DataError, match=r"pip install --no-deps -r requirements-beam\.txt"):
        beam.BeamRunner("FnApiRunner").Check()


class _Capitals:
    """Stands for an exported model. What it says of a line depends on the batch that the line is in."""

    languages = ()
    calls: list[int] = []

    def __init__(self, path: str):
        del path

    def Translate(self, lines: list[bytes], languages: str | None = None) -> NestedMap:
        self.calls.append(len(lines))
        texts = [[f"{len(lines)} {line.decode().upper()}"] for line in lines]
        return NestedMap(
            translations=texts,
            scores=np.zeros((len(lines), 1)),
            truncated=[b"long" in line for line in lines],
        )


@needs_beam
@pytest.mark.parametrize("workers", [1, 4])
def test_a_corpus_is_translated_as_by_one_process(workers, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(saved_translator, "SavedTranslator", _Capitals)
    monkeypatch.setattr(_models, "open_translator", lambda args: (_Capitals(""), {}))
    monkeypatch.setattr(translate, "_BATCHES", 2)
    model = tmp_path / "model" / MANIFEST
    model.parent.mkdir(parents=True)
    model.write_text("files")
    texts = [f"line {i}" for i in range(43)]
    # Byte order marks at the start of the file, and of a block; a line without an answer's newline.
    texts[0], texts[6], texts[20], texts[30] = "\ufeffone", "\ufeffsix", "long", ""
    (tmp_path / "in").write_text("\n".join(texts))
    flags = [f"--saved_model={tmp_path}/model", f"--input={tmp_path}/in", "--batch_size=3"]
    assert translate.main([*flags, f"--output={tmp_path}/local"]) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "too long" in line]

    written, stopped = beam.BeamRunner.Run, []

    def half(self: beam.BeamRunner, function, jobs):  # killed in the middle
        if stopped:
            return written(self, function, jobs)
        stopped.extend(written(self, function, jobs[:4]))
        raise KeyboardInterrupt

    monkeypatch.setattr(beam.BeamRunner, "Run", half)
    command = [*flags, f"--output={tmp_path}/beam", *runner_flags(workers)]
    assert translate.main(command) == 130
    assert len(stopped) == 4 and not (tmp_path / "beam").exists()
    _Capitals.calls.clear()
    assert translate.main(command) == 0
    assert sum(_Capitals.calls) == 43 - 4 * 6  # the other blocks alone
    assert (tmp_path / "beam").read_bytes() == (tmp_path / "local").read_bytes()
    assert said == [line for line in capfd.readouterr().err.splitlines() if "too long" in line]
    assert not list(tmp_path.glob(".*"))
