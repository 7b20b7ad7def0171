import gzip
from pathlib import Path

import pytest

from lingvo_moe.tasks.mt.input.vocab_cache import load_vocabularies
from tools import build_corpus, train_vocab


def test_a_corpus_and_its_vocabularies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, vocab = tmp_path / "corpus", tmp_path / "vocab"
    build = [
        f"--output={corpus}",
        "--languages=de,sw",
        "--packages=Babel",
        "--max_per_language=400",
    ]
    assert build_corpus.main(build) == 0
    assert "2 languages, 800 pairs" in capsys.readouterr().out
    with gzip.open(corpus / "sw.tsv.gz", "rt", encoding="utf-8") as file:
        assert len(file.readlines()) == 400

    train = [f"--data_dir={corpus}", f"--output={vocab}", "--source_size=700", "--target_size=500"]
    assert train_vocab.main(train) == 0
    assert "training the source vocabulary of 700 pieces" in capsys.readouterr().out
    vocabularies = load_vocabularies(vocab)
    assert (vocabularies.source.size, vocabularies.target.size) == (700, 500)
