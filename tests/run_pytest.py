"""The main of every Bazel test: pytest over the files in argv, in a sandbox that is mostly read-only.

Tests marked slow are left out here; `make test` runs them.
"""

import os
import sys

import pytest


class _Deselected:
    """Counts the tests that `-m` left out, to tell 'all were slow' from 'none were found'."""

    count = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.count += len(items)


def _prepare_environment() -> None:
    """Bazel gives one writable directory; point everything that writes at it."""
    scratch = os.environ.get("TEST_TMPDIR")
    if scratch is None:
        return
    os.environ["TMPDIR"] = scratch
    os.environ["HOME"] = scratch
    os.environ["MPLCONFIGDIR"] = os.path.join(scratch, "matplotlib")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def main(files: list[str]) -> int:
    """Returns pytest's exit status, with 0 where every test of the files is a slow one."""
    _prepare_environment()
    args = ["-m", "not slow", "-p", "no:cacheprovider", "--durations=5", *files]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        args.append(f"--junitxml={report}")
    if chosen := os.environ.get("TESTBRIDGE_TEST_ONLY"):  # bazel test --test_filter=...
        args += ["-k", chosen]
    deselected = _Deselected()
    status = pytest.main(args, plugins=[deselected])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and deselected.count:
        return 0
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
