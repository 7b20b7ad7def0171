"""The command `lingvo-moe` of an installed package, and `python -m lingvo_moe`: runs the trainer or a tool.

lingvo-moe                       lists the commands
lingvo-moe train --help          the trainer; lingvo_moe.trainer in a checkout
lingvo-moe plan --model=...      a tool; tools.plan in a checkout
"""

import ast
import importlib
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.console.command import say

_TOOLS = "lingvo_moe.tools"
# They write files of the repository, read its sources, or run its files by their paths.
_OF_THE_REPOSITORY = ("build_files", "import_graph", "lingvo_moe", "reproduce")


def commands() -> dict[str, str]:
    """The module of each command, by name; the trainer comes first."""
    names = (
        module.name for module in pkgutil.iter_modules(importlib.import_module(_TOOLS).__path__)
    )
    public = [name for name in names if name[0] != "_" and name not in _OF_THE_REPOSITORY]
    return {"train": "lingvo_moe.trainer"} | {name: f"{_TOOLS}.{name}" for name in public}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, or lists all of them.

    Returns:
        The exit status where no command was run: 0 for the list, 2 for an unknown name. A command ends the process.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ("help",)
    modules = commands()
    if name in ("help", "-h", "--help"):
        print("lingvo-moe COMMAND --flag=value ...; lingvo-moe COMMAND --help shows its flags\n")
        for command, module in modules.items():
            print(f"  {command:<17} {_title(module)}")
        return 0
    if name not in modules:
        say(f"lingvo-moe: no command {name!r}{did_you_mean(name, modules)}; lingvo-moe lists them")
        return 2
    if os.getcwd() not in sys.path and "" not in sys.path:
        # Last: for experiments that the user names, and not in place of a package.
        sys.path.append(os.getcwd())
    sys.argv = [name, *rest]
    runpy.run_module(modules[name], run_name="__main__", alter_sys=True)
    return 0


def _title(module: str) -> str:
    """The first sentence of a module's docstring; the module is not run."""
    spec = find_spec(module)
    assert spec and spec.origin
    with open(spec.origin, encoding="utf-8") as file:
        text = ast.get_docstring(ast.parse(file.read())) or ""
    return text.partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
