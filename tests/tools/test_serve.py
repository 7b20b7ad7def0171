"""python -m tools.serve; test_guide.py starts the command, and test_odd_lines.py compares its answers."""

import asyncio
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from lingvo_moe.tasks.text.serving.limits import Limits
from lingvo_moe.tasks.text.serving.server import stop_on_signals
from lingvo_moe.tasks.text.serving.service import Service
from tools import serve


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it(number):
    async def stopped() -> bool:
        stop = asyncio.Event()
        stop_on_signals(stop)
        os.kill(os.getpid(), number)
        return await asyncio.wait_for(stop.wait(), 9)

    assert asyncio.run(stopped())


def test_a_damaged_model_is_not_served(saved_model, opened, capsys):
    file = saved_model / "fingerprint.pb"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    try:
        assert serve.main([f"--saved_model={saved_model}", "--port=0"]) == 1
    finally:
        file.write_bytes(whole)
    assert "fingerprint.pb was changed or damaged" in capsys.readouterr().err


def test_health_names_the_languages_of_the_data():
    about = {"model": "mt.M4Demo", "step": 3, "trained_languages": ["de", "fi"], "weights": "int8"}
    translator = SimpleNamespace(
        NAME="translate",
        joins=False,
        Translate=None,
        languages=(),
        by_direction=False,
        options=SimpleNamespace(rows=1),
    )
    service = Service(translator, serve.shown(about), Limits())
    assert service.about == {"model": "mt.M4Demo", "step": 3, "languages": ["de", "fi"]}


def test_without_tornado_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tornado", None)  # as if it were not there
    assert serve.main(["--saved_model=x"]) == 1
    told = "serve: tornado is not installed: pip install 'lingvo_moe[serve]'"
    assert told in capsys.readouterr().err
