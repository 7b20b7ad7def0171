"""`make test` must not report a part that failed as a pass, and shows what each part says."""

import subprocess
import sys

import pytest

from tools.import_graph import ROOT

_CODE = """
import sys
from tests import run_parts

run_parts._import_once = lambda: None
sys.exit(run_parts.main(2, sys.argv[2:], sys.argv[1].split()))
"""


@pytest.mark.parametrize(("more", "status"), [("", 1), ("-k good", 0)])
def test_exit_status(more, status, tmp_path):
    """A part passes if the user's words select none of its tests."""
    for name, expression in (("good", "True"), ("bad", "False")):
        text = f"def test_{name}():\n    print('of {name}')\n    assert {expression}\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    env = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", _CODE, more, "test_good.py", "test_b*.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert "== test_good.py\n" in done.stdout and "== test_b*.py\n" in done.stdout
    assert ("of bad" in done.stdout) == ("failed: test_b*.py" in done.stdout) == bool(status)
