"""python -m tools.score: numbers that add up; test_odd_lines.py has lines in odd shapes."""

import io
import math
import re
import sys

import pytest
import toy_text
import toy_translation as toy

from lingvo_moe.core.runs.run_description import RunDirError
from lingvo_moe.params.mt.demo import M4Tiny
from lingvo_moe.tasks.mt.quality.intervals import ENOUGH_LINES
from lingvo_moe.tasks.text.quality.forced_decoding import ScoreOptions, Scorer
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from tools import score


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    toy.save_run(path, toy.train_vocab(toy.sentences(200)), more=toy.SMALL)
    return Scorer(path, ScoreOptions(max_source_length=8, max_length=8, rows=4))


@pytest.fixture
def run(monkeypatch, scorer, tmp_path, capfd):
    """Runs the command in this process; loads the model once for all tests."""
    monkeypatch.setattr(score, "_open", lambda args: scorer)

    def call(data: bytes, *flags: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert score.main(["--logdir=x", f"--output={tmp_path}/out", *flags]) == 0
        return (tmp_path / "out").read_text(), capfd.readouterr().err

    return call


def test_an_experiment_that_is_edited_leaves_the_numbers_of_its_runs(
    tmp_path, monkeypatch, capfd, scorer
):
    """Readers of a run make its model of the run's own parameters, and say once that they differ."""
    pair = ["red house"], ["green tree"]
    (was,) = scorer.Score(*pair)
    toy.save_run(tmp_path, toy.train_vocab(toy.sentences(200)), more=toy.SMALL)
    make = M4Tiny.Task
    monkeypatch.setattr(M4Tiny, "Task", lambda self: make(self).Set(activation="gelu"))
    options = ScoreOptions(max_source_length=8, max_length=8, rows=4)
    (score,) = Scorer(tmp_path, options).Score(*pair)
    assert score.log_prob == was.log_prob
    said = f"{tmp_path}: mt.M4Tiny has changed since it was trained, as which it is read: "
    line = "task.activation='relu' (today 'gelu')\n"
    assert capfd.readouterr().err.count(said + line) == 1
    file = tmp_path / "params.txt"
    file.write_text(
        file.read_text().replace("task.activation : 'relu'", "task.activation : 'tanh2'")
    )
    TextRunDir(tmp_path).ListFiles()
    message = r"params\.txt: mt\.M4Tiny cannot .* task\.activation='tanh2' then, 'gelu' now: .*lingvo_moe 0\."
    with pytest.raises(RunDirError, match=message):
        Scorer(tmp_path, options)


def test_the_columns(run, scorer):
    out, err = run(b"red house\tgreen tree\tmore\nno tab\n\n\t\n", "--tokens")
    first, *others, last = out.split("\n")[:-1]
    total, number, mean, tokens = first.split("\t")
    (want,) = scorer.Score(["red house"], ["green tree"])
    assert float(total) == pytest.approx(want.log_prob, abs=1e-5)
    each = [token.rpartition(":") for token in tokens.split(" ")]
    assert [piece for piece, _, _ in each] == want.pieces and int(number) == len(each)
    assert sum(float(value) for *_, value in each) == pytest.approx(float(total), abs=1e-4)
    assert float(mean) == pytest.approx(float(total) / len(each), abs=1e-5)
    assert others == ["nan\t0\tnan"] * 2 and last.split("\t")[1] == "1"
    assert "line 2 is not scored: it has no TAB" in err and "line 3" not in err


def test_it_ends_with_the_loss_of_each_language(run, scorer):
    data = b"red\tgreen\tde\nhouse\ttree\tfi\nstone\tgreen tree\tde\nsave\tfile\n"
    out, err = run(data, "--language_column=3")
    first, second, third = scorer.Score(["red", "house", "stone"], ["green", "tree", "green tree"])
    assert out.endswith("nan\t0\tnan\n")
    assert "line 4 is not scored: it has no language in column 3" in err
    for name, scores in (("de", [first, third]), ("fi", [second]), ("all", [first, second, third])):
        tokens = sum(len(score.pieces) for score in scores)
        loss = -sum(score.log_prob for score in scores) / tokens
        assert (
            f"score: {name}*: {len(scores)} pairs, {tokens} tokens, mean loss {loss:.3f} nats a token, perplexity "
            f"{math.exp(loss):,.2f}\n"
        ) in err
    assert f"* marks fewer than {ENOUGH_LINES} pairs" in err
    many = b"red\tgreen\n" * ENOUGH_LINES
    _, err = run(many, "--language=de")
    assert f"score: de: {ENOUGH_LINES} pairs, " in err and "*" not in err
    assert "perplexity" not in run(many, "--quiet")[1]


def test_a_wrong_column_is_named():
    losses = score.Losses()
    for number in range(1000):
        losses.Add(str(number), -1.0, 1)
    message = "more than 1,000 different languages, the last one '1000'"
    with pytest.raises(ValueError, match=message):
        losses.Add("1000", -1.0, 1)


def test_texts_of_a_language_model(tmp_path, capfd):
    toy_text.save_run(tmp_path / "run")
    texts, out = tmp_path / "texts", tmp_path / "out"
    lines = ["red house", "", "grün\ttree", "tree " * 20]
    texts.write_text("\n".join(lines))
    given = [f"--logdir={tmp_path}/run", f"--input={texts}", f"--output={out}", "--max_length=16"]
    assert score.main(given) == 0
    rows = [line.split("\t") for line in out.read_text().split("\n")]
    totals, tokens = [float(row[0]) for row in rows], [int(row[1]) for row in rows]
    assert tokens[1] == 1 and tokens[3] == 16  # the end alone, and as much as fits
    loss = -sum(totals) / sum(tokens)
    bits = -sum(totals[:3]) / math.log(2) / sum(len(line.encode()) + 1 for line in lines[:3])
    err = capfd.readouterr().err
    assert "line 4 is too long: its end is not scored" in err
    said = (
        rf"4 texts, {sum(tokens)} tokens, mean loss {loss:.3f} nats a token, perplexity ([\d,.]+), "
    )
    (perplexity,) = re.findall(rf"{said}{bits:.3f} bits a byte\n", err)
    assert float(perplexity.replace(",", "")) == pytest.approx(math.exp(loss), rel=1e-5)
    assert score.main([*given, "--language=de"]) == 1
    assert re.search("--language=de: .* have no source", capfd.readouterr().err)
