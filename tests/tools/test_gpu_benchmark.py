"""The MoE layer from program files, as a GPU machine would run it. No GPU was at hand: it runs on a CPU here."""

import json
import os
import subprocess
import sys

import numpy as np

from benchmarks import moe_layer_worker
from benchmarks.gpu import layer, programs

SIZE = {"groups": 2, "group_size": 8, "model_dim": 8, "hidden_dim": 16}
# No TensorFlow: importing it fails.
_WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = None
from benchmarks.gpu import layer
sys.exit(layer.main(sys.argv[1:]))
"""


def test_programs_from_files_run_without_tensorflow(tmp_path):
    sizes = [f"--{name}={value}" for name, value in SIZE.items()]
    flags = ["--experts=4", "--kinds=index,dense", "--formats=bfloat16", *sizes]
    assert programs.main([f"--output={tmp_path}", *flags]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dense-E4-bfloat16.program",
        "index-E4-bfloat16.program",
        "manifest.json",
    ]
    flags = ["--rounds=2", "--steps=2", "--ceiling=32", f"--output={tmp_path / 'out.json'}"]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TENSORFLOW, f"--programs={tmp_path}", *flags],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert "Not run on a GPU." in done.stdout
    points = json.loads((tmp_path / "out.json").read_text())["points"]
    assert [p["kind"] for p in points] == ["matmul", "index", "dense"]
    assert all(p["seconds"] > 0 and len(p["rounds"]) == 2 for p in points)
    # Two experts a token cost as much as the dense layer, which is twice as wide.
    assert points[1]["flops"] == points[2]["flops"] == 3 * 2 * 2 * 2 * 16 * 8 * 16
    step = layer._program_step(
        tmp_path / "dense-E4-bfloat16.program", "dense", SIZE | {"num_experts": 4}
    )
    theta, data = moe_layer_worker.arguments("dense", SIZE | {"num_experts": 4})
    expected = np.maximum(data.x @ theta.wi, 0) @ theta.wo
    closest = min(
        np.abs(np.asarray(leaf, np.float32) - expected).max()
        for leaf in step()
        if leaf.shape == expected.shape
    )
    assert closest < 0.05 * np.abs(expected).max()
