"""TaskGrowth: how a task takes over the weights of a smaller model, or of one with other vocabularies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.nested_map import NestedMap


@dataclass(frozen=True)
class NamedRows:
    """A dimension of a variable whose elements have names, e.g. the rows of an embedding: vocabulary pieces.

    `--init_from` matches such rows of another run by name.
    """

    kind: str  # what the named elements are, in the plural, e.g. 'source pieces'
    dim: int  # the dimension
    sized_by: str  # the suffix of the parameters that set its size, e.g. 'vocab_size'
    # Reads the names, in row order, from the artifacts that a run saves. Raises TaskError if they do not contain them.
    names: Callable[[RunArtifacts], list[str]]


class TaskGrowth:
    """The models whose weights a task of some Params takes over, which BaseTask.Growth returns.

    Attributes:
        p: the task's Params.
    """

    def __init__(self, params: InstantiableParams):
        self.p = params

    def GrowsFrom(self) -> dict[str, Any]:
        """Returns the Params, by name, that make a task the smaller one whose weights Grow takes; {}: there is none."""
        return {}

    def NamedRows(self, specs: NestedMap) -> dict[str, NamedRows]:
        """Returns the named dimensions of variables, from the task's VariableSpecs, by their paths in theta."""
        return {}
