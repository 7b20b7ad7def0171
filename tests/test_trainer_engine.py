"""The engine that the trainer chooses without --engine."""

from types import SimpleNamespace

import jax
import pytest

from lingvo_moe import trainer
from lingvo_moe.trainer_flags import parse_flags


@pytest.mark.parametrize(
    ("flags", "devices", "platform", "engine"),
    [
        ([], 1, "cpu", "tf_graph"),
        ([], 8, "cpu", "pjrt"),
        ([], 1, "gpu", "pjrt"),
        (["--num_devices=1"], 8, "cpu", "tf_graph"),
        (["--num_devices=1"], 1, "gpu", "tf_graph"),
        (["--num_devices=2"], 1, "cpu", "pjrt"),
        (["--mesh=expert:1"], 1, "cpu", "pjrt"),
        (["--num_processes=2"], 1, "cpu", "pjrt"),
    ],
)
def test_the_fastest_engine(flags, devices, platform, engine, monkeypatch):
    one = SimpleNamespace(platform=platform)
    monkeypatch.setattr(jax, "devices", lambda: [one] * devices)
    assert trainer.fastest_engine(parse_flags(["--model=mt.M4Tiny", *flags])) == engine
