"""The example in docs/moe.md runs, and the router of docs/writing.md is one."""

import re
from pathlib import Path

import numpy as np
import tensorflow as tf

from lingvo_moe.core.config import registry
from lingvo_moe.core.randomness import make_seed
from tests.core.moe.router_testing import check, route

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "moe.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["y_BTM"].shape == names["x_BTM"].shape
    np.testing.assert_allclose(sum(names["extras"].metrics.expert_load), 1, rtol=1e-5)


def test_the_router_of_your_own_is_chosen_by_its_class(tmp_path, monkeypatch):
    page = (DOCS / "writing.md").read_text()
    (code,) = re.findall(r"```python\n(# my_routers.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "my_routers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (override,) = re.findall(r"'(task.moe.router.cls=\S+);", page)
    params = registry.GetParams("mt.M4Tiny", f"{override};task.num_encoder_layers=2")
    params.task.Instantiate()  # in encoder and decoder
    router = params.task.moe.router.Copy().Set(name="router", model_dim=4, num_experts=3, k=2)
    layer = router.Instantiate()
    x_GSM = np.random.RandomState(0).randn(2, 5, 4)
    paddings_GS = np.eye(2, 5)
    with tf.GradientTape() as tape:
        theta = layer.InitTheta(make_seed(1, 0))
        tape.watch(theta.wg)
        routing = route(layer, x_GSM, paddings_GS, 2, theta=theta)
        gates = tf.reduce_sum(routing.gate)
    check(routing, paddings_GS)
    assert type(layer).__name__ == "SigmoidRouter" and not routing.aux_loss.numpy()
    assert np.abs(tape.gradient(gates, theta.wg)).max() > 0.01
