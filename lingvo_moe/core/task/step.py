"""Step: a function of trees with the specs of its arguments, as trainer and planner turn it into a program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """A function with all that compiling it needs but the mesh."""

    name: str  # the name of the program; '' for the function's own
    # A TensorFlow function of trees of tensors (NestedMaps, lists) that returns such a tree or a tuple of them.
    fn: Callable[..., Any]
    arg_specs: Sequence[Any]  # for each argument a tree of TensorSpecs or VariableSpecs
    # Numbers of the arguments, e.g. (0,) for the state, whose memory the results take over. Result i then has to have
    # the structure, shapes and dtypes of argument i.
    donate: Sequence[int] = ()
    # The shardings of results. None: a result whose argument of the same number is donated is sharded like that
    # argument, all others are replicated. AUTO: the partitioner chooses. Else a tree of specs in the structure of the
    # results.
    results: Any = None
    # All that determines the program beside specs, mesh and code, i.e. parameters; '' where that is not known.
    text: str = ""
