"""Worker processes end with the process that started them, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_RUN = """
import sys
sys.path.insert(0, {directory!r})
import test_workers_end as here
from lingvo_moe.tasks.text.preparing.workers import run_jobs
run_jobs(here.wait_long, [{place!r} + "/1", {place!r} + "/2"], 2, lambda done, message, seconds: None)
"""


def wait_long(place: str, report: Callable[[int], None]) -> None:
    Path(f"{place}.new").write_text(str(os.getpid()))
    os.rename(f"{place}.new", place)
    time.sleep(300)


def test_a_killed_run_leaves_no_process_behind(tmp_path):
    code = _RUN.format(directory=str(Path(__file__).parent), place=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("[12]"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        process.kill()
    left = {int(path.read_text()) for path in tmp_path.glob("[12]")}
    assert len(left) == 2
    until = time.monotonic() + 30
    while any(map(_runs, left)) and time.monotonic() < until:
        time.sleep(0.05)
    running = [pid for pid in left if _runs(pid)]
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    assert not running


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
