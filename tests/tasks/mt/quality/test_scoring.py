"""Scores equal sacreBLEU's, groups follow from the data, and no line is lost."""

import json

import numpy as np
import pytest
import sacrebleu

from lingvo_moe.tasks.mt.quality import scoring
from lingvo_moe.tasks.mt.quality.scoring import EvalOptions, evaluate
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.file_list import PREPARED_LIST
from lingvo_moe.tasks.text.data.prepared import FORMAT
from lingvo_moe.tasks.text.data.resource_groups import GROUPS, resource_groups

_WORDS = ["open", "the", "file", "close", "all", "windows", "and", "save", "your", "work", "now"]


def devset(languages: int = 7, lines: int = 30) -> dict[str, list[tuple[str, str]]]:
    rng = np.random.default_rng(0)

    def sentence() -> str:
        return " ".join(rng.choice(_WORDS, rng.integers(3, 12)))

    return {
        f"l{chr(97 + i)}": [(f"src {j}", sentence()) for j in range(lines)]
        for i in range(languages)
    }


def test_equals_sacrebleu():
    data = {lang: [(f"{lang} {s}", r) for s, r in pairs] for lang, pairs in devset(3).items()}
    reference = {s: r for pairs in data.values() for s, r in pairs}
    batches = []

    def translate(lines, languages):
        batches.append(len(lines))
        assert languages == [line.split()[0] for line in lines]
        return [reference[s].replace("file", "document") for s in lines]

    report = evaluate(translate, data.items(), None, EvalOptions(batch_lines=40))
    assert batches == [40, 40, 10]
    for name, pairs in data.items():
        references = [r for _, r in pairs]
        hypotheses = [r.replace("file", "document") for r in references]
        got = report.languages[name]
        assert got.hypotheses == hypotheses
        assert got.scores == {
            "bleu": sacrebleu.corpus_bleu(hypotheses, [references]).score,
            "chrf": sacrebleu.corpus_chrf(hypotheses, [references]).score,
        }
        assert 20 < got.scores["bleu"] < 100
    assert report.Average()["bleu"] == pytest.approx(
        sum(r.scores["bleu"] for r in report.languages.values()) / 3
    )
    assert report.signatures["bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert "chrF" in report.signatures["chrf"] or "nc:6" in report.signatures["chrf"]


def test_groups_are_thirds_by_training_pairs():
    data = devset(7)
    pairs = {"la": 10, "lb": 70, "lc": 30, "ld": 40, "le": 50, "lf": 60, "lg": 20}
    report = evaluate(lambda lines, _: ["open the file"] * len(lines), data.items(), pairs)
    groups = {g: {k for k, r in report.languages.items() if r.group == g} for g in GROUPS}
    assert groups == {"high": {"lb", "lf", "le"}, "mid": {"ld", "lc"}, "low": {"lg", "la"}}
    found = json.loads(json.dumps(report.ToDict()))
    assert found["groups"]["mid"]["min_train_pairs"] == 30
    assert found["groups"]["high"]["languages"] == 3
    assert found["languages"]["la"]["lines"] == 30
    assert resource_groups({}) == {}
    bounded = resource_groups({"a": 100, "b": 99, "c": 10, "d": 9}, (100, 10))
    assert bounded == {"a": "high", "b": "mid", "c": "mid", "d": "low"}
    assert resource_groups({"x": 5}) == {"x": "high"}
    assert resource_groups(dict.fromkeys("abc", 1)) == {"a": "high", "b": "mid", "c": "low"}


def test_progress_and_what_goes_wrong():
    data = devset(1, 5)
    notes = []
    evaluate(
        lambda lines, _: lines, data.items(), None, EvalOptions(2), lambda *note: notes.append(note)
    )
    assert notes == [(2, 5), (4, 5), (5, 5)]
    with pytest.raises(ValueError, match="no language"):
        evaluate(lambda lines, _: lines, [])
    with pytest.raises(ValueError, match="1 translations of 5 lines"):
        evaluate(lambda lines, _: lines[:1], data.items())


def test_count_train_pairs(tmp_path):
    (tmp_path / "de.tsv").write_text("a\tb\nc\td\nbad\n")
    assert scoring.count_train_pairs(tmp_path, ["de", "fr"]) == {"de": 2, "fr": 0}
    about = {"de": {"bytes": (tmp_path / "de.tsv").stat().st_size, "pairs": 7, "digest": ""}}
    (tmp_path / PREPARED_LIST.summary).write_text(
        json.dumps({"format": FORMAT, "languages": about})
    )
    PREPARED_LIST.Write(tmp_path)
    assert scoring.count_train_pairs(tmp_path, ["de", "fr"]) == {"de": 7, "fr": 0}
    (tmp_path / "empty" / "de.tsv").mkdir(parents=True)
    assert scoring.count_train_pairs(tmp_path / "empty", ["de"]) is None
    for name in ("fr.tsv", "fr.tsv.gz"):
        (tmp_path / "empty" / name).touch()
    with pytest.raises(DataError, match=r"both fr\.tsv and fr\.tsv\.gz"):
        scoring.count_train_pairs(tmp_path / "empty", ["fr"])


def test_texts_are_scored_again_and_comet_has_them_all(tmp_path):
    data = {"de": [("eins\u2028zwei", "one two"), (" drei\r", "three")], "fi": [("yksi", "one")]}
    report = evaluate(lambda lines, _: [line.upper() for line in lines], data.items())
    report.Write(tmp_path)
    again = scoring.read_translations(tmp_path / "texts", data.items())
    assert again == (["EINS ZWEI", " DREI", "YKSI"], [])
    with pytest.raises(ValueError, match="does not have the 1 requested sources"):
        scoring.read_translations(tmp_path / "texts", {"de": [("drei", "three")]}.items())
    with pytest.raises(ValueError, match=r"sw.src: missing; translate first"):
        scoring.read_translations(tmp_path / "texts", {"sw": []}.items())
    # Another system's, with the ends of lines of another one.
    (tmp_path / "texts/de.hyp").write_bytes("\ufeffone two\r\nthree".encode())
    again = scoring.read_translations(tmp_path / "texts", data.items())
    assert again == (["one two", "three", "YKSI"], ["de"])
    for wrong, message in ((b"one\n", "has 1 lines for the 2"), (b"\xff\n\n", "is not UTF-8")):
        (tmp_path / "texts/de.hyp").write_bytes(wrong)
        with pytest.raises(ValueError, match=rf"de\.hyp:? .*{message}"):
            scoring.read_translations(tmp_path / "texts", data.items())
    found = {p.name: p.read_text().splitlines() for p in (tmp_path / "comet").iterdir()}
    assert found == {
        "src.txt": ["eins zwei", " drei", "yksi"],
        "ref.txt": ["one two", "three", "one"],
        "hyp.txt": ["EINS ZWEI", " DREI", "YKSI"],
        "lang.txt": ["de", "de", "fi"],
    }
