"""Step: a function of trees with the specs of its arguments, as trainer and planner turn it into a program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """A function with all that compiling it needs but the mesh; see engine/loop/steps.py."""

    name: str  # of the program
    fn: Callable[..., Any]  # a function of trees of tensors
    arg_specs: tuple[Any, ...]  # a tree of specs for each argument
    donate: tuple[int, ...] = ()  # numbers of the arguments whose memory the results take over
