"""python -m tools.export and tools.evaluate on a run: the exported model scores as the run does."""

import gzip
import json

import pytest
import toy_translation as toy

from tools import evaluate, export

_FLAGS = ["--beam_size=2", "--max_source_length=8", "--max_length=12"]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("run")
    toy.save_run(path, toy.train_vocab(toy.sentences(200), bytes_too=False), step=3)
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("corpus")
    (path / "dev").mkdir()
    for i, lang in enumerate(["de", "fi", "sw"]):
        (path / f"{lang}.tsv").write_text("red house\tgreen tree\n" * (10 - i))
        pairs = zip(toy.sentences(12, i, 4), toy.sentences(12, i + 9, 4))
        text = "".join(f"{a}\t{b}\n" for a, b in pairs)
        (path / "dev" / f"{lang}.tsv.gz").write_bytes(gzip.compress(text.encode()))
    return str(path)


def test_run_and_exported_model_score_the_same(logdir, corpus, tmp_path, capfd):
    common = [f"--data_dir={corpus}", "--batch_size=5"]
    assert evaluate.main([f"--logdir={logdir}", *common, *_FLAGS]) == 0
    table, err = capfd.readouterr()
    with open(f"{logdir}/eval/report.json") as file:
        of_run = json.load(file)
    assert of_run["model"]["step"] == 3
    assert list(of_run["languages"]) == ["de", "fi", "sw"]
    assert of_run["languages"]["fi"] | {"bleu": 0, "chrf": 0} == {
        "bleu": 0,
        "chrf": 0,
        "lines": 12,
        "train_pairs": 9,
        "group": "mid",
    }
    for text in ("de", "mean of 3", "BLEU", "nrefs:1", f"{logdir}/eval/report.json"):
        assert text in table.replace("\n", "")
    assert "evaluate: 36 of 36 lines" in err
    hypotheses = (tmp_path.__class__(logdir) / "eval/texts/sw.hyp").read_text()
    assert hypotheses.count("\n") == 12

    saved = tmp_path / "saved"
    assert export.main([f"--logdir={logdir}", f"--output={saved}", *_FLAGS]) == 0
    assert "mt.M4Tiny at step 3" in capfd.readouterr().out
    scores = tmp_path / "scores"
    flags = [
        f"--saved_model={saved}",
        f"--output={scores}",
        "--max_per_language=7",
        "--languages=sw",
    ]
    assert evaluate.main([*flags, *common, "--quiet"]) == 0
    assert capfd.readouterr().err == ""
    of_saved = json.loads((scores / "report.json").read_text())
    assert of_saved["languages"]["sw"]["lines"] == 7
    assert (scores / "texts/sw.hyp").read_text() == "".join(hypotheses.splitlines(True)[:7])


def test_unknown_language(logdir, corpus, capfd):
    assert evaluate.main([f"--logdir={logdir}", f"--data_dir={corpus}", "--languages=sv"]) == 1
    assert "no language 'sv' (known: de, fi, sw)" in capfd.readouterr().err
