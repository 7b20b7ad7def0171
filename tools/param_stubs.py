"""Writes stubs from which editors and type checkers know the parameters of each class: `LmModel.Params().model_dim`.

    python -m tools.param_stubs --output=typings

Pyright, and so Visual Studio Code, reads the directory `typings` of a project; mypy reads what its `mypy_path` names.
"""

import contextlib
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import lingvo_moe
import lingvo_moe.params
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.version import VERSION

from . import _cli

# A method that returns Params: a layer's, or one of an experiment.
_RETURNS_PARAMS = re.compile(
    r"(def (Params(?=\(cls)|(?:Task|Input|Train)(?=\(self))\(\w+\)) -> \w*Params\b"
)
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_STUBGEN = "--quiet", "--parse-only", "--include-private", "--include-docstrings"
_TOP = "# mypy: ignore-errors\nfrom typing import Any\nfrom lingvo_moe import param_types\n"
_TYPES = f'''\
# mypy: ignore-errors
"""The parameters of the classes of lingvo_moe {VERSION}, written by tools.param_stubs."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, overload

from lingvo_moe.core.config.hyperparams import InstantiableParams, Params
'''


def define_flags() -> Flags:
    flags = Flags("python -m tools.param_stubs", __doc__)
    flags.DEFINE_path("output", "typings", "directory for the stubs, in lingvo_moe/")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("param_stubs", lambda: _run(Path(args.output)))


def _run(out: Path) -> int:
    try:
        from mypy import stubgen
    except ImportError:
        raise ValueError("mypy writes the stubs: pip install mypy") from None

    stubs = out / "lingvo_moe"
    if stubs.exists():
        raise ValueError(f"--output={out}: there is {stubs}; remove it if its stubs are of before")
    _cli.load_tensorflow()
    package, experiments = (Path(m.__path__[0]) for m in (lingvo_moe, lingvo_moe.params))
    directories = {package: out}
    if not experiments.is_relative_to(package):  # a checkout
        directories[experiments] = stubs
    types: dict[str, str] = {}
    for top, directory in directories.items():
        files = [f for f in top.rglob("*.py") if _RETURNS_PARAMS.search(f.read_text("utf-8"))]
        packages = {parent for f in files for parent in f.parents if parent.is_relative_to(top)}
        sources = [*files, *(parent / "__init__.py" for parent in packages)]
        stubgen.main([*_STUBGEN, f"--output={directory}", *map(str, sources)])
        for file in files:
            stub = directory / file.relative_to(top.parent).with_suffix(".pyi")
            module = importlib.import_module(".".join(stub.relative_to(out).with_suffix("").parts))
            stub.write_text(_typed(stub.read_text("utf-8"), module, types), "utf-8")
    (stubs / "param_types.pyi").write_text("\n".join((_TYPES, *types.values())), "utf-8")
    _cli.made(out)
    return 0


def _typed(stub: str, module: ModuleType, types: dict[str, str]) -> str:
    """The stub of a module whose classes return Params of known types, which are added to `types`.

    `| Any` lets a class of the user's return others.
    """

    def returns(match: re.Match[str]) -> str:
        # An abstract experiment lacks sizes, which those below it have.
        below = (sub for sub in cls.__subclasses__() if sub.__module__ == module.__name__)
        for owner in cls, *below:
            with contextlib.suppress(NotImplementedError, AttributeError, ValueError):
                params = getattr(owner if match[2] == "Params" else owner(), match[2])()
                return f"{match[1]} -> param_types.{_type_of(params, match[2], types)} | Any"
        return match[0]

    before, *classes = _CLASS.split(stub)
    text = [_TOP, before]
    for name, body in zip(classes[::2], classes[1::2], strict=True):
        cls = getattr(module, name)
        text.append(f"class {name}{_RETURNS_PARAMS.sub(returns, body)}")
    train = "def TrainParams() -> "
    return "".join(text).replace(f"{train}Params", f"{train}param_types.TrainParams")


def _type_of(params: Params, name: str, types: dict[str, str]) -> str:
    """The name of the type of Params, which is added to `types`: that of their class, or `name` if they have none."""
    if isinstance(params, InstantiableParams):
        owner = next(cls for cls in params.cls.__mro__ if "Params" in vars(cls))
        name, params = owner.__name__, owner.Params()
    name = f"{name[0].upper()}{name[1:]}Params"
    if name not in types:
        types[name] = ""  # it may be a part of itself
        types[name] = _class(name, params, types)
    return name


def _class(name: str, params: Params, types: dict[str, str]) -> str:
    """The stub of Params as a class of a name."""
    lines, arguments = [f"class {name}({type(params).__name__}):"], []
    for parameter, value in params.IterParams():
        kind = _annotation(params.Range(parameter))
        arguments.append(f"{parameter}: {kind} = ...")
        help = f"{params.Help(parameter)} ({params.Range(parameter)})".replace('"', "'")
        if not isinstance(value, Params):
            lines += f"{parameter}: {kind}", f'"""{help}"""'
            continue
        read = _type_of(value, parameter, types)
        lines += "@property", f"def {parameter}(self) -> {read}:", f'    """{help}"""'
        lines += f"@{parameter}.setter", f"def {parameter}(self, value: {kind}) -> None: ..."
    lines += "@overload", f"def Set(self, *, {', '.join(arguments)}) -> Self: ..."
    lines += "@overload", "def Set(self, **values: Any) -> Self: ...\n"
    return "\n    ".join(lines)


def _annotation(check: checks.Check) -> str:
    """The type of the values that a check allows."""
    match check:
        case checks.Integer():
            return "int"
        case checks.Number():
            return "float"
        case checks.Steps():
            return "str"
        case checks.OneOf(names):
            return f"Literal{list(names)}"
        case checks.FlagOr(word):
            return f"bool | Literal[{word!r}]"
        case checks.SizeOr(words):
            return f"int | Literal{list(words)}"
        case checks.NamesOr(words):
            return f"Literal{list(words)} | Sequence[str]"
        case checks.AnyOf(parts):
            return " | ".join(map(_annotation, parts))
        case checks.ListOf(item):
            return f"Sequence[{_annotation(item)}]"
        case checks.Letters():
            return "Mapping[str, Any]"
        case checks.Kind(types) if not {object, type} & {*types}:
            return " | ".join(kind.__name__.replace("NoneType", "None") for kind in types)
    return "Any"


if __name__ == "__main__":
    _cli.run(main)
