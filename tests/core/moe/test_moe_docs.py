"""The example in docs/moe.md runs."""

import re
from pathlib import Path

import numpy as np

PAGE = Path(__file__).resolve().parents[3] / "docs" / "moe.md"


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["y_BTM"].shape == names["x_BTM"].shape
    np.testing.assert_allclose(sum(names["extras"].metrics.expert_load), 1, rtol=1e-5)
