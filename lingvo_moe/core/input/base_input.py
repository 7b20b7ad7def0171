"""BaseInput: what feeds a task. It says what a batch looks like, makes batches, and resumes where it stopped.

Free of TensorFlow and JAX.
"""

import abc
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.input.input_errors import NoHeldOutError
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import DimsMapping

Progress = Callable[[str], None]


def quiet(line: str) -> None:
    """Shows nothing."""
    del line


@dataclass(frozen=True)
class ArraySpec:
    """An array of a batch before it exists. It serves wherever a spec of a tensor is asked for."""

    shape: tuple[int, ...]  # static
    dtype: str  # NumPy's name, e.g. 'int32'
    # One einsum letter for each dimension, e.g. 'BT'. The task's `activation_split` maps them to mesh axes.
    letters: str
    # The mesh axis, axes or None of each dimension; () before the letters are mapped.
    split: DimsMapping = ()

    def __post_init__(self) -> None:
        if len(self.letters) != len(self.shape):
            raise ValueError(f"ArraySpec: letters {self.letters!r} for shape {self.shape}")

    @property
    def has_rows(self) -> bool:
        """Whether the first dimension is the rows of the batch, which processes and micro-batches divide."""
        return self.letters.startswith("B")


@dataclass(frozen=True)
class HeldOutBatch:
    """A batch of held-out examples."""

    batch: NestedMap  # looks as BatchSpec says
    # The group that all its examples belong to, e.g. of languages, whose loss is also reported; '' for none.
    group: str = ""


class BatchIterator(abc.ABC):
    """Batches without end. `GetState()` after a batch, then `SetState()` on a new iterator: the same batches follow.

    Attributes:
        rows: the numbers of the rows that are needed; None: all. A process of a job needs those that it places on its
            devices. The state and the needed rows are the same whatever is needed; other rows of the arrays may hold
            anything. An iterator that ignores this makes whole batches.
    """

    rows: Collection[int] | None = None

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __next__(self) -> NestedMap:
        """The next batch: NumPy arrays of the shapes and types of BatchSpec()."""

    @abc.abstractmethod
    def GetState(self) -> dict[str, Any]:
        """The position, as a small dict that JSON can hold. A checkpoint keeps it."""

    @abc.abstractmethod
    def SetState(self, state: Mapping[str, Any]) -> None:
        """Continues where `GetState` was called.

        Raises ValueError: the state is of other data or of other parameters.
        """


class BaseInput(abc.ABC):
    """The base of every input.

    A subclass defines its Params, says in `BatchSpec` what a batch looks like, reads its data in `Prepare`, and makes
    batches in `__iter__`. What a trained model cannot do without, as a vocabulary, it gives as `Artifacts`: the run's
    directory keeps them, and gives them back to `Prepare` when the run continues.
    """

    # Parameters that hold paths: of files that are read, and of directories to which files are added.
    READS: ClassVar[tuple[str, ...]] = ()
    ADDS_TO: ClassVar[tuple[str, ...]] = ()
    # Parameters that may change while a run goes on. SetState checks that the data is the same.
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ()
    # Parameters to reduce where a batch needs too much memory.
    BATCH_SIZES: ClassVar[tuple[str, ...]] = ("batch_size",)

    @classmethod
    def Params(cls) -> InstantiableParams:
        """The parameters, with defaults."""
        p = InstantiableParams(cls)
        p.Define("name", "input", "A name, for messages.")
        p.Define("batch_size", 32, "B, rows of a batch, over all processes.", checks.SIZE)
        return p

    def __init__(self, params: InstantiableParams):
        """Touches no data."""
        self.params = params.Copy().Freeze()

    @property
    def p(self) -> InstantiableParams:
        """Short for `params`."""
        return self.params

    @classmethod
    def CheckSource(cls, params: HyperParams) -> None:
        """Raises ValueError where the parameters do not say where the data is. Reads nothing."""
        del params

    @abc.abstractmethod
    def BatchSpec(self) -> NestedMap:
        """The structure of a batch, with an ArraySpec for each array. Needs no data."""

    def Prepare(self, progress: Progress = quiet, artifacts: RunArtifacts | None = None) -> Self:
        """Reads what has to be read before the first batch. Returns self; further calls do nothing.

        `artifacts` are those with which a run began that goes on; None for a new run.

        Raises:
            ValueError: the data is missing or damaged, or does not suit the artifacts.
        """
        return self

    def CheckNewRun(self) -> None:  # noqa: B027
        """Raises ValueError where the data and the parameters do not suit each other, for a new run; after Prepare."""

    def Artifacts(self) -> RunArtifacts:
        """Files and facts that a run's directory must keep; call it after Prepare."""
        return RunArtifacts()

    def Warnings(self) -> list[str]:
        """Returns warnings about the data before a run begins, one line each, with the remedy; after Prepare."""
        return []

    @abc.abstractmethod
    def __iter__(self) -> BatchIterator:
        """Batches from the beginning, after Prepare; each call starts again."""

    def HeldOut(self) -> Iterator[HeldOutBatch]:
        """Batches of held-out examples, each example once, for `BaseTask.HeldOutStep`; after Prepare.

        Each call gives the same batches, in an order in which the first ones represent all. Incomplete batches are
        padded, in a way that the task's metrics leave out.

        Raises:
            NoHeldOutError: there are none.
        """
        raise NoHeldOutError(f"{type(self).__name__} has no held-out examples")
