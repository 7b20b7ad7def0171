"""The complete demo at its smallest: its files and its output."""

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import trainer_testing

from lingvo_moe.core.engine.pjrt import PjrtEngine
from tools import _cli, demo

_REPORTED = {
    **dict.fromkeys(("devices", "experts", "params", "steps", "languages", "all_to_all_ops"), int),
    **dict.fromkeys(("first_loss", "last_loss", "tokens_per_s", "seconds"), float),
    **dict.fromkeys(("dev_bleu", "dev_bleu_margin", "dev_chrf", "dev_chrf_margin"), float),
    "saved_model": str,
}


@pytest.mark.slow
def test_demo_leaves_a_scored_exported_model_and_its_report(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(_cli.subprocess, "run", trainer_testing.in_this_process)
    monkeypatch.setattr(PjrtEngine, "Once", trainer_testing.once_without_compiling)
    monkeypatch.setattr(demo, "_DEVICES", 8)  # as many as this process has for all tests
    flags = ["--model=mt.M4Tiny", "--languages=af,br,sw", "--max_steps=6", "--max_per_language=2"]
    more = "task.attention_dropout=0.0;input.vocab_sentences=2000"  # its masks take long to trace
    flags.append(f"--model_params_override={trainer_testing.OVERRIDE};{more}")
    assert demo.main([f"--output={tmp_path}", *flags]) == 0
    told = capfd.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert {k: type(report[k]) for k in _REPORTED} == _REPORTED
    assert (report["devices"], report["steps"], report["languages"]) == (8, 6, 3)
    assert report["experts"] % report["devices"] == 0
    assert report["all_to_all_ops"] == 8, "2 a pass of each MoE layer: forward, backward"
    assert report["last_loss"] < report["first_loss"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figure class='drawing'><svg") == 2  # loss, learning rate
    assert page.count("<figure class='drawing wide'><svg") == 2  # who is routed where
    assert "untrained" in page and "By language" in page and "on 6 of the lines" in page
    assert os.path.isfile(tmp_path / "saved_model" / "saved_model.pb")
    for part in ("BLEU", "±", "untrained", "reference", str(tmp_path / "saved_model")):
        assert part in told

    # A second run builds no corpus, and calls the trainer again, which resumes.
    def stop(*_, **__):
        raise ValueError("trained")

    monkeypatch.setattr(_cli.subprocess, "run", stop)
    assert demo.main([f"--output={tmp_path}", *flags]) == 1
    told = capfd.readouterr()
    assert "exists already" in told.out and "demo: ValueError: trained" in told.err
    # It trains only on the requested languages.
    other = [flag.replace("af,br,sw", "br,fr") for flag in flags]
    assert demo.main([f"--output={tmp_path}", *other]) == 1
    told = capfd.readouterr().err
    assert "holds a demo of other languages, af,br,sw; name another directory" in told


def test_examples_are_whole_sentences_of_several_languages():
    lines = {
        "de": ["Save", "The file could not be saved.", "Is it you?", "The page that you want is gone.", "Add 2 files."],
        "sw": ["Kenyan Shilling", "Monday, May 5"],  # none: the language is left out
        "fr": ["Are you sure that you want this?"],
    }  # fmt: skip
    report: Any = SimpleNamespace(
        languages={
            lang: SimpleNamespace(
                references=texts, hypotheses=[t.upper() for t in texts], train_pairs=len(texts)
            )
            for lang, texts in lines.items()
        }
    )
    assert demo._samples(report, 2) == [
        ("de", "THE PAGE THAT YOU WANT IS GONE.", "The page that you want is gone."),
        ("fr", "ARE YOU SURE THAT YOU WANT THIS?", "Are you sure that you want this?"),
    ]
    assert [lang for lang, *_ in demo._samples(report, 1)] == ["de"]


def test_other_languages_are_another_corpus(tmp_path, monkeypatch):
    """If nothing was trained on the existing one."""

    def stop(self):
        raise ValueError("far enough")

    monkeypatch.setattr(demo.Demo, "_train", stop)
    for languages in ("br", "br,sw", "sw,br"):
        assert demo.main([f"--output={tmp_path}", f"--languages={languages}"]) == 1
        there = sorted(p.name.split(".")[0] for p in (tmp_path / "corpus").glob("*.tsv.gz"))
        assert there == sorted(languages.split(","))
