"""Runs jobs, and looks for duplicates, as pipelines of Apache Beam, on any of its runners.

Only small things pass through Beam: jobs, and hashes with their places. Texts are in files, on a disk that all workers
share, as are the results. So a run that was killed goes on from what is there.

Beam is imported when a runner is named, and not before.
"""

import importlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.files.files import write_atomic
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.made_once import make_once
from lingvo_moe.tasks.text.preparing import dedup

_FAILED = ".failed"  # the ending of a file with the error of a job


@dataclass(frozen=True)
class BeamRunner:
    """A runner of Beam, by its name, with options of pipelines, such as direct_num_workers=2."""

    name: str
    options: tuple[str, ...] = ()

    def Check(self) -> None:
        """Raises DataError: Beam is not installed, or has no such runner."""
        self._Runner()

    def Run(self, function: Callable[[Any, Callable], str], jobs: Sequence[Any]) -> list[str]:
        """Returns `[function(job, report), ...]`, in order, as run_jobs does; jobs run on any workers.

        Args:
            function: a function of a module, which returns the job's `output`, a path, once all is there. `report` is
                without effect.
            jobs: its arguments, which can be pickled.

        Raises:
            DataError: the pipeline failed; or, after all jobs, `function` raised a ValueError or an OSError, which has
                this message.
        """
        errors = [Path(f"{job.output}{_FAILED}") for job in jobs]
        for path in errors:
            path.unlink(missing_ok=True)

        def build(beam: Any, pipeline: Any) -> None:
            _ = pipeline | beam.Create(jobs) | beam.Reshuffle() | beam.Map(_do, function)

        if jobs:
            self._Pipeline(build)
        for path in errors:
            if path.exists():
                raise DataError(path.read_text("utf-8"))
        return [job.output for job in jobs]

    def KeepFirst(self, hashes: dict[str, list[Path]], output: Path) -> None:
        """Finds the first of equal pairs in each language, unless that was done: `output/<lang>` has their places.

        Args:
            hashes: by language, files as for keep_first.
            output: a directory of directories of files of uint64, one for each part of a language.

        Raises:
            DataError: the pipeline failed.
        """

        def write(directory: Path) -> None:
            files = []
            for lang, paths in hashes.items():
                (directory / lang).mkdir()
                parts = dedup.parts_of(dedup.hashes_in(paths))
                starts = itertools.accumulate((dedup.hashes_in([p]) for p in paths), initial=0)
                files += [(lang, str(path), start, parts) for path, start in zip(paths, starts)]

            def build(beam: Any, pipeline: Any) -> None:
                entries = pipeline | beam.Create(files) | beam.Reshuffle() | beam.FlatMap(_entries)
                _ = entries | beam.GroupByKey() | beam.Map(_write_firsts, str(directory))

            self._Pipeline(build)

        make_once(str(output), write)

    def _Pipeline(self, build: Callable[[Any, Any], None]) -> None:
        """Runs the pipeline that `build(apache_beam, pipeline)` makes, to its end."""
        runner = self._Runner()
        beam = importlib.import_module("apache_beam")
        options = importlib.import_module("apache_beam.options.pipeline_options")
        arguments = [f"--{option.removeprefix('--')}" for option in self.options]
        try:
            with beam.Pipeline(runner, options.PipelineOptions(arguments)) as pipeline:
                build(beam, pipeline)
        except Exception as e:
            raise DataError(
                f"--runner={self.name}: the pipeline failed: {e}; the same command goes on from what is done"
            ) from e

    def _Runner(self) -> Any:
        try:
            with quiet():  # about packages for Google's services
                module = importlib.import_module("apache_beam.runners.runner")
        except ImportError as e:
            raise DataError(
                f"--runner={self.name} needs Apache Beam, which is not here ({e}): pip install --no-deps -r"
                " requirements-beam.txt"
            ) from e
        logging.getLogger("apache_beam").setLevel(logging.WARNING)
        try:
            return module.create_runner(self.name)
        except (ValueError, ImportError, AttributeError) as e:
            raise DataError(f"--runner={self.name}: {e}") from e


def _do(job: Any, function: Callable[[Any, Callable], str]) -> None:
    """Does a job on a worker. Runners repeat what raises, in vain where data are wrong: such errors go into files."""
    try:
        function(job, lambda amount: None)
    except (ValueError, OSError) as e:
        write_atomic(f"{job.output}{_FAILED}", str(e).encode("utf-8", "replace"))


def _entries(file: tuple[str, str, int, int]) -> Iterator[tuple[tuple[str, int], bytes]]:
    """The entries of a file of hashes, by language and part."""
    lang, path, start, parts = file
    for entries in dedup.entries_of(Path(path), start):
        for part, some in dedup.by_part(entries, parts):
            yield (lang, part), some.tobytes()


def _write_firsts(of_part: tuple[tuple[str, int], Iterable[bytes]], directory: str) -> None:
    """Writes the places of the first pairs of a part, whose entries come in any order."""
    (lang, part), blocks = of_part
    pieces = [np.frombuffer(data, dedup.ENTRY) for data in blocks]
    pieces.sort(key=lambda entries: int(entries["place"][0]))
    firsts = dedup.first_places(np.concatenate(pieces))
    write_atomic(f"{directory}/{lang}/{part}", firsts.tobytes())
