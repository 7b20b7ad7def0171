"""Four times the data take no more memory, in any stage of tools.prepare and in reading its output."""

import multiprocessing
import random
import tracemalloc
from pathlib import Path

import pytest

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.batches.records import Records, write_contents
from lingvo_moe.tasks.text.data import shards
from lingvo_moe.tasks.text.preparing import dedup, language_stage, read_stage, token_stages
from lingvo_moe.tasks.text.preparing.filters import Rules
from lingvo_moe.tasks.text.preparing.lines import Fields, Source
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary, train_vocabulary


@pytest.fixture(scope="module")
def vocabs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vocab")
    texts = ["one two three four", *(f"{i} mal" for i in range(500))]
    model = train_vocabulary(texts, 285, "size", "identity")
    for side in ("source", "target"):
        (directory / f"{side}.model").write_bytes(model)
    return directory


def _prepare(lines: int, place: Path, vocabs: Path) -> dict[str, int]:
    """Returns the peak memory of each stage in bytes."""
    place.mkdir()
    rng = random.Random(0)
    with open(place / "de.tsv", "w") as file:
        for i in range(lines):
            text = " ".join(rng.choice(["one", "two", "three", "four"]) for _ in range(8))
            file.write(f"{i % (lines // 2)} mal {text}\t{text}\n")
    source = Source("tsv", str(place / "de.tsv"), "de")
    share = 50 / lines  # of the sentences; more of them are drawn from than stay
    stages = {
        "read": lambda: read_stage.read_stage(
            read_stage.ReadJob(source, Fields(), Rules(), share, None, f"{place}/read"), _quiet
        ),
        "language": lambda: language_stage.language_stage(
            language_stage.LanguageJob(
                "de", (f"{place}/read",), None, Fields(), 10, lines, f"{place}/de"
            ),
            _quiet,
        ),
        "records": lambda: token_stages.records_stage(
            token_stages.RecordsJob(
                "de", f"{place}/de", 0, lines, str(vocabs), 100, f"{place}/records"
            ),
            _quiet,
        ),
        "draw": lambda: _draw(place / "records", vocabs),
    }
    peaks = {}
    for name, run in stages.items():
        tracemalloc.start()
        run()
        peaks[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peaks


def _draw(directory: Path, vocabs: Path) -> None:
    entry = token_stages.shards_of([str(directory)])
    both = Vocabulary.Load(vocabs / "source.model")
    write_contents(directory, "key", NestedMap(source=both, target=both), {"de": entry})
    records = Records(directory, "key")
    for position in range(0, records.languages["de"], 37):
        records.Read(0, position)


def _quiet(n: int) -> None:
    del n


def _peaks(directory: Path, vocabs: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Peak memory with 2,000 lines and with 8,000."""
    # What is held at once, scaled down as the data are.
    dedup.HASHES_AT_ONCE = dedup._READ_AT_ONCE = 500
    read_stage._WRITTEN_AT_ONCE = language_stage._WRITTEN_AT_ONCE = 100
    shards._TOKENISED_AT_ONCE = 100
    _prepare(500, directory / "first", vocabs)  # what is imported and cached once
    return _prepare(2000, directory / "small", vocabs), _prepare(8000, directory / "large", vocabs)


def test_memory_does_not_grow_with_the_data(tmp_path, vocabs):
    # In a process of its own: tracemalloc also counts what threads of other tests allocate.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        small, large = pool.apply(_peaks, (tmp_path, vocabs))
    for stage, peak in large.items():
        # The text alone of the lines added is 450 KB.
        assert peak < small[stage] + 150_000, (stage, small, large)
