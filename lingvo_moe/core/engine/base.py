"""Engine: the interface through which trainer, evaluator and tests run a model.

Usage:
    engine = make_engine("pjrt", Mesh.parse("expert:8"))
    init = engine.Build(task.InitState, [TensorSpec((), "int32")], results=state_specs)
    step = engine.Build(task.TrainStep, [state_specs, batch_specs], donate=(0,))
    state = init(np.int32(1234))            # computed on the devices, sharded
    state, metrics = step(state, batch)     # batch: NumPy; state: stays on the devices
    metrics = engine.Get(metrics)           # NumPy
"""

import abc
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from lingvo_moe.core.nested_map import NestedMap, flatten_items, pack, skeleton
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.step import Step


class EngineError(ValueError):
    """Devices, a mesh or arguments that an engine cannot use."""


class Compiled(abc.ABC):
    """A compiled function of trees; call it with the arguments of the original function.

    Arguments may be NumPy arrays or tensors that the engine's functions returned; results stay on
    the devices.
    """

    signature: Any  # the Signature (lowering/signature.py) of its arguments and results
    program: Any = None  # the Program (lowering/program.py) that it comes from, if there is one
    # What the first call does besides running the function, as a phrase; '' for nothing.
    first_call: str = ""

    def __call__(self, *args: Any) -> Any:
        """Runs it. Donated arguments must not be used again."""
        results = self.Run(self.signature.FlattenArgs(*args))
        return self.signature.PackResults(list(results))

    @abc.abstractmethod
    def Run(self, leaves: Sequence[Any]) -> Iterable[Any]:
        """The flat results for the flat arguments."""

    def HloText(self) -> str:
        """The compiled module. Raises EngineError if the engine has none."""
        raise EngineError(f"{type(self).__name__} has no HLO text")

    def Memory(self) -> dict[str, int]:
        """The bytes on one device: arguments, outputs, temporaries, and aliased (donated) ones; {} if unknown."""
        return {}


class Engine(abc.ABC):
    """Builds functions for the devices of a mesh and moves tensors there and back.

    Engines are registered by name (engines.py). What those of a class can do is known before one is made, by
    attributes and methods of the class.
    """

    NAME: ClassVar[str]  # the value of --engine
    # Whether it runs on one device, however many there are.
    ONE_DEVICE: ClassVar[bool] = False
    # Whether the processes of a job share its mesh.
    SEVERAL_PROCESSES: ClassVar[bool] = False
    # Whether XLA compiles its functions, so that they are traced with the kernels for XLA and not TensorFlow's.
    XLA: ClassVar[bool] = True
    # Whether its programs run through PJRT, on JAX's devices, with TensorFlow for tracing alone. They are compiled as a
    # whole, so that known faults are looked for in them, and their texts can be written.
    PJRT: ClassVar[bool] = False

    mesh: Mesh  # the mesh that functions are traced under
    # What is done with programs that XLA's partitioner is known to compute wrongly: one of program_analysis.ACTIONS.
    known_faults: str = "error"
    # Whether the devices have memory of their own beside that of their host.
    has_host_memory: bool = False
    # Called with a phrase when BuildStep does something else that may take long.
    doing: Callable[[str], None] = staticmethod(lambda doing: None)

    @classmethod
    def RunsOnCpu(cls) -> bool:
        """Whether tensors live in the host's memory, and not in an accelerator's."""
        return True

    @classmethod
    def DeviceKind(cls) -> str:
        """The name of the accelerator, as its maker gives it; '' where there is none."""
        return ""

    @classmethod
    def DeviceBytes(cls) -> int | None:
        """The bytes of memory that programs can use on one accelerator; None if they are not known."""
        return None

    @classmethod
    def PeakBytes(cls) -> int | None:
        """The most bytes that programs have used on one accelerator of this process; None if they are not known."""
        return None

    def DumpPrograms(self, directory: str) -> None:
        """Has the texts of each program that is compiled from now on written into a directory.

        Raises EngineError: the engine has none. PathError: the directory is not on this machine.
        """
        raise EngineError(
            f"--dump_programs={directory}: only --engine=pjrt compiles programs as a whole; give it (it is "
            "the default on several devices and with --mesh)"
        )

    @contextlib.contextmanager
    def Showing(self, show: Callable[[str], None]) -> Iterator[None]:
        """Inside the block, `show` is called with what BuildStep does."""
        before, self.doing = self.doing, show
        try:
            yield
        finally:
            self.doing = before

    @abc.abstractmethod
    def __init__(self, mesh: Mesh):
        """Makes the engine; compiles nothing. Raises EngineError: its devices do not fit the mesh."""

    @abc.abstractmethod
    def BuildStep(self, step: Step) -> Compiled:
        """Lowers and compiles a step. Raises as `lowering.lower_step`."""

    def Build(
        self,
        fn: Callable[..., Any],
        arg_specs: Sequence[Any],
        *,
        results: Any = None,
        donate: Sequence[int] = (),
        name: str = "",
    ) -> Compiled:
        """Builds a step with these fields, as BuildStep does."""
        return self.BuildStep(Step(name, fn, arg_specs, donate, results))

    def Once(self, step: Step, *args: Any) -> Any:
        """The results of a step that is called only once, on these arguments."""
        return self.BuildStep(step)(*args)

    @abc.abstractmethod
    def Put(self, tree: Any, specs: Any) -> Any:
        """Moves a tree of NumPy arrays to the devices, sharded as the tree of specs says.

        In a job of several processes each process gives arrays of the full shape and keeps its part; see OwnRows.
        """

    def Sharding(self, spec: Any) -> Any:
        """The `jax.sharding.NamedSharding` of a TensorSpec; None where tensors are not JAX's, or its split is None."""
        return None

    def Get(self, tree: Any) -> Any:
        """Fetches a tree as full NumPy arrays on every process (all processes have to call it)."""
        return pack(skeleton(tree), [np.asarray(leaf) for _, leaf in flatten_items(tree)])

    def OwnRows(self, specs: NestedMap) -> Collection[int] | None:
        """The numbers of the rows of a batch that this process places on its devices; None: all.

        `specs` are the batch's ArraySpecs, with `split`.
        """
        return None

    def Most(self, value: float) -> float:
        """The largest `value`, as float32, of all processes of the job (all processes have to call it)."""
        return value

    def AnyProcess(self, flag: bool) -> bool:
        """Whether `flag` is true on any process of the job (all processes have to call it)."""
        return bool(self.Most(flag))
