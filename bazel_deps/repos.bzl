"""The external repositories of this workspace, all written locally: a build needs no network.

Bazel 4 has the C++, Java, protobuf and Python rules inside, but its own tool packages still load them
from repositories that it would download. `offline_repositories` puts thin stand-ins there that hand
each call on to the built-in rule.
"""

_MIGRATED = "__{}_RULES_MIGRATION_DO_NOT_USE_WILL_BREAK__"

_FORWARD = """
def {name}(tags = None, **kwargs):
    native.{name}(tags = (tags or []) + ["{mark}"], **kwargs)
"""

def _builtin_rules_impl(ctx):
    mark = _MIGRATED.format(ctx.attr.family)
    package = ctx.attr.bzl.rpartition("/")[0]
    ctx.file("WORKSPACE", "workspace(name = \"{}\")\n".format(ctx.name))
    ctx.file(package + "/BUILD", ctx.attr.build)
    ctx.file(ctx.attr.bzl, "".join([
        _FORWARD.format(name = name, mark = mark)
        for name in ctx.attr.rules
    ]))
    for path, text in ctx.attr.more.items():
        ctx.file(path, text)

_builtin_rules = repository_rule(
    doc = "A repository whose .bzl file forwards to rules that are built into this Bazel.",
    implementation = _builtin_rules_impl,
    attrs = {
        "build": attr.string(doc = "The BUILD file beside the .bzl file."),
        "bzl": attr.string(mandatory = True, doc = "Path of the .bzl file to write."),
        "family": attr.string(mandatory = True, doc = "The name in the tag that the built-in rules ask for."),
        "more": attr.string_dict(doc = "Further files, path to content."),
        "rules": attr.string_list(mandatory = True),
    },
)

_STUB_SCRIPT = """#!/bin/sh
echo "coverage reports are not set up in this workspace" >&2
exit 1
"""

_STUB_BUILD = """package(default_visibility = ["//visibility:public"])

[
    sh_binary(
        name = name,
        srcs = ["stub.sh"],
    )
    for name in ["coverage_report_generator", "lcov_merger"]
]
"""

def _coverage_stub_impl(ctx):
    ctx.file("WORKSPACE", "workspace(name = \"{}\")\n".format(ctx.name))
    ctx.file("stub.sh", _STUB_SCRIPT, executable = True)
    ctx.file("BUILD", _STUB_BUILD)

_coverage_stub = repository_rule(
    doc = "Every test rule refers to the coverage tools, even when no coverage is asked for.",
    implementation = _coverage_stub_impl,
)

_TOOLCHAIN_BUILD = """load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")

py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtimes",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtimes",
    toolchain_type = "@rules_python//python:toolchain_type",
    visibility = ["//visibility:public"],
)
"""

def _find_python(ctx):
    named = ctx.os.environ.get("LINGVO_MOE_PYTHON")
    if named:
        if not ctx.path(named).exists:
            fail("LINGVO_MOE_PYTHON={}: there is no such file".format(named))
        return named
    root = str(ctx.path(Label("//:WORKSPACE")).dirname)
    own = ctx.path(root + "/.venv/bin/python")
    if own.exists:
        # As it stands, not resolved: the link's place is what makes it a virtual environment.
        return root + "/.venv/bin/python"
    fail("{}/.venv is missing: run `make install`, or set LINGVO_MOE_PYTHON to an interpreter that has the packages of requirements.lock.txt".format(root))

def _venv_python_impl(ctx):
    ctx.file("WORKSPACE", "workspace(name = \"{}\")\n".format(ctx.name))
    ctx.file("BUILD", _TOOLCHAIN_BUILD.format(python = _find_python(ctx)))

venv_python = repository_rule(
    doc = "The Python that tests run with: $LINGVO_MOE_PYTHON, or the one that `make install` made.",
    implementation = _venv_python_impl,
    configure = True,
    environ = ["LINGVO_MOE_PYTHON"],
    local = True,
)

_PYTHON_PACKAGE = """package(default_visibility = ["//visibility:public"])

alias(
    name = "toolchain_type",
    actual = "@bazel_tools//tools/python:toolchain_type",
)
"""

_PY_RUNTIME = """def py_runtime(**kwargs):
    native.py_runtime(**kwargs)
"""

_PY_RUNTIME_PAIR = """load("@bazel_tools//tools/python:toolchain.bzl", _builtin = "py_runtime_pair")

py_runtime_pair = _builtin
"""

def offline_repositories():
    """Everything that a WORKSPACE build of this repository refers to."""
    _builtin_rules(
        name = "rules_python",
        build = _PYTHON_PACKAGE,
        bzl = "python/defs.bzl",
        family = "PYTHON",
        more = {
            "python/py_runtime.bzl": _PY_RUNTIME,
            "python/py_runtime_pair.bzl": _PY_RUNTIME_PAIR,
        },
        rules = ["py_binary", "py_library", "py_test"],
    )
    _builtin_rules(
        name = "rules_cc",
        bzl = "cc/defs.bzl",
        family = "CC",
        rules = ["cc_" + kind for kind in ["binary", "import", "library", "proto_library", "test", "toolchain", "toolchain_suite"]] + ["objc_library"],
    )
    _builtin_rules(
        name = "rules_java",
        bzl = "java/defs.bzl",
        family = "JAVA",
        rules = ["java_" + kind for kind in ["binary", "import", "library", "proto_library", "runtime", "test", "toolchain"]],
    )
    _builtin_rules(
        name = "rules_proto",
        bzl = "proto/defs.bzl",
        family = "PROTO",
        rules = ["proto_lang_toolchain", "proto_library"],
    )
    _coverage_stub(name = "remote_coverage_tools")
    venv_python(name = "venv_python")
    native.register_toolchains("@venv_python//:toolchain")
