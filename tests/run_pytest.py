"""The main of every Bazel test: pytest over the files in argv, in a mostly read-only sandbox.

Bazel shows that each BUILD file lists all that its tests need. So a target imports all of its test files, and runs the
first test of each that is not marked slow; `make test` runs every test.
"""

import os
import sys
from pathlib import Path

import pytest


class _FirstTests:
    """Selects the first test of each file.

    Counts the others, to distinguish 'all were slow' from 'none were found'.
    """

    def __init__(self) -> None:
        self.deselected = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        first: dict[Path, pytest.Item] = {}
        for item in items:
            first.setdefault(item.path, item)
        chosen = set(first.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = first.values()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected += len(items)


def _prepare_environment() -> None:
    """Points everything that writes at the one writable directory that Bazel provides."""
    scratch = os.environ.get("TEST_TMPDIR")
    if scratch is None:
        return
    os.environ["TMPDIR"] = scratch
    os.environ["HOME"] = scratch
    os.environ["MPLCONFIGDIR"] = os.path.join(scratch, "matplotlib")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def main(files: list[str]) -> int:
    """Returns pytest's exit status; 0 if all tests of the files are slow ones."""
    _prepare_environment()
    args = ["-m", "not slow", "-p", "no:cacheprovider", "--durations=5", *files]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        args.append(f"--junitxml={report}")
    if chosen := os.environ.get("TESTBRIDGE_TEST_ONLY"):  # bazel test --test_filter=...
        return int(pytest.main([*args, "-k", chosen]))
    first_tests = _FirstTests()
    status = pytest.main(args, plugins=[first_tests])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and first_tests.deselected:
        return 0
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
