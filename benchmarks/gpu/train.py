"""Trains from program files on a machine that has no TensorFlow: held-out losses, and the seconds of a step.

    python -m benchmarks.gpu.train --programs=PROGRAMS --points=105,211,422,844 --seeds=1,2,3 --output=curves.json

PROGRAMS is a directory that `python -m benchmarks.gpu.runs` wrote. docs/gpus.md says what this command needs; it uses
the first device. Each seed has its own initial weights and order of batches. A run at a stable rate goes through all
points. To each a branch of it decays in the last part of the steps, and its held-out loss is reported. Where all of the
rates depend on the end, each point has a run of its own; where none does, there are no branches.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.layer import read_manifest
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files import files
from lingvo_moe.core.nested_map import NestedMap
from tools import _cli

INIT, STEP, SCORE = "init.program", "step.program", "score.program"
BATCHES, HELD_OUT = "batches.npz", "held_out.npz"
_BETWEEN_TIMES = 20  # steps
_LAST = 10  # steps whose training loss is averaged


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.gpu.train", __doc__)
    flags.DEFINE_path("programs", None, "what benchmarks.gpu.runs wrote", required=True)
    flags.DEFINE_numbers("points", (100,), "steps at which a run ends, rising", checks.SIZE)
    flags.DEFINE_numbers("seeds", (1,), "a run for each", checks.SIZE)
    flags.DEFINE_path("output", "", "a JSON file for the figures")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if list(args.points) != sorted({*args.points}):
        args.Fail(f"--points={','.join(map(str, args.points))}: must rise")
    return _cli.attempt("train", lambda: run(args), "interrupted; finished seeds are written")


def run(args: Flags) -> int:
    """Trains with each seed, prints a line for each point, writes the figures; returns the exit status."""
    from lingvo_moe.core.engine import gpu_settings

    _cli.check_output_files(args, "output")
    gpu_settings.prepare()
    runs = Runs(Path(args.programs))
    result = {**runs.manifest, "device": runs.device, "compile_seconds": runs.compile_seconds}
    result["runs"] = []
    for seed in args.seeds:
        curve, seconds = runs.Train(seed, args.points)
        result["runs"].append({"seed": seed, "curve": curve, "step_seconds": seconds})
        if args.output:
            files.write_json(args.output, result)
    return 0


class Runs:
    """The programs of a directory, compiled for the first device, and their batches.

    Raises:
        ValueError: no manifest of this version; names --programs.
        ProgramError: a program that cannot be read.
    """

    def __init__(self, directory: Path):
        import jax

        from lingvo_moe.core.engine.lowering.program import Program
        from lingvo_moe.core.engine.pjrt import PjrtEngine

        self.manifest = read_manifest(directory)
        self.device = jax.devices()[0].device_kind
        self._engine: PjrtEngine | None = None
        self._compiled: dict[str, Any] = {}
        self.compile_seconds: dict[str, float] = {}
        scores = bool(self.manifest["held_out"])
        for name in (INIT, STEP, *([SCORE] if scores else ())):
            program = Program.Load(str(directory / name))
            self._engine = self._engine or PjrtEngine(program.mesh)
            began = time.perf_counter()
            self._compiled[name] = self._engine.Compile(program)
            self.compile_seconds[name] = time.perf_counter() - began
        self._batches = _batches(directory / BATCHES)
        self._held_out = _batches(directory / HELD_OUT) if scores else []

    def Train(self, seed: int, points: Sequence[int]) -> tuple[list[dict[str, Any]], float | None]:
        """Trains to each of these steps; returns what was found there, and the median seconds of a step.

        The seconds are None of a run that is shorter than two readings of the clock are apart.
        """
        state = self._compiled[INIT](np.int32(seed))
        decays = self.manifest["decay_share"]
        order = self._Order(seed, points[-1])
        curve: list[dict[str, Any]] = []
        times: list[float] = []
        step = 0
        for point in points:
            begins = round(point * (1 - decays))
            state, losses = self._Steps(state, order[step:begins], times)
            step, ended = begins, state
            if decays:
                ended = NestedMap(state).Transform(lambda leaf: leaf.copy())
                ended.last_step = np.int32(point)
                ended, losses = self._Steps(ended, order[begins:point], times)
            found = {"seed": seed, "step": point, "train_loss": float(np.mean(losses[-_LAST:]))}
            if self._held_out:
                found["held_out_loss"] = self._Score(ended.theta)
            curve.append(found)
            print(json.dumps(found), flush=True)
        return curve, statistics.median(times) if times else None

    def _Order(self, seed: int, steps: int) -> list[int]:
        """The batch of each step: all of them in a random order, then in another one."""
        random = np.random.default_rng(seed)
        order: list[int] = []
        while len(order) < steps:
            order += random.permutation(len(self._batches)).tolist()
        return order[:steps]

    def _Steps(
        self, state: NestedMap, order: Sequence[int], times: list[float]
    ) -> tuple[NestedMap, list[float]]:
        """Trains on these batches; returns the new state and the losses, and adds to the seconds of a step."""
        losses: list[Any] = []
        began = time.perf_counter()
        for number, batch in enumerate(order, 1):
            state, metrics = self._compiled[STEP](state, self._batches[batch])
            losses.append(metrics.loss)
            if number % _BETWEEN_TIMES == 0:
                metrics.loss.block_until_ready()
                now = time.perf_counter()
                times.append((now - began) / _BETWEEN_TIMES)
                began = now
        return state, [float(loss) for loss in losses]

    def _Score(self, theta: NestedMap) -> float:
        """The loss of weights on all held-out batches, a mean over units."""
        unit, loss = self.manifest["unit"], self.manifest["loss"]
        total = np.zeros(2)
        for batch in self._held_out:
            metrics = self._compiled[SCORE](theta, batch)
            count = float(metrics[unit])
            total += count, count * float(metrics[loss])
        return float(total[1] / total[0])


def _batches(path: Path) -> list[NestedMap]:
    """The batches of a file, with integers in the format of the programs."""
    with np.load(path) as stacked:
        arrays = {name: stacked[name] for name in stacked.files}
    batches = []
    for number in range(len(next(iter(arrays.values())))):
        batch = NestedMap()
        for name, values in arrays.items():
            value = values[number]
            is_whole = np.issubdtype(value.dtype, np.integer)
            batch.Set(name, value.astype(np.int32) if is_whole else value)
        batches.append(batch)
    return batches


if __name__ == "__main__":
    _cli.run(main)
