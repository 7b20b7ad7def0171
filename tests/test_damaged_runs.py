"""Random single damages to runs and exported models: an error names the file, and no process crashes.

Checkpoints are damaged on disk and in a bucket (moto's), by themselves: the newest one that is whole is found.

The reader is a separate process, so that a crash is noticed. To damage a run and an export of your own, many times:
`make damage RUN=... EXPORT=... EXAMPLES=1000`.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import object_storage
import pytest
from damage import Damage, damages
from processes import start_python

from lingvo_moe.core.runs.saved_steps import COMMIT, LIST, SavedSteps, saved_steps

pytestmark = pytest.mark.slow

_COUNT = int(os.environ.get("DAMAGES", "100"))
_SEED = int(os.environ.get("DAMAGES_SEED", "0"))
# Nothing of ours reads these: a lock, TensorBoard's files, which have checksums of their own, and texts for COMET. A
# damaged mark makes the run one by somebody else, which is refused where it names code.
_NOT_READ = ("/.trainer.lock", "/experiment.hmac", "/events.out.tfevents", "/comet/")


def _read_run(path: str) -> list[str]:
    """Reads all files of a run, including each checkpoint; returns warnings about missing ones."""
    from lingvo_moe.core.engine.checkpoints.run_weights import Chosen
    from lingvo_moe.tasks.mt.reports.run_report import Missing, gather
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
    from lingvo_moe.tasks.text.runs.weights import load_theta

    run = TextRunDir(path)
    model, _ = run.Task(), run.vocabs
    for step in run.steps:
        load_theta(run, model, Chosen(step))
    report = gather(path, Missing("", ""))
    found = [part.why for part in vars(report).values() if isinstance(part, Missing) and part.why]
    return found + [f"{name}: {value}" for name, value in report.settings if "missing" in value]


def _read_export(path: str) -> list[str]:
    from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator

    SavedTranslator(path)
    return []


def _read_checkpoints(place: str) -> list[str]:
    """Reads each step; returns the errors, and last the step that commands would take."""
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError

    found, whole = [], 0
    with Checkpointer(place, read_only=True) as checkpointer:
        for step in checkpointer.Steps():
            try:
                checkpointer.RestoreToNumpy(step=step)
                whole = step
            except CheckpointError as e:
                found.append(str(e))
    return [*found, f"newest: {whole}"]


_READ = {
    "run": _read_run,
    "export": _read_export,
    "disk": _read_checkpoints,
    "bucket": _read_checkpoints,
}


def _answer_requests() -> None:
    """Reads lines of a kind of _READ and a path, and prints the result of reading each file as JSON."""
    for line in sys.stdin:
        kind, path = line.rstrip("\n").split(" ", 1)
        said = io.StringIO()
        handler = logging.StreamHandler(said)
        logging.getLogger().addHandler(handler)
        with contextlib.redirect_stderr(said):
            try:
                lines = _READ[kind](path)
            except (ValueError, OSError) as e:
                lines = [str(e)]
            except Exception as e:  # a traceback, in a command
                lines = [f"TRACEBACK {type(e).__name__}: {e}"]
        logging.getLogger().removeHandler(handler)
        print(json.dumps([*lines, *said.getvalue().splitlines()]), flush=True)


class Reader:
    """A process that reads runs and exports, started again after a crash."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def Read(self, kind: str, path: Path) -> list[str]:
        """Returns the answer, or the name of the signal that ended the process."""
        if self._process is None:
            self._process = start_python(__file__, stdin=subprocess.PIPE, stderr=None)
        with contextlib.suppress(BrokenPipeError):  # it ended while it started
            self._process.stdin.write(f"{kind} {path}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer:
            return json.loads(answer)
        status, self._process = self._process.wait(), None
        return [f"ENDED by {signal.Signals(-status).name if status < 0 else status}"]

    def Close(self) -> None:
        if self._process:
            self._process.stdin.close()
            self._process.wait()


@pytest.fixture(scope="module")
def run_and_export(tmp_path_factory) -> dict[str, Path]:
    """A small run with two checkpoints, metrics, a program and scores; and an exported model."""
    if os.environ.get("DAMAGED_RUN"):
        return {kind: Path(os.environ[f"DAMAGED_{kind.upper()}"]) for kind in ("run", "export")}
    import toy_translation as toy

    from lingvo_moe.core.engine.loop.summaries import Summaries
    from lingvo_moe.core.nested_map import NestedMap
    from lingvo_moe.tasks.mt.quality import scoring
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

    directory = tmp_path_factory.mktemp("damaged")
    run = TextRunDir(directory / "run")
    vocab = toy.train_vocab(toy.sentences(200))
    for step in (1, 2):
        toy.save_run(run.path, vocab, step, languages=["de"])
    summaries = Summaries(str(run.summaries_dir))
    for step in (1, 2):
        summaries.Write(step, NestedMap(loss=3.0 / step, tokens_per_second=9.0), {})
    summaries.Close()
    about = {"name": "train_step", "mesh": "expert:1", "hash": "0" * 64, "collectives": {}}
    run.WriteProgram(about)
    pairs = [("de", [(line, line) for line in toy.sentences(5)])]
    report = scoring.evaluate(lambda lines, langs: lines, pairs)
    report.info = {"model": {"step": 2}}
    report.Write(run.path / "eval")
    toy.save_export(directory / "export")
    return {"run": run.path, "export": directory / "export"}


def _silent(kind: str, damage: Damage, said: list[str]) -> bool:
    names = {damage.path.name, *([damage.other.name] if damage.other else [])}
    wrong = any(line.startswith(("TRACEBACK", "ENDED")) for line in said)
    return wrong or not any(name in line for line in said for name in names)


@pytest.fixture(scope="module")
def steps(run_and_export, tmp_path_factory) -> Iterator[dict[str, SavedSteps]]:
    """The checkpoints of the run, on disk and in a bucket."""
    disk = tmp_path_factory.mktemp("checkpoints") / "checkpoints"
    shutil.copytree(run_and_export["run"] / "checkpoints", disk)
    with object_storage.bucket(proxied=False):
        found = {"disk": saved_steps(disk), "bucket": saved_steps("s3://bucket/checkpoints")}
        for step in found["disk"].Steps():
            for name in found["disk"].Of(step).List():
                found["bucket"].Part(step).Write(name, found["disk"].Of(step).Read(name))
            listed = found["disk"].Of(step).Read(LIST)
            assert found["bucket"].Complete(step, hashlib.sha256(listed).hexdigest())
        yield found


@pytest.fixture(scope="module")
def reader(steps):
    reader = Reader()
    yield reader
    reader.Close()


@pytest.mark.parametrize("kind", ["run", "export"])
def test_no_damage_is_silent_and_none_ends_the_process(run_and_export, reader, kind):
    path = run_and_export[kind]
    files = [
        p
        for p in sorted(path.rglob("*"))
        if p.is_file() and not any(part in str(p) for part in _NOT_READ)
    ]
    wrong = []
    assert reader.Read(kind, path) == []  # nothing is said of what is whole
    # Files are drawn with equal probability: most of the bytes are in a few of them.
    for damage in damages(files, _COUNT // len(_READ), _SEED):
        damage.Apply()
        try:
            said = reader.Read(kind, path)
        finally:
            damage.Undo()
        if _silent(kind, damage, said):
            wrong.append(f"{damage}: {said}")
    assert reader.Read(kind, path) == []
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("place", ["disk", pytest.param("bucket", marks=pytest.mark.slow)])
def test_the_newest_whole_checkpoint_is_found(steps, reader, place):
    saved = steps[place]
    files: list = [object_storage.Object(saved.store, name) for name in saved.store.List()]
    if place == "disk":
        files = [saved.store.path / name for name in saved.store.List()]
    everything, wrong = saved.Steps(), []
    assert reader.Read(place, saved.store.address) == [f"newest: {everything[-1]}"]
    for damage in damages(files, _COUNT // len(_READ), _SEED):
        hit = [p for p in (damage.path, damage.other) if p]
        hit_steps = {int(p.relative_to(saved.store.address).parts[0]) for p in hit}
        newest = max((s for s in everything if s not in hit_steps), default=0)
        damage.Apply()
        try:
            said = reader.Read(place, saved.store.address)
        finally:
            damage.Undo()
        advised = newest and newest < max(hit_steps) and damage.path.name not in (LIST, COMMIT)
        if (
            _silent(place, damage, said)
            or f"newest: {newest}" not in said
            or (advised and not any(f"to go on from step {newest}," in line for line in said))
        ):
            wrong.append(f"{damage}: {said}")
    assert reader.Read(place, saved.store.address) == [f"newest: {everything[-1]}"]
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    _answer_requests()
