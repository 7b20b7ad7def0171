import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from made_up_languages import SIZES, write_corpus
from refusals import refuses

from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.text.batches.lengths import Lengths, measure
from lingvo_moe.tasks.text.batches.rows_of_pairs import MAX_WAITING
from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir


@pytest.fixture(scope="module")
def params(data_dir: Path, cache_dir: Path):
    return MtInput.Params().Set(
        data_dir=str(data_dir),
        cache_dir=str(cache_dir),
        source_vocab_size=400,
        target_vocab_size=300,
        batch_size=4,
        source_length=48,
        target_length=40,
    )


@pytest.fixture(scope="module")
def ready(params) -> MtInput:
    return params.Instantiate().Prepare()


def _same(a: NestedMap, b: NestedMap) -> bool:
    return all(np.array_equal(x, y) for x, y in a.Zip(b))


def _take(iterator, n: int) -> list[NestedMap]:
    return [next(iterator) for _ in range(n)]


def test_the_spec_is_what_comes_and_needs_no_data(params, ready):
    nowhere = params.Copy().Set(data_dir="/nowhere", cache_dir="/nowhere").Instantiate()
    spec, batch = nowhere.BatchSpec(), next(iter(ready))
    names = (
        "src.ids src.segment_ids src.segment_pos tgt.ids tgt.labels tgt.segment_ids tgt.segment_pos"
    )
    for tree in (spec, batch):
        assert [path for path, _ in tree.FlattenItems()] == names.split()
    for leaf, array in spec.Zip(batch):
        assert leaf.shape == array.shape
        assert leaf.dtype == array.dtype.name == "int32"
    assert spec.src.ids.shape == (4, 48)
    assert spec.tgt.labels.shape == (4, 40)


def test_batches_hold_pairs_of_the_corpus(ready, data_dir):
    corpus = {pair for lang in SIZES for pair in tsv.read_pairs(data_dir / f"{lang}.tsv.gz")}
    languages = set()
    for batch in _take(iter(ready), 10):
        for row in range(4):
            for segment in range(1, batch.src.segment_ids[row].max() + 1):
                source = batch.src.ids[row][batch.src.segment_ids[row] == segment]
                labels = batch.tgt.labels[row][batch.tgt.segment_ids[row] == segment]
                text = ready.vocabs.source.Decode(source.tolist())
                assert (text, ready.vocabs.target.Decode(labels.tolist())) in corpus
                languages.add(text[0])
    assert languages == {"a", "b", "c"}
    assert ready.languages == SIZES


@given(st.integers(0, 400), st.booleans())
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_resumes_exactly_wherever_it_stopped(ready, steps, again):
    whole = iter(ready)
    _take(whole, steps)
    state = json.loads(json.dumps(whole.GetState()))  # JSON can hold it
    expected = _take(whole, 6)
    resumed = iter(ready)
    if again:
        _take(resumed, 3)  # where the iterator stood before does not matter
    resumed.SetState(state)
    assert resumed.counts == state["counts"]
    assert all(map(_same, expected, _take(resumed, 6)))
    assert resumed.GetState() == whole.GetState()


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"pack": False, "task_ids": True},
        {"too_long": "truncate", "source_length": 12, "target_length": 9, "task_ids": True},
    ],
    ids=["packed", "one pair a row", "truncated"],
)
def shared(request: pytest.FixtureRequest, params) -> MtInput:
    return params.Copy().Set(batch_size=9, **request.param).Instantiate().Prepare()


class _Reads:
    """Counts the records that are read, by place."""

    def __init__(self, inputs: MtInput, monkeypatch: pytest.MonkeyPatch):
        read = inputs.records.Read
        self.places: list[tuple[int, int]] = []

        def counted(language: int, position: int) -> tuple[np.ndarray, np.ndarray]:
            self.places.append((language, position))
            return read(language, position)

        monkeypatch.setattr(inputs.records, "Read", counted)


def _joined(parts: list[NestedMap], owners: list[int]) -> NestedMap:
    """The batch whose row i is that of the part of its owner."""
    rows = [
        np.stack([a[owner][i] for i, owner in enumerate(owners)])
        for a in zip(*map(NestedMap.Flatten, parts))
    ]
    return parts[0].Pack(rows)


@given(st.integers(0, 60), st.lists(st.integers(0, 3), min_size=18, max_size=18))
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_rows_of_processes_are_those_of_one(shared, steps, owners):
    """Whoever owns the rows, and whoever goes on: the batches are those of one process."""
    whole = iter(shared)
    for of in (owners[:9], owners[9:]):
        state = whole.GetState()
        processes = [iter(shared) for _ in range(4)]
        for number, process in enumerate(processes):
            process.SetState(state)
            process.rows = [row for row, owner in enumerate(of) if owner == number]
        for _ in range(3 + steps):
            batch = next(whole)
            parts = [next(process) for process in processes]
            assert _same(batch, _joined(parts, of))
        assert all(process.GetState() == whole.GetState() for process in processes)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
def test_a_process_reads_its_own_rows_alone(shared, processes, monkeypatch):
    whole, reads = iter(shared), _Reads(shared, monkeypatch)
    batches = _take(whole, 4)
    everything, of_parts = reads.places.copy(), []
    owners = [row * processes // 9 for row in range(9)]
    iterators = [iter(shared) for _ in range(processes)]
    parts: list[list[NestedMap]] = []
    for number, iterator in enumerate(iterators):
        iterator.rows = [row for row, owner in enumerate(owners) if owner == number]
        reads.places.clear()
        parts.append(_take(iterator, 4))
        pairs = sum(
            int(batch.src.segment_ids[row].max()) for batch in batches for row in iterator.rows
        )
        assert len(reads.places) == pairs
        of_parts += reads.places
    assert sorted(of_parts) == sorted(everything)
    for batch, *own in zip(batches, *parts):
        assert _same(batch, _joined(own, owners))


class _Endless:
    """Records of 120 languages with 10^9 pairs each, computed and not stored."""

    languages = {f"{a}{b}": 10**9 for a in "abcdefghijkl" for b in "abcdefghij"}
    shards = {lang: [250_000] * 4000 for lang in languages}
    key, dropped = "endless", {}

    def Read(self, language: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(3 + position % 9, 5, np.uint16), np.full(2 + language % 9, 6, np.uint16)

    def Lengths(self, language: int) -> "_EndlessLengths":
        return _EndlessLengths(language)


class _EndlessLengths:
    def __init__(self, language: int):
        self._language = language

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        target = np.full(positions.shape, 2 + self._language % 9)
        return np.stack([3 + positions % 9, target], axis=1)


def test_state_and_memory_stay_small_whatever_the_corpus(params):
    wide = params.Copy().Set(batch_size=MAX_WAITING, temperature=1.0).Instantiate()
    wide._records = _Endless()
    wide._about = [(None,)] * len(_Endless.languages)
    tracemalloc.start()
    iterator = iter(wide)
    next(iterator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(iterator._waiting) == MAX_WAITING
    # As far into the data as years of training would be.
    state = iterator.GetState()
    state["order"]["before"] = [10**12] * 120
    state["order"]["block"] = 10**11
    iterator.SetState(state)
    next(iterator)
    assert len(json.dumps(iterator.GetState())) < 64 * 1024
    assert peak < 100 * 2**20


def test_a_state_of_other_data_is_refused(params, ready, tmp_path):
    iterator = iter(ready)
    assert not _same(next(iterator), next(iter(params.Copy().Set(seed=7).Instantiate())))
    state = iterator.GetState()
    data = write_corpus(tmp_path / "data", {"aa": 250, "bb": 50})
    for other in (params.Copy().Set(seed=9), params.Copy().Set(data_dir=str(data))):
        with pytest.raises(DataError, match="saved position of the input is of other data"):
            iter(other.Instantiate()).SetState(state)
    with pytest.raises(DataError, match="not a saved position"):
        iterator.SetState({"block": 3})


def test_long_pairs_are_dropped_or_truncated_and_counted(params):
    short = params.Copy().Set(source_length=12, target_length=8)
    dropping = iter(short.Instantiate())
    _take(dropping, 20)
    assert dropping.counts["too_long"] > 50
    truncating = iter(short.Copy().Set(too_long="truncate").Instantiate())
    batches = _take(truncating, 20)
    assert truncating.counts["too_long"] > 0
    assert truncating.counts["batches"] == 20
    assert max(batch.src.segment_pos.max() for batch in batches) == 11
    # A truncated sentence still ends with eos.
    assert all((batch.src.ids == 2).sum() == (batch.tgt.labels == 2).sum() for batch in batches)
    state = truncating.GetState()
    expected = next(truncating)
    truncating.SetState(state)
    assert _same(next(truncating), expected)


def test_rows_too_short_for_anything(params, ready, tmp_path, monkeypatch):
    monkeypatch.setattr("lingvo_moe.tasks.text.batches.packed_input._GIVE_UP_AFTER", 500)
    (tmp_path / "aa.tsv").write_text("six words are too many here\tsix words are too many here\n")
    for side, vocabulary in ready.vocabs.items():
        (tmp_path / f"{side}.model").write_bytes(vocabulary.model_bytes)
    places = {"data_dir": str(tmp_path), "vocab_dir": str(tmp_path)}
    tiny = params.Copy().Set(source_length=2, target_length=2, **places).Instantiate()
    lengths = r"input\.source_length=2, input\.target_length=2"
    with pytest.raises(DataError, match=f"none of 500 pairs fits into a row of {lengths};"):
        next(iter(tiny))


def test_skipped_lines_are_reported(params, tmp_path):
    data = write_corpus(tmp_path / "data", {"aa": 100})
    (data / "bb.tsv").write_bytes(b"fine\tfine too\nno tab\n\xff\tx\n\xe2\x96\x81\tempty\n")
    changed = {"data_dir": str(data), "source_vocab_size": 330, "target_length": 64}
    generator = params.Copy().Set(**changed).Instantiate()
    said: list[str] = []
    generator.Prepare(said.append)
    assert generator.dropped == {"no_tab": 1, "invalid_utf8": 1, "empty_after_tokenising": 1}
    assert generator.languages == {"aa": 100, "bb": 1}
    assert said[-1] == (
        "101 pairs of 2 languages, 3 skipped (1 no tab, 1 invalid utf8, 1 empty after tokenising)"
    )


@pytest.mark.parametrize("too_long, done", [("drop", "left out"), ("truncate", "truncated")])
def test_pairs_longer_than_a_row_are_counted(params, too_long, done):
    short = params.Copy().Set(source_length=12, target_length=16, too_long=too_long)
    inputs, said = short.Instantiate(), []
    inputs.Prepare(said.append)
    pairs = [
        inputs.records.Read(i, position)
        for i, count in enumerate(inputs.languages.values())
        for position in range(count)
    ]
    count = sum(len(source) >= 12 or len(target) >= 16 for source, target in pairs)
    assert 0 < count < len(pairs)
    share = f"{count / len(pairs):.1%}"
    assert said[-1].endswith(f"none skipped; {count:,} ({share}) are longer than a row and {done}")
    (warning,) = inputs.Warnings()
    assert warning.startswith(f"{share} of the pairs are longer than a row")
    long = params.Copy().Set(source_length=64, target_length=64).Instantiate().Prepare(said.append)
    assert said[-1].endswith("none skipped") and long.Warnings() == []


def test_a_new_run_that_leaves_out_nearly_all_pairs_is_refused(params):
    short = params.Copy().Set(source_length=3)
    message = (
        r"^\d+\.\d% of the pairs are longer than a row \(input\.source_length=3, .*"
        "--model_params_override='input.source_length=.*input.too_long=truncate"
    )
    with pytest.raises(DataError, match=message):
        short.Instantiate().Prepare().CheckNewRun()
    short.Copy().Set(too_long="truncate").Instantiate().Prepare().CheckNewRun()
    params.Copy().Set(source_length=64).Instantiate().Prepare().CheckNewRun()


def test_lengths_of_a_sample(ready):
    every, some = measure(ready.records), measure(ready.records, most=sum(SIZES.values()) // 2 + 1)
    assert not every.is_sample and some.is_sample and some.pairs == every.pairs
    for i, (lang, size) in enumerate(SIZES.items()):
        read = [ready.records.Read(i, position) for position in range(size)]
        needed = np.array([[len(side) + 1 for side in pair] for pair in read]).T
        assert np.array_equal(every.by_lang[lang], needed)
        assert np.array_equal(some.by_lang[lang], needed[:, ::2])


@given(
    st.lists(st.tuples(st.integers(2, 90), st.integers(2, 90)), min_size=1, max_size=200),
    st.sampled_from([(1, 1), (20, 30)]),
)
@settings(deadline=None)
def test_row_lengths_are_the_shortest_that_keep_the_share(pairs, least):
    lengths = Lengths({"aa": np.array(pairs, np.int32).T}, len(pairs))
    source, target = lengths.RowLengths(least, share=0.9)
    needed = -(-int(0.9 * 1000) * len(pairs) // 1000)  # pairs, rounded up

    def kept(source: int, target: int) -> int:
        return sum(s <= source and t <= target for s, t in pairs)

    assert kept(source, target) >= needed and source >= least[0] and target >= least[1]
    round_numbers = [8, 16, 24, 32, 40, 48, 56, 64, 80, 96]
    choices = [[low, *(n for n in round_numbers if n > low)] for low in least]
    best = min(s + t for s in choices[0] for t in choices[1] if kept(s, t) >= needed)
    assert source + target == best


def test_goes_on_with_the_vocabularies_of_the_run(params, tmp_path, monkeypatch):
    small = params.Copy().Set(cache_dir=str(tmp_path / "cache"), source_vocab_size=340)
    began = small.Instantiate().Prepare()
    vocabs = began.vocabs.Transform(lambda v: v.model_bytes)
    iterator = iter(began)
    next(iterator)
    state = iterator.GetState()
    expected = _take(iterator, 3)

    shutil.rmtree(tmp_path / "cache")
    trainer = "lingvo_moe.tasks.text.vocabulary.vocab_cache.train_vocabulary"
    monkeypatch.setattr(trainer, lambda *_: pytest.fail("trained a vocabulary"))
    resumed = iter(small.Instantiate().Prepare(artifacts=text_artifacts(vocabs)))
    resumed.SetState(state)
    assert all(map(_same, expected, _take(resumed, 3)))
    with pytest.raises(DataError, match=r"vocabulary of the run has 340 ids, but input\.source_"):
        params.Copy().Set(source_vocab_size=350).Instantiate().Prepare(
            artifacts=text_artifacts(vocabs)
        )


def test_vocabularies_of_another_run_come_with_what_it_knows_of_its_texts(
    params, ready, tmp_path, caplog
):
    vocabs = ready.vocabs.Transform(lambda v: v.model_bytes)
    run = TextRunDir(tmp_path / "run")
    run.Write("mt.M4Tiny", "", text_artifacts(vocabs, (), "zh", 2))
    shutil.copytree(run.path / "vocab", tmp_path / "vocab")
    pairs = list(tsv.read_pairs(Path(params.data_dir) / "aa.tsv.gz"))[:50]
    (tmp_path / "data").mkdir()
    lines = (f"{source[:2]}\u00ad{source[2:]}\t{target}\n" for source, target in pairs)
    (tmp_path / "data" / "de.tsv").write_text("".join(lines))

    def prepare(vocab_dir: Path, artifacts: RunArtifacts | None = None) -> MtInput:
        places = {"data_dir": str(tmp_path / "data"), "vocab_dir": str(vocab_dir)}
        return params.Copy().Set(**places).Instantiate().Prepare(artifacts=artifacts)

    def sources(inputs: MtInput) -> list[list[int]]:
        return [inputs.records.Read(0, i)[0].tolist() for i in range(len(pairs))]

    tidy = [ready.vocabs.source.Encode(source) for source, _ in pairs]
    assert sources(prepare(tmp_path / "vocab")) != tidy  # it says nothing of texts
    caplog.clear()
    inputs = prepare(run.path / "vocab")
    assert sources(inputs) == tidy and not caplog.records
    assert inputs.Artifacts() == text_artifacts(vocabs, ["de"], "zh", 2)
    assert sources(prepare(run.path / "vocab", inputs.Artifacts())) == tidy
    untidy = text_artifacts(vocabs, ["de"])
    assert sources(prepare(run.path / "vocab", untidy)) != tidy  # a run that began without
    with pytest.raises(DataError, match=r"run/vocab/source\.model has 400 ids, but input\.source_"):
        params.Copy().Set(
            source_vocab_size=350, vocab_dir=str(run.path / "vocab")
        ).Instantiate().Prepare()


def test_a_cache_that_cannot_be_made(params, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(DataError, match=r"below.* cannot be used: .*; set input\.cache_dir, or"):
        params.Copy().Set(cache_dir="").Instantiate().Prepare()


@refuses(ValueError,
    ({"data_dir": ""}, "--data_dir is needed to train"),
    ({"languages": "aa,bb"}, r"languages='aa,bb': must be a list of strings, e.g. \['aa', 'bb'\]"),
    ({"vocab_sentences": 9}, "vocab_sentences=9: must be an integer of at least 100"),
    ({"target_vocab_size": 64_000},
     r"input\.target_vocab_size=64000 is more than this data can fill: at most (\d+) .*"
     r"='input\.target_vocab_size=\1;task\.target_vocab_size=\1'"),
    ({"too_long": "cut"}, "too_long='cut': must be one of"),
)  # fmt: skip
def test_errors_teach(values, params):
    params.Copy().Set(**values).Instantiate().Prepare()
