"""Bazel's test main must not report 'nothing ran' or 'something failed' as a pass."""

import os
import subprocess
import sys

import pytest

from tools.import_graph import ROOT

_SLOW = "import pytest\n@pytest.mark.slow\ndef test_it():\n    assert False\n"


@pytest.mark.parametrize("text, status", [
    ("def test_it():\n    pass\n", 0),
    ("def test_it():\n    assert False\n", 1),
    (_SLOW, 0),
    ("import nowhere_at_all\n", 2),
    ("x = 1\n", 5),
])  # fmt: skip
def test_exit_status(tmp_path, text, status):
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (tmp_path / "test_it.py").write_text(text)
    report = tmp_path / "report.xml"
    env = os.environ | {"TEST_TMPDIR": str(tmp_path), "XML_OUTPUT_FILE": str(report)}
    command = [sys.executable, str(ROOT / "tests/run_pytest.py"), "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert report.exists()
