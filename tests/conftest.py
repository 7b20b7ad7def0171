"""Sets up the process for tests, in the environment of `environment.py`."""

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import environment
import hypothesis
import pytest

_TESTS = os.path.dirname(__file__)
_MOST_BYTES = 2 << 30  # held by a test process before it returns freed memory between files
environment.set_up()

# The same examples every time: a red build must mean that the change is wrong. No deadline, since the
# first call of anything compiles, and no database, since Bazel's sandbox is read-only.
hypothesis.settings.register_profile(
    "lingvo_moe", deadline=None, database=None, derandomize=True, max_examples=25
)
hypothesis.settings.load_profile("lingvo_moe")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Imports TensorFlow quickly, except in the process that only gives tests to others."""
    if not session.config.getoption("numprocesses", None):
        from lingvo_moe.core.console.tensorflow_import import import_tensorflow

        import_tensorflow()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that at the end no process waits for one of them."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _user_without_a_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gives the tests a directory of settings of their own: runs are marked with a key that lies there."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module", autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    """Frees compiled programs. Hundreds of them would otherwise fill the memory of the process that runs all tests."""
    yield
    for module in list(sys.modules.values()):
        if (getattr(module, "__file__", None) or "").startswith(_TESTS):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    # What is left is held until the process ends: later collections, one after each file, need not visit it again.
    gc.freeze()
    if _resident_bytes() > _MOST_BYTES:
        # Returns freed memory to the system; small pieces stay with the process otherwise.
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def kept_programs_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in which lowered programs are kept, as in a process that is a command of ours."""
    from lingvo_moe.core.console import command
    from lingvo_moe.core.engine import compiled_cache, kept_programs

    monkeypatch.setattr(command, "_runs", [lambda: 0])
    monkeypatch.setattr(kept_programs, "_MARGIN", -1e6)  # whoever tests may just have edited it
    monkeypatch.setattr(compiled_cache, "_kept", [compiled_cache.CheckedCache(tmp_path)])
    return tmp_path


def _resident_bytes() -> int:
    """The resident memory of this process in bytes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names each skipped test, and what would make it run."""
    skipped = terminalreporter.getreports("skipped")
    if not skipped:
        return
    terminalreporter.section("skipped")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.write_line(f"{report.nodeid}: {str(reason).removeprefix('Skipped: ')}")
