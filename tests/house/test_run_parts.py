"""`make test` must not report a part that failed as a pass, and shows what each part says."""

import subprocess
import sys

import pytest

from tools.import_graph import ROOT

_CODE = """
import sys
from tests import run_parts

run_parts._import_once = lambda: None
run_parts._MOST_GIGABYTES = float(sys.argv[1])
sys.exit(run_parts.main(2, sys.argv[3:], sys.argv[2].split()))
"""


@pytest.mark.parametrize(
    ("more", "most", "status"), [("", "4", 1), ("-k good", "4", 0), ("-k good", "0.001", 1)]
)
def test_exit_status(more, most, status, tmp_path):
    """A part passes if the user's words select none of its tests; it fails if a process holds too much."""
    for name, expression in (("good", "True"), ("bad", "False")):
        text = f"def test_{name}():\n    print('of {name}')\n    assert {expression}\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    env = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", _CODE, most, more, "test_good.py", "test_b*.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert "== test_good.py\n" in done.stdout and "== test_b*.py\n" in done.stdout
    assert ("of bad" in done.stdout) == (not more)
    assert ("failed: test_b*.py" in done.stdout) == bool(status)
    assert ("may hold" in done.stdout) == (most != "4")
