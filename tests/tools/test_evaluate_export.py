"""python -m tools.export and tools.evaluate: the exported model has the run's scores."""

import gzip
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import toy_translation as toy

from lingvo_moe.core.files.store import open_store
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.saved_steps import LIST
from lingvo_moe.tasks.text.data.file_list import PREPARED_LIST
from lingvo_moe.tasks.text.data.prepared import target_language
from tools import _models, evaluate, export

pytestmark = pytest.mark.slow

_FLAGS = ["--beam_size=2", "--max_source_length=8", "--max_length=12"]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("run")
    vocab = toy.train_vocab(toy.sentences(200), bytes_too=False)
    toy.save_run(path, vocab, step=3, more=toy.SMALL)
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


@pytest.fixture(scope="module")
def scored(logdir, corpus) -> Path:
    """The directory of an evaluation of the run."""
    flags = [f"--data_dir={corpus}", "--batch_size=5", "--quiet", *_FLAGS]
    assert evaluate.main([f"--logdir={logdir}", *flags]) == 0
    return Path(logdir) / "eval"


def test_run_and_exported_model_score_the_same(logdir, scored, corpus, tmp_path, capfd):
    common = [f"--data_dir={corpus}", "--batch_size=5"]
    assert evaluate.main([f"--logdir={logdir}", common[0], "--rescore"]) == 0
    table, err = capfd.readouterr()
    with open(f"{logdir}/eval/report.json") as file:
        of_run = json.load(file)
    assert of_run["model"]["step"] == 3
    assert list(of_run["languages"]) == ["de", "fi", "sw"]
    about = {"lines": 12, "few_lines": True, "train_pairs": 9, "group": "mid"}
    assert of_run["languages"]["fi"].items() >= about.items()
    for text in ("de", "12*", "±", "all    3 ", "BLEU", "nrefs:1", f"{logdir}/eval/report.json"):
        assert text in table.replace("\n", "")
    assert "evaluate: 36 of 36 lines" in err
    hypotheses = (scored / "texts/sw.hyp").read_text()
    assert hypotheses.count("\n") == 12

    saved = tmp_path / "saved"
    assert export.main([f"--logdir={logdir}", f"--output={saved}", *_FLAGS]) == 0
    assert "mt.M4Tiny at step 3" in capfd.readouterr().out
    scores = tmp_path / "scores"
    flags = [f"--saved_model={saved}", f"--output={scores}", "--languages=sw", "--quiet"]
    assert evaluate.main([*flags, *common, "--max_per_language=7"]) == 0
    assert capfd.readouterr().err == ""
    of_saved = json.loads((scores / "report.json").read_text())
    assert of_saved["languages"]["sw"]["lines"] == 7
    assert (scores / "texts/sw.hyp").read_text() == "".join(hypotheses.splitlines(True)[:7])


class _Shouts:
    """Replaces the translator: capitals, and Ctrl-C in call number `stop_at`, counted from Calls."""

    stop_at = 0

    def __init__(self, monkeypatch, **about):
        self._calls = []
        monkeypatch.setattr(_models, "open_translator", lambda args: (self, {"step": 3, **about}))

    def Calls(self):
        """The lines of each call since this was last asked."""
        calls, self._calls = self._calls, []
        return calls

    def Translate(self, lines, langs):
        self._calls.append(len(lines))
        if len(self._calls) == self.stop_at:
            raise KeyboardInterrupt
        return NestedMap(translations=[[line.upper()] for line in lines])


def test_stopped_it_goes_on_where_it_was(logdir, corpus, tmp_path, capfd, monkeypatch):
    output = tmp_path / "scores"
    flags = [f"--logdir={logdir}", f"--data_dir={corpus}", f"--output={output}", "--batch_size=5"]
    shouts = _Shouts(monkeypatch)
    shouts.stop_at = 4
    assert evaluate.main(flags) == 130
    assert "evaluate: stopped; the same command resumes from there" in capfd.readouterr().err
    assert len(list((output / ".partial").iterdir())) == 3 and not (output / "texts").exists()
    shouts.Calls()
    shouts.stop_at = 2
    assert evaluate.main([*flags, "--beam_size=1"]) == 130  # meets nothing of the other
    assert shouts.Calls() == [5, 5]
    shouts.stop_at = 0
    capfd.readouterr()
    assert evaluate.main(flags) == 0
    assert shouts.Calls() == [5, 5, 5, 5, 1]
    err = capfd.readouterr().err
    assert re.search(r"evaluate: 5 of 36 lines, 5 of them translated before, \w+s left\n", err)
    assert "evaluate: 36 of 36 lines, 15 of them translated before\n" in err
    assert not (output / ".partial").exists()
    sources = "".join((output / f"texts/{lang}.src").read_text() for lang in ("de", "fi", "sw"))
    assert (output / "comet/hyp.txt").read_text() == sources.upper()
    assert json.loads((output / "report.json").read_text())["seconds"] > 0


@pytest.mark.parametrize("rewritten", ["shortlist", "checkpoint", "checkpoint in a bucket"])
def test_what_another_file_of_that_name_made_is_not_reused(
    rewritten, corpus, tmp_path, monkeypatch
):
    shortlist = tmp_path / "shortlist.npz"
    shortlist.write_bytes(b"read by nobody here")
    logdir = "memory://run" if "bucket" in rewritten else str(tmp_path / "run")
    of_step = open_store(f"{logdir}/checkpoints/3")
    of_step.Write(LIST, b"read by nobody here")
    flags = [f"--logdir={logdir}", f"--data_dir={corpus}", f"--output={tmp_path / 'scores'}"]
    flags += ["--batch_size=5", f"--shortlist={shortlist}"]
    shouts = _Shouts(monkeypatch)
    shouts.stop_at = 3
    assert evaluate.main(flags) == 130
    assert shouts.Calls() == [5, 5, 5]
    shouts.stop_at = 1
    assert evaluate.main([*flags, "--quiet"]) == 130  # the same translator: goes on
    assert shouts.Calls() == [5]
    if rewritten == "shortlist":
        os.utime(shortlist, ns=(0, shortlist.stat().st_mtime_ns + 1))
    else:
        of_step.Write(LIST, b"of other files")
    shouts.stop_at = 0
    assert evaluate.main(flags) == 0
    assert sum(shouts.Calls()) == 36


def test_another_systems_translations_are_scored(logdir, corpus, tmp_path, capfd, monkeypatch):
    _Shouts(monkeypatch, target_language="en")
    flags = [f"--logdir={logdir}", f"--data_dir={corpus}", f"--output={tmp_path}"]
    assert evaluate.main(flags) == 0
    shutil.copy(tmp_path / "texts/fi.ref", tmp_path / "texts/fi.hyp")
    for _ in range(2):  # the second time, the list is of the other system's
        assert evaluate.main([*flags, "--rescore"]) == 0
        found = json.loads((tmp_path / "report.json").read_text())
        assert found["languages"]["fi"]["bleu"] == pytest.approx(100)
        assert found["languages"]["de"]["bleu"] < 50
        assert found["model"] == {"texts": "other translations of fi", "target_language": "en"}
    told = f"evaluate: fi.hyp in {tmp_path}/texts: not as written there"
    assert capfd.readouterr().err.count(told) == 1


def test_bleu_is_of_the_target_language(logdir, corpus, tmp_path, capfd, monkeypatch):
    """The run's, or the data's, stands in the signature; --bleu_tokenizer chooses another."""
    flags = [f"--logdir={logdir}", f"--data_dir={corpus}", f"--output={tmp_path / 'scores'}"]
    _Shouts(monkeypatch, target_language="zh")
    for more, tokenizer in (([], "zh"), (["--bleu_tokenizer=intl"], "intl")):
        assert evaluate.main([*flags, *more]) == 0
        report = json.loads((tmp_path / "scores/report.json").read_text())
        assert f"|tok:{tokenizer}|" in report["signatures"]["bleu"]
        assert report["signatures"]["bleu"] in capfd.readouterr().out
    data = tmp_path / "data"
    shutil.copytree(Path(corpus) / "dev", data / "dev")
    (data / PREPARED_LIST.summary).write_text(
        '{"format": 2, "languages": {}, "target_language": "th"}'
    )
    PREPARED_LIST.Write(data)
    assert target_language(data) == "th" and target_language(corpus) == ""
