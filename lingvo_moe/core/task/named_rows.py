"""Dimensions of variables whose elements have names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NamedRows:
    """A dimension of a variable whose elements have names, e.g. the rows of an embedding: vocabulary pieces.

    `--init_from` matches such rows of another run by name.
    """

    # What the named elements are, in the plural, e.g. 'source pieces'. RowNames and messages use it.
    kind: str
    dim: int  # the dimension
    sized_by: str  # the suffix of the parameters that set its size, e.g. 'vocab_size'
