"""The page of a run shows its files, names missing ones, loads nothing, and escapes all text."""

import json
import re
import shutil
from pathlib import Path

import pytest
import toy_translation as toy
from html_page import Page

from lingvo_moe.tasks.mt.quality import intervals
from lingvo_moe.tasks.mt.quality.scoring import evaluate
from lingvo_moe.tasks.mt.reports import report_page, run_report, samples
from lingvo_moe.tasks.mt.reports.run_report import Missing

_DATA = {
    "de": [(f"Quelle <{i}>", f"reference number {i} & more words") for i in range(5)],
    "ar": [(f"مصدر {i}", f"another reference that is long {i}") for i in range(5)],
}
_NO_ROUTING = Missing("the model was not run", "python -m tools.report")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run"
    toy.save_run(path, toy.train_vocab(toy.sentences(50), bytes_too=False))
    return path


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def _add_metrics(run: Path) -> None:
    rows = [
        {"step": s, "loss": 9.0 / s, "nll": None if s == 2 else 8.0 / s, "learning_rate": 0.1 * s}
        for s in range(1, 5)
    ]
    (run / "train").mkdir()
    (run / "train/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _add_scores(run: Path, delta: bool, ema: float = 0.0, data: dict = _DATA) -> None:
    found = evaluate(
        lambda lines, _: [f"reference <b> {line[-2]}" for line in lines],
        data.items(),
        {"de": 7000, "ar": 20},
    )
    if delta:
        found.languages["ar"].baseline = {"bleu": 1.0, "chrf": 3.0}
    weights = {"ema": ema} if ema else {"averaged_steps": [5, 7]}
    found.info = {"model": {"logdir": str(run), "step": 7, **weights}}
    found.Write(run / "eval")


def test_an_empty_run_says_what_is_missing(run):
    found = run_report.gather(run, _NO_ROUTING)
    page = report_page.html_report(found)
    text = Page(page).text
    assert text.count("Not shown") == 5
    for command in ("lingvo_moe.trainer --model=mt.M4Tiny", "tools.evaluate", "tools.report"):
        assert f"python -m {command}" in text
    assert found.ToDict()["scores"] is None and found.ToDict()["routing"] is None
    assert "task.num_experts : 8" in text  # all parameters


def test_a_page_with_everything(run):
    _add_metrics(run)
    _add_scores(run, delta=True)
    found = run_report.gather(run, _NO_ROUTING, number=2)
    page = report_page.html_report(found)
    text = Page(page).text
    assert found.steps == 7  # of its checkpoint; metrics are up to step 4
    bleu = found.scores["average"]["bleu"]
    assert 0 < bleu < 50 and f"width='{bleu:.3f}%'" in page  # bars are shares of 100
    assert text.count("Not shown") == 1  # routing
    assert page.count("<svg xmlns:xlink") == 3  # loss, learning rate, deltas
    assert "Quelle &lt;" in page and "reference &lt;b&gt;" in page and "<b> " not in page
    assert "lang='ar'" in page and "dir='auto'" in page
    assert "</i>Arabic, ar</td>" in page and "German, de, chrF" in text
    assert re.findall("href='#(.*?)'", page) == re.findall("<h2 id='(.*?)'>", page)
    mean = found.scores["average"]
    assert f"{mean['delta_bleu']:+.1f}" in text and "over 1 bilingual models" in text
    assert "the mean of steps 5, 7, 10 lines of 2 languages" in text
    assert "var(--first)" in page and "#35508f" in page  # drawn in the page's colours
    assert page.count("#35508f") == 1
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    # The same run, the same page.
    assert report_page.html_report(run_report.gather(run, _NO_ROUTING, number=2)) == page


def test_scores_have_margins_and_few_lines_are_marked(run):
    many = [(f"source {i}", f"reference <b> {i % 7}") for i in range(intervals.ENOUGH_LINES)]
    _add_scores(run, delta=False, data={"de": _DATA["de"], "ar": many})
    found = run_report.gather(run, _NO_ROUTING)
    page = report_page.html_report(found)
    text = Page(page).text
    german, arabic = found.scores["languages"]["de"], found.scores["languages"]["ar"]
    assert german["few_lines"] and not arabic["few_lines"]
    row = page[page.index("</i>mid<") :].partition("</tr>")[0]
    assert "<td class=n>50</td>" in row and "few" not in row
    row = page[page.index("</i>Arabic, ar") :].partition("</tr>")[0]
    assert f">{arabic['chrf']:.1f} ± {arabic['chrf_margin']:.1f}<" in row
    assert "<td class=n>50</td>" in row and "few" not in row and "var(--third)" in row
    row = page[page.index("</i>German, de") :].partition("</tr>")[0]
    assert "<td class=n>5*</td>" in row and "class='b few'" in row and "var(--first)" in row
    assert f"± {found.scores['average']['bleu_margin']:.1f}, mean of 2 languages" in text
    assert intervals.footnote() in text
    # A report of an older version has no margins.
    for one in (*found.scores["languages"].values(), found.scores["average"]):
        del one["bleu_margin"], one["chrf_margin"]
    assert f">{arabic['chrf']:.1f}<" in report_page.html_report(found)


def test_scores_alone(run, caplog):
    _add_scores(run, delta=False, ema=0.9)
    (run / "eval/texts/ar.hyp").unlink()
    found = run_report.gather(run, _NO_ROUTING)
    scored = dict(found.settings)["scored"]
    assert scored.startswith("step 7, the moving average of the weights, 10 lines of 2 languages")
    text = Page(report_page.html_report(found)).text
    assert "ar.hyp is missing" in caplog.text
    assert "ar.hyp is missing" in text and "no bilingual models were scored" in text
    assert "By language" in text
    (run / "eval/report.json").write_text("{}")
    with pytest.raises(ValueError, match=r"report\.json was changed or damaged .*tools\.evaluate"):
        run_report.gather(run, _NO_ROUTING)
    (run / "eval/report.sha256").unlink()
    with pytest.raises(ValueError, match=r"report\.json: not a report of tools\.evaluate"):
        run_report.gather(run, _NO_ROUTING)


def test_samples_are_chosen(tmp_path):
    texts = {
        "de": [
            ("s1", "one two three", "one two three"),
            ("a longer source", "one two three four", "one two three four"),
            ("s3", "one two three", "something else entirely"),
            ("same same same", "same same same", "same same same"),
            ("s5", "ja", "ja"),
        ],
        "fi": [("t1", "five six seven", "five six eight"), ("t2", "a b c d", "x y z w")],
    }
    chosen = samples.choose(texts, 2, seed=3)
    assert [(s.language, s.source) for s in chosen["best"]] == [
        ("de", "a longer source"),
        ("fi", "t1"),
    ]
    assert [(s.language, s.source) for s in chosen["worst"]] == [("fi", "t2"), ("de", "s3")]
    assert chosen == samples.choose(texts, 2, seed=3)
    assert {s.language for s in chosen["random"]} == {"de", "fi"}
    only = {"de": [("ja", "ja", "nein")]}
    assert samples.choose(only)["best"][0].translation == "nein"
    for suffix, text in (("src", "a\u2028b\nc\n"), ("ref", "r\ns\n"), ("hyp", "x\n\n")):
        (tmp_path / f"de.{suffix}").write_text(text)
    assert samples.read_texts(tmp_path, ["de"]) == {"de": [("a\u2028b", "r", "x"), ("c", "s", "")]}
    (tmp_path / "de.hyp").write_text("x\n")
    with pytest.raises(ValueError, match="not the same lines"):
        samples.read_texts(tmp_path, ["de"])
