"""Answers the lines of a file in blocks, each a job that any worker can do, whose answers are kept in a directory.

A block has whole batches, so that the model is given the batches that one process would give it. What is not needed for
these jobs is not imported here, TensorFlow above all.
"""

import codecs
import dataclasses
import functools
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lingvo_moe.core.files.files import open_to_write
from lingvo_moe.tasks.text.data.made_once import make_once
from lingvo_moe.tasks.text.decoding.line_stream import (
    MAX_LINE_BYTES,
    Answer,
    Line,
    read_lines,
    translation_of,
)

_ANSWERS = "answers.jsonl"  # [text, warning] of each line


@dataclasses.dataclass(frozen=True)
class BlockJob:
    """The job of translating some lines of a file."""

    input: str  # the file
    # `start`, `end`: of the lines, in bytes.
    start: int
    end: int
    batch_lines: int  # lines that the model is given at once
    saved_model: str  # the exported model's directory
    language: str | None  # the source language, for models that route by it
    output: str  # the directory to make


def blocks_of(path: str | os.PathLike, lines: int) -> Iterator[tuple[int, int]]:
    """Yields where each block of so many lines begins and ends, in bytes. Raises OSError: it cannot be read."""
    with open(path, "rb") as file:
        start = end = count = 0
        while text := file.readline(MAX_LINE_BYTES):
            end += len(text)
            count += text.endswith(b"\n")
            if count == lines:
                yield start, end
                start, count = end, 0
        if end > start:
            yield start, end


def answer_block(job: BlockJob, report: Callable[[int], None]) -> str:
    """Does a job atomically, unless it was done before. Returns its directory.

    `report` is called with the number of lines answered since the last call.

    Raises:
        OSError, ValueError: the model or the input cannot be read, or the directory cannot be written.
    """

    def write(directory: Path) -> None:
        answer = _translation(job.saved_model, job.language)
        with open(job.input, "rb") as file:
            file.seek(job.start)
            text = file.read(job.end - job.start)
        # Of the file's own, only one at its very start is none of the text.
        lines = read_lines(io.BytesIO(codecs.BOM_UTF8 * (job.start > 0) + text))
        with open_to_write(directory / _ANSWERS) as file:
            while batch := list(itertools.islice(lines, job.batch_lines)):
                answers = answer(batch)
                file.write("".join(f"{json.dumps(one)}\n" for one in answers).encode())
                report(len(batch))

    return make_once(job.output, write)


@functools.lru_cache(maxsize=1)
def _translation(saved_model: str, language: str | None) -> Answer:
    from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator

    translator = SavedTranslator(saved_model)
    return translation_of(lambda lines: translator.Translate(lines, language))


def answers_in(directories: Sequence[str]) -> Answer:
    """Gives the answers of answer_block to all lines of the file, in order."""

    def read() -> Iterator[tuple[str, str]]:
        for directory in directories:
            with open(Path(directory) / _ANSWERS, "rb") as file:
                yield from map(tuple, map(json.loads, file))

    answers = read()

    def answer(lines: list[Line]) -> list[tuple[str, str]]:
        return list(itertools.islice(answers, len(lines)))

    return answer
