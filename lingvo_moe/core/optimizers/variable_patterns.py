"""Patterns of variables' names, by which an optimizer treats some variables in another way.

Such a pattern, e.g. '*.router.*', is compared with whole paths; * stands for any characters.
"""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.config.param_text import shown


def matched(name: str, patterns: Sequence[str], specs: Sequence[VariableSpec]) -> set[str]:
    """The paths of variables, or of those that they pack, that some pattern matches.

    Raises ParamError, naming the parameter `name` of these patterns, for one that matches none.
    """
    paths = {part.path for spec in specs for part in spec.parts}
    all_matched = set()
    for pattern in patterns:
        matched = {path for path in paths if fnmatchcase(path, pattern)}
        if not matched:
            ends = {f"*.{path.rpartition('.')[2]}" for path in paths}
            near = did_you_mean(pattern, paths | ends)
            why = (
                f"{pattern!r} matches no variable that is trained{near}; --mode=inspect_model lists them, and * "
                "stands for any characters"
            )
            raise checks.ParamError(name, shown(list(patterns)), why)
        all_matched |= matched
    return all_matched


def wholly(
    specs: Sequence[VariableSpec], chosen: Collection[str], does: str, param: tuple[str, Any]
) -> frozenset[str]:
    """The paths of the variables whose parts are all `chosen`, by path.

    Args:
        does: what chosen variables do, for the message: 'decays'.
        param: the name and the value of the parameter that chooses.

    Raises ParamError: only some parts of a variable are chosen.
    """
    for spec in specs:
        parts = [part.path for part in spec.parts]
        spared = [path for path in parts if path not in chosen]
        if spared and len(spared) < len(parts):
            one = next(path for path in parts if path in chosen)
            why = (
                f"{one} {does} and {spared[0]} does not, but a pipeline packs both into {spec.path}, which {does} as a "
                "whole; choose patterns that match all variables of as many dimensions, or none of them"
            )
            name, value = param
            raise checks.ParamError(name, shown(value), why)
    return frozenset(spec.path for spec in specs if spec.parts[0].path in chosen)
