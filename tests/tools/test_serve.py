"""python -m tools.serve from start to end; test_odd_lines.py compares its answers with tools.translate."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import toy_translation as toy
from local_server import running

from lingvo_moe.tasks.mt.serving.saved_translator import SavedTranslator
from tools import serve

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("saved") / "model"
    toy.save_export(path)
    return str(path)


@pytest.fixture(scope="module")
def opened(saved_model) -> SavedTranslator:
    return SavedTranslator(saved_model)


@pytest.fixture(scope="module")
def server(opened):
    with running(opened) as it:
        yield it


def test_scores_and_cuts_are_the_model_s(opened, server):
    texts = ["red", "", "red " * 20]
    want = opened.Translate(texts)
    reply = server.Ask("POST", "/translate", {"text": texts}).content
    assert reply["scores"] == [float(s) for s in want.scores[:, 0]]
    assert reply["truncated"] == [False, False, True]


def test_the_command(saved_model, opened):
    """From start to SIGTERM: ready after warm-up, one log line a request, exit status 0."""
    with subprocess.Popen(
        [sys.executable, "-m", "tools.serve", f"--saved_model={saved_model}", "--port=0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    ) as process:
        said = ""
        while "ready after" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        url = re.search(r"serving at (http://127\.0\.0\.1:\d+), warming up", said)[1]
        request = urllib.request.Request(f"{url}/translate", b'{"text": "open file"}')
        with urllib.request.urlopen(request, timeout=30) as reply:
            text = reply.read().decode()
        assert opened.Translate(["open file"]).translations[0][0] in text
        process.send_signal(signal.SIGTERM)
        out, rest = process.communicate(timeout=30)
    assert process.returncode == 0, rest
    assert out == ""
    assert "127.0.0.1 POST /translate 200, 1 lines" in rest
    assert "stopped; 0 requests cut off" in rest
    assert "Traceback" not in said + rest


def test_a_damaged_model_is_not_served(saved_model, capsys):
    file = Path(saved_model) / "fingerprint.pb"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    try:
        assert serve.main([f"--saved_model={saved_model}", "--port=0"]) == 1
    finally:
        file.write_bytes(whole)
    assert "fingerprint.pb was changed or damaged" in capsys.readouterr().err


def test_without_tornado_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tornado", None)  # as if it were not there
    assert serve.main(["--saved_model=x"]) == 1
    assert (
        "serve: tornado is not installed: pip install 'lingvo_moe[serve]'"
        in capsys.readouterr().err
    )
