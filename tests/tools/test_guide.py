"""docs/guide.md and docs/fine_tuning.md as a newcomer follows them: every command, in order, in one directory.

Three things differ from the pages: the experiment is a smaller one, as the page itself suggests for a first try; the
longer run has few steps; the server takes a free port.
"""

import contextlib
import gzip
import importlib
import json
import re
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import trainer_testing
from processes import start_python

from lingvo_moe import trainer
from lingvo_moe.core.engine import engines
from lingvo_moe.tasks.text.data.dev_set import DevSet

_ROOT = Path(__file__).resolve().parents[2]
_INSTEAD = {"mt.M4Demo": "toy_translation.Smallest", "--max_steps=5000": "--max_steps=22"}
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _commands(name: str, instead: Mapping[str, str]) -> list[str]:
    """The lines of a page's shell blocks, but for the package's, which `make wheel` tries."""
    text = (_ROOT / "docs" / name).read_text("utf-8").partition("\n## As a package\n")[0]
    lines = "".join(_BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    for page, here in instead.items():
        assert page in " ".join(lines)
        lines = [line.replace(page, here) for line in lines]
    return lines


@contextlib.contextmanager
def _serving(argv: list[str]) -> Iterator[str]:
    """Starts the server of these flags and yields its address; Ctrl-C must end it with status 0."""
    with start_python("-m", "tools.serve", *argv, "--port=0", stdout=None) as process:
        said = ""
        while "ready after" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        try:
            yield re.search(r"http://([\d.]+:\d+), warming up", said)[1]
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=60)[1]
    assert process.returncode == 0, rest
    assert "127.0.0.1 POST /translate 200, 2 lines" in rest
    assert "stopped; 0 requests cut off" in rest and "Traceback" not in said + rest


def _ask(words: list[str]) -> dict:
    """Does what `curl URL --json DATA` does."""
    _, url, flag, data = words
    assert flag == "--json"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.mark.slow
def test_the_commands_of_the_guide(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(engines, "make_engine", engines.make_engine)  # put back in the end
    # As on a machine that shows its CPU as one device.
    monkeypatch.setattr(trainer, "fastest_engine", lambda args: "tf_graph")
    trainer_testing.keep_compiled()
    sizes = {"TEXTS/de": 600, "TEXTS/sw": 400, "more/cy": 300, "medical": 5}
    trainer_testing.write_corpus(tmp_path, sizes, words_of_a_pair=(3, 7))  # a newcomer's files
    said: dict[str, str] = {}
    with contextlib.ExitStack() as server:
        url = ""
        for command in _commands("guide.md", _INSTEAD):
            words = shlex.split(command, comments=True)
            if words[:2] != ["python", "-m"]:
                if words[0] == "curl":
                    answer = _ask([word.replace("127.0.0.1:8080", url) for word in words])
                    server.close()
                else:
                    subprocess.run(words, check=True)
                continue
            module, argv = words[2], words[3:]
            if module == "tools.serve":
                url = server.enter_context(_serving(argv))
                continue
            assert importlib.import_module(module).main(argv) == 0, (command, capfd.readouterr())
            out, err = capfd.readouterr()
            said.setdefault(module, out + err)
    assert len(answer["translations"]) == 2
    told = "next: python -m lingvo_moe.trainer --model=toy_translation.Smallest"
    assert told in said["tools.prepare"]
    assert "step 20/20  loss" in said["lingvo_moe.trainer"]
    assert re.search(r"\nall +2 ", said["tools.evaluate"])
    assert Path("RUN/report.html").stat().st_size > 10_000
    assert Path("RUN/checkpoints/22").is_dir()
    # Another language does not change the held-out pairs of the others.
    before, after = dict(DevSet("DATA").items()), dict(DevSet("DATA2").items())
    assert {**after, **before} == after and after.keys() - before.keys() == {"cy"}
    begun = json.loads(Path("RUN2/experiment.json").read_text())
    assert begun["input"]["languages"] == sorted(after)
    assert begun["began_from"]["step"] == 22
    assert len(Path("MEDICAL/scores/texts/de.hyp").read_text().splitlines()) == 5
    assert len(Path("MEDICAL/likely.tsv").read_text().splitlines()) == 5
    # Resuming with other data, as on the page.
    train = ["--model=toy_translation.Smallest", "--data_dir=DATA2", "--logdir=RUN"]
    assert importlib.import_module("lingvo_moe.trainer").main([*train, "--max_steps=30"]) == 2
    assert "the saved position of the input is of other data" in capfd.readouterr().err


def test_the_commands_of_the_page_on_fine_tuning(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(engines, "make_engine", engines.make_engine)
    monkeypatch.setattr(trainer, "fastest_engine", lambda args: "tf_graph")
    trainer_testing.keep_compiled()
    sizes = {"DATA/de": 500, "mine": 60, "test": 5}
    trainer_testing.write_corpus(tmp_path, sizes, words_of_a_pair=(3, 7))
    for name in ("DATA/de.tsv", "DATA/dev/de.tsv"):
        Path(name).parent.mkdir(exist_ok=True)
        source = Path(name) if Path(name).exists() else Path("test.tsv")
        Path(f"{name}.gz").write_bytes(gzip.compress(source.read_bytes()))
    Path("DATA/de.tsv").unlink()
    model = "toy_translation.Smallest"
    first = [f"--model={model}", "--data_dir=DATA", "--logdir=RUN", "--max_steps=2"]
    assert trainer.main(first) == 0
    smaller = {
        "mt.M4Demo": model,
        "--max_steps=500": "--max_steps=2",
        "--max_steps=1000": "--max_steps=3",
        "learning_rate.value=0.01": "learning_rate.multiplier=0.5",
    }
    for command in _commands("fine_tuning.md", smaller):
        words = shlex.split(command)
        if words[0] != "python":
            subprocess.run(words, check=True)
            continue
        module = importlib.import_module(words[2])
        assert module.main(words[3:]) == 0, (command, capfd.readouterr())
    said = capfd.readouterr().err
    assert Path("MIXED/checkpoints/3").is_dir() and "all of 500 source pieces" not in said
    assert json.loads(Path("AFTER/report.json").read_text())["languages"].keys() == {
        "de",
        "de_mine",
    }
    taken = "--model_params_override='input.weights={'\"'\"'de"
    assert said.count(f"{taken}") == 2 and "held-out loss" in said
