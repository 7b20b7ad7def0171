"""Artifacts: what a run's directory keeps of its input, such as vocabularies and names of classes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Where a run keeps what was published with the weights that it began from: files by paths below PUBLISHED, e.g. a
# licence, and what they were, as about[IMPORTED].
PUBLISHED, IMPORTED = "published/", "imported"


@dataclass(frozen=True)
class RunArtifacts:
    """The files and facts that an input stores in a run's directory and later reads back."""

    # Contents by path in the directory, with slashes, e.g. 'vocab/source.model'.
    files: Mapping[str, bytes] = field(default_factory=dict)
    # Anything that JSON can hold, by name, e.g. {'languages': ['de', 'sw']}. It is kept in experiment.json.
    about: Mapping[str, Any] = field(default_factory=dict)

    def WithWeightsOf(self, other: "RunArtifacts") -> "RunArtifacts":
        """These, with what the other run keeps of published weights."""
        files = {name: x for name, x in other.files.items() if name.startswith(PUBLISHED)}
        about = {name: x for name, x in other.about.items() if name == IMPORTED}
        return RunArtifacts({**self.files, **files}, {**self.about, **about})
