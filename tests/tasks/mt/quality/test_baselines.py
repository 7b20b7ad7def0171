"""Deltas are differences on the same lines, in the order of figure 6; what cannot be compared is refused."""

import json

import numpy as np
import pytest

from lingvo_moe.tasks.mt.quality.baselines import (
    add_baselines,
    delta_curve,
    read_baselines,
    sliding_mean,
)
from lingvo_moe.tasks.mt.quality.scoring import EvalReport, evaluate

DATA = {
    lang: [(f"{lang} {i}", f"open the {word} and close all windows") for i in range(4)]
    for lang, word in (("de", "file"), ("fi", "tree"), ("sw", "house"))
}
PAIRS = {"de": 50, "fi": 10, "sw": 300}


def scored(says: str, languages=tuple(DATA)) -> EvalReport:
    data = {lang: DATA[lang] for lang in languages}
    return evaluate(lambda lines, _: [says] * len(lines), data.items(), PAIRS)


def write(report: EvalReport, file) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report.ToDict()))


def test_deltas_and_the_curve(tmp_path):
    report = scored("open the tree and close all windows")
    base = scored("open the house and close some windows")
    write(scored("open the house and close some windows", ["de"]), tmp_path / "de/eval/report.json")
    write(base, tmp_path / "sw.json")
    baselines = read_baselines(tmp_path, DATA.items())
    assert set(baselines) == {"de", "sw"}
    add_baselines(report, baselines)
    ours, theirs = ({k: r.scores["bleu"] for k, r in x.languages.items()} for x in (report, base))
    delta = {lang: ours[lang] - theirs[lang] for lang in DATA}
    assert report.languages["de"].delta["bleu"] == delta["de"] != 0
    mean = report.Average()
    assert mean["baselines"] == 2
    assert mean["delta_bleu"] == pytest.approx((delta["de"] + delta["sw"]) / 2)
    assert "delta_bleu" not in report.Average("low")  # fi
    found = json.loads(json.dumps(report.ToDict()))
    assert found["languages"]["sw"]["baseline"]["chrf"] == base.languages["sw"].scores["chrf"]
    assert "delta" not in found["languages"]["fi"]
    curve = delta_curve(found, window=2)
    assert curve["languages"] == ["sw", "de"]
    assert curve["smoothed"] == pytest.approx([mean["delta_bleu"], delta["de"]])
    assert delta_curve(scored("x").ToDict())["languages"] == []


def test_sliding_mean():
    values = list(np.random.default_rng(0).normal(size=25))
    inside = np.convolve(values, np.full(10, 0.1), "valid")
    np.testing.assert_allclose(sliding_mean(values, 10)[4:-5], inside)
    assert sliding_mean([1.0, 2.0, 6.0], 3) == [1.5, 3.0, 4.0]
    assert sliding_mean([1.0, 2.0], 10) == [1.5, 1.5] and sliding_mean([], 3) == []
    assert sliding_mean(values, 1) == values


def test_what_cannot_be_compared(tmp_path):
    of_de = {"de": DATA["de"]}
    with pytest.raises(ValueError, match="--baselines=/nowhere: no such directory"):
        read_baselines("/nowhere", of_de.items())
    with pytest.raises(ValueError, match=r"no scores of de; .* tools.evaluate --logdir=.*/de"):
        read_baselines(tmp_path, of_de.items())
    file = tmp_path / "de" / "report.json"
    other = {"de": [("de 0", "another reference")]}
    write(evaluate(lambda lines, _: lines, other.items()), file)
    with pytest.raises(ValueError, match=r"'de' was scored on other pairs \(1 of them, here 4\)"):
        read_baselines(tmp_path, of_de.items())
    good = scored("x", ["de"]).ToDict()
    good["signatures"]["bleu"] = "tok:char"
    file.write_text(json.dumps(good))
    baselines = read_baselines(tmp_path, of_de.items())
    with pytest.raises(ValueError, match="bleu was computed as tok:char, here as nrefs:1"):
        add_baselines(scored("open the file", ["de"]), baselines)
    for broken in ("{", "[]", '{"languages": {}}'):
        file.write_text(broken)
        with pytest.raises(ValueError, match=r"not a report of tools\.evaluate with scores of"):
            read_baselines(tmp_path, of_de.items())
