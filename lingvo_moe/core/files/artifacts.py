"""Artifacts: what a run's directory keeps of its input, such as vocabularies and names of classes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunArtifacts:
    """The files and facts that an input stores in a run's directory and later reads back.

    Attributes:
        files: contents by path in the directory, with slashes, e.g. 'vocab/source.model'.
        about: anything that JSON can hold, by name, e.g. {'languages': ['de', 'sw']}. It is kept in
            experiment.json.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
