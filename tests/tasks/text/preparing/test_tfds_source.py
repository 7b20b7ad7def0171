"""Reads the real TensorFlow Datasets; nothing is downloaded."""

import sys
import tempfile
from collections.abc import Iterator

import pytest

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.preparing import tfds_source
from lingvo_moe.tasks.text.preparing.formats import read_source
from lingvo_moe.tasks.text.preparing.lines import Fields, Source, pairs_of_item

PAIRS = {"de": ["Haus", "Bäume"], "sw": ["nyumba", "miti"], "en": ["house", "trees"]}


def _read(name: str, **fields: str) -> list[tuple]:
    lines = read_source(Source("tfds", name, None), Fields(**fields))
    return sorted((line.lang, line.source, line.target, line.reason) for line in lines)


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Directories for TFDS; none of its temporary files may stay."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path_factory.mktemp("tfds")))
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    assert not list(temporary.iterdir())


def test_a_folder_of_translations(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for lang, lines in PAIRS.items():
        (folder / f"{lang}.train.txt").write_text("\n".join(lines) + "\n")
    expected = [
        (lang, source, target, "")
        for lang in ("de", "sw")
        for source, target in sorted(zip(PAIRS[lang], PAIRS["en"]))
    ]
    assert _read(f"TranslateFolder:{folder}") == expected
    assert {line[0] for line in _read(f"TranslateFolder:{folder}", target_lang="sw")} == {
        "de",
        "en",
    }
    with pytest.raises(DataError, match=r"no translations into 'fr' .* only of \['de', 'en',"):
        _read(f"TranslateFolder:{folder}", target_lang="fr")


def test_lines_that_tfds_would_mix_up(tmp_path):
    """A line separator in the first German line and in the third English one: of both TFDS makes four lines."""
    (tmp_path / "de.train.txt").write_text("eins\u2028eins\nzwei\ndrei\n")
    (tmp_path / "en.train.txt").write_text("one\ntwo\nthree\u2028three\n")
    with pytest.raises(DataError, match=r"de.train.txt has 3 lines, but TensorFlow Datasets makes"):
        _read(f"TranslateFolder:{tmp_path}")


def test_bytes_that_are_no_text_are_counted():
    (item,) = tfds_source._texts({"de": b"B\xe4ume", "en": b"trees"})
    (line,) = pairs_of_item(7, {"translation": item}, None, Fields())
    assert line == (7, "de", "", "", "invalid_utf8")


def test_a_registered_builder():
    import tensorflow_datasets as tfds

    class MadeUpPairs(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"translation": tfds.features.Translation(["de", "en"])}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i, (source, target) in enumerate(zip(PAIRS["de"], PAIRS["en"])):
                yield i, {"translation": {"de": source, "en": target}}

    assert _read("made_up_pairs") == [("de", "Bäume", "trees", ""), ("de", "Haus", "house", "")]
    with pytest.raises(DataError, match=r"no such builder .did you mean 'made_up_pairs'"):
        _read("made_up_pair")
    with pytest.raises(DataError, match=r"mnist: no translations into 'en' .*no data set of trans"):
        _read("mnist")


def test_without_tfds_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(DataError, match=r"needs TensorFlow Datasets.*pip install"):
        _read("opus/medical")
