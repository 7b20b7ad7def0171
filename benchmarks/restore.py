"""Measures what the digests of a checkpoint cost: restores one, and times verifying it beside that.

    python -m benchmarks.restore --megabytes=400

Saves a state of random float32 numbers over eight virtual devices, then restores it again and again, each time with a
fresh Checkpointer, onto the devices and as NumPy arrays. Prints seconds of wall and of CPU time (medians), and by how
much verifying the digests lengthens them. Files are read from the page cache; a slower disk makes the share smaller.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.engine.checkpoints.checkpoint_digests import verify_step
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.saved_steps import saved_steps
from lingvo_moe.core.sharding import Mesh
from tools import _cli

_VARIABLES = 20


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.restore", __doc__)
    flags.DEFINE_integer("megabytes", 400, "size of the state", checks.SIZE)
    flags.DEFINE_integer("rounds", 9, "measure each operation this many times", checks.SIZE)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)

    def work() -> int:
        with tempfile.TemporaryDirectory() as directory:
            measure(directory, args.megabytes, args.rounds)
        return 0

    return _cli.attempt("restore", work)


def measure(directory: str, megabytes: int, rounds: int) -> None:
    """Saves, restores, and prints a line for each way to restore."""
    engine = PjrtEngine(Mesh.parse("expert:8"))
    size = max(1, megabytes * 1_000_000 // (_VARIABLES * 8 * 4))
    names = [f"w{i}" for i in range(_VARIABLES)]
    specs = NestedMap({n: TensorSpec((8, size), "float32", ("expert", None)) for n in names})
    random = np.random.RandomState(0)
    values = specs.Transform(lambda s: random.randn(*s.shape).astype(np.float32))
    with Checkpointer(directory) as checkpointer:
        checkpointer.Save(1, engine.Put(values, specs))

    def verify() -> None:
        verify_step(saved_steps(directory), 1)

    def onto_devices() -> None:
        with Checkpointer(directory, read_only=True) as checkpointer:
            state, _ = checkpointer.Restore(specs, engine)
        jax.block_until_ready(state.Flatten())

    def as_numpy() -> None:
        with Checkpointer(directory, read_only=True) as checkpointer:
            checkpointer.RestoreToNumpy()

    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for work in (verify, onto_devices, as_numpy):
            times.setdefault(work.__name__, []).append(_timed(work))
    wall, cpu = _medians(times.pop("verify"))
    print(f"verify: {wall:.3f} s, CPU {cpu:.3f} s")
    for name, measured in times.items():
        all_wall, all_cpu = _medians(measured)
        print(
            f"{name}: {all_wall:.3f} s, CPU {all_cpu:.3f} s; verifying adds "
            f"{wall / (all_wall - wall):.1%} of wall and {cpu / (all_cpu - cpu):.1%} of CPU time"
        )


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def _medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    wall, cpu = zip(*times, strict=True)
    return statistics.median(wall), statistics.median(cpu)


if __name__ == "__main__":
    _cli.run(main)
