"""The two Python rules that BUILD files here use."""

load("@rules_python//python:defs.bzl", "py_library", "py_test")

python_library = py_library

def pytest_test(name, srcs, deps = [], data = [], size = "large", **kwargs):
    """One process that imports all of `srcs` and runs the first tests of each by pytest, see tests/run_pytest.py.

    Starting TensorFlow takes seconds, so a directory of tests is one target, not one per file.

    Args:
      name: the target's name.
      srcs: the test_*.py files.
      deps: libraries that they import.
      data: files that they read.
      size: as for every Bazel test.
      **kwargs: passed on.
    """
    py_test(
        name = name,
        srcs = srcs + ["//tests:run_pytest.py"],
        main = "//tests:run_pytest.py",
        args = ["$(rootpath {})".format(src) for src in srcs],
        data = data + ["//:pyproject.toml"],
        deps = deps + ["//tests:helpers"],
        legacy_create_init = False,
        size = size,
        **kwargs
    )
