"""Strategy files: the parameters of an experiment that say how it lies on devices, one `path=value` a line.

    # mt.M4MoE128E36L on v5p:4x4x4: 0.612 s a step, 40.1 GiB of 95.7 GiB a device
    train.mesh=data:2,expert:32
    task.remat=dots

Lines that begin with # are for the reader. Such a file comes before --model_params_override, which may change it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.config.hyperparams import Params

AUTO = "auto"  # in place of a file's name: search
LAYOUTS = (
    "fsdp",
    "tp",
    "fsdp+expert",
    AUTO,
)  # by name: see named_layouts.py; AUTO: the fastest of them
# All that make up a strategy: these, and the types in which a model computes.
PATHS = (*registry.CHOSEN, "task.dtype", "task.fprop_dtype")


class StrategyError(ValueError):
    """A strategy that cannot be read or found. The message names the flag."""


def to_text(overrides: Mapping[str, str], about: Sequence[str]) -> str:
    """The text of a strategy file.

    Args:
        overrides: values by path, of PATHS.
    """
    lines = [f"# {line}" for line in about]
    return "\n".join([*lines, *(f"{path}={value}" for path, value in overrides.items())]) + "\n"


def read_overrides(path: str | Path, defined: Params) -> str:
    """The contents of a strategy file as an override: see registry.GetParams.

    `defined` are an experiment's Params: see registry.AsDefined.

    Raises:
        StrategyError: no such file, a line that is not `path=value`, or a parameter that is no part of a strategy.
        RegistryError: a parameter that the experiment lacks, or a value that the parameter cannot have.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise StrategyError(f"--strategy={path}: {getattr(e, 'strerror', None) or e}") from None
    params, values = defined.Copy(), dict[str, str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        where = f"--strategy={path}, line {number}"
        if not equals or not value:
            raise StrategyError(f"{where}: {line.strip()!r} is not of the form path=value")
        if name not in PATHS:
            raise StrategyError(
                f"{where}: {name!r} is no part of a strategy{did_you_mean(name, PATHS)}; these are {', '.join(PATHS)}"
            )
        if name in values:
            raise StrategyError(f"{where}: {name} has a value already")
        as_override({name: value}, where)
        registry.set_from_text(params, name, value, where)
        values[name] = value
    if not values:
        raise StrategyError(f"--strategy={path}: no line of the form path=value")
    return as_override(values, f"--strategy={path}")


def as_override(values: Mapping[str, str], source: str) -> str:
    """Values of PATHS as an override.

    Raises StrategyError: a value that no such parameter has, e.g. the name of a class, whose module would be imported;
    `source` says where it comes from.
    """
    for path, value in values.items():
        if value.startswith("type/") or value.endswith("\\"):
            raise StrategyError(f"{source}: {path}={value} is no value of this parameter")
    return ";".join(f"{path}={value}".replace(";", r"\;") for path, value in values.items())
