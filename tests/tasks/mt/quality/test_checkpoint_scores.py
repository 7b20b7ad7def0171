"""`--mode=eval` of a translation model: the scores of tools.evaluate and the held-out loss, in the run and a line."""

import json
import math
import re

import pytest
import sentencepiece
import toy_translation as toy

from lingvo_moe import trainer
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.loop.summaries import read_metrics
from lingvo_moe.tasks.text.decoding.mesh_search import MeshSearch
from lingvo_moe.tasks.text.quality.held_out_loss import held_out_loss
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from tools import evaluate

pytestmark = pytest.mark.slow

_LINES = {"aa": 12, "bb": 8, "cc": 4}


def _save_run(path, vocab, data):
    """A run with one checkpoint, of step 7; returns the trainer's overrides."""
    size = sentencepiece.SentencePieceProcessor(model_proto=vocab).vocab_size()
    more = ";".join(f"input.{side}_vocab_size={size}" for side in ("source", "target"))
    more += f";{toy.SMALL};input.data_dir={registry.escape(str(data))}"
    toy.save_run(path, vocab, more=more, languages=list(_LINES))
    return TextRunDir(path).experiment["params_override"]


def test_the_scores_of_tools_evaluate_and_the_held_out_loss(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, data = tmp_path / "run", tmp_path / "data"
    (data / "dev").mkdir(parents=True)
    for number, (lang, lines) in enumerate(_LINES.items()):
        for directory, times in ((data, 3), (data / "dev", 1)):
            texts = toy.sentences(lines * times, seed=number + times, longest=3)
            (directory / f"{lang}.tsv").write_text("".join(f"{t}\t{t}\n" for t in texts))
    override = _save_run(run, toy.train_vocab(toy.sentences(100), bytes_too=False), data)
    flags = ["--model=mt.M4Tiny", f"--logdir={run}", f"--data_dir={data}", "--mode=eval", "--once"]
    assert trainer.main([*flags, f"--model_params_override={override}", "--eval_lines=8"]) == 0
    line = next(s for s in capfd.readouterr().err.splitlines() if s.startswith("step 7: "))
    score = r"\d+\.\d(?: ± \d+\.\d)? \(high \d+\.\d, mid \d+\.\d, low \d+\.\d\)"
    wanted = (
        rf"step 7: held-out loss \d+\.\d{{4}} ± \d\.\d{{4}}, BLEU {score}, chrF {score} of 20 lines; "
        r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|.*"
    )
    assert re.fullmatch(wanted, line), line

    (row,) = read_metrics(str(TextRunDir(run).scores_dir))
    assert evaluate.main([f"--logdir={run}", "--max_per_language=8", "--quiet"]) == 0
    report = json.loads((run / "eval" / "report.json").read_text())
    for name in ("bleu", "chrf", "bleu_margin", "chrf_margin"):
        assert row[name] == pytest.approx(report["average"][name])
        assert row[f"groups/low/{name}"] == pytest.approx(report["groups"]["low"][name])
    found = held_out_loss(run, data, 8)
    assert row["nll"] == pytest.approx(found.nll, rel=1e-5)
    assert row["groups/high/nll"] == pytest.approx(found.groups.high.nll, rel=1e-5)
    assert row["tokens"] == found.tokens

    # The same scores come from a model over two devices, in a trainer and beside one. Training gathers its weights.
    searches, made = [], MeshSearch.__init__
    monkeypatch.setattr(MeshSearch, "__init__", lambda s, *a: searches.append(s) or made(s, *a))
    going_on = tmp_path / "going_on"
    more = f"input.vocab_dir={registry.escape(str(run / 'vocab'))};train.eval_batches=1"
    more += ";train.eval_interval_steps=1;train.eval_decode_every=1;train.shard_state=weights"
    flags = ["--model=mt.M4Tiny", f"--logdir={going_on}", f"--init_from={run}", "--mesh=expert:2"]
    flags += ["--max_steps=1", f"--data_dir={data}"]
    assert trainer.main([*flags, f"--model_params_override={override};{more}"]) == 0
    assert re.search(
        r"step 1: held-out loss .*, BLEU [\d.]+ .* of 24 lines", capfd.readouterr().err
    )
    (row,) = read_metrics(str(TextRunDir(going_on).held_out_dir))
    assert trainer.main([*flags, "--mode=eval", "--once", f"--model_params_override={more}"]) == 0
    assert "lowering search_begin" in capfd.readouterr().err
    (scored,) = read_metrics(str(TextRunDir(going_on).scores_dir))
    assert evaluate.main([f"--logdir={going_on}", "--quiet"]) == 0
    report = json.loads((going_on / "eval" / "report.json").read_text())
    assert scored["nll"] == pytest.approx(row["nll"], rel=1e-6)
    for name in ("bleu", "chrf"):
        assert row[name] == scored[name] == pytest.approx(report["average"][name])
        assert row[f"groups/low/{name}"] == pytest.approx(report["groups"]["low"][name])
    assert len(searches) == 2
    for search in searches:
        check_that_no_weight_moves(search)


def check_that_no_weight_moves(search):
    """A step gathers nothing of the size of a weight, as one of training does."""
    (of_search, _, block), *_ = search._built.values()
    specs = of_search.model.VariableSpecs().Flatten()
    sizes = {math.prod(spec.shape) for spec in specs if len(spec.shape) > 1}
    gathers = [c for c in block.Collectives() if c.kind == "all-gather"]
    gathered = [s for c in gathers for s in c.shapes if s[0] == "f32"]
    assert gathered and sizes.isdisjoint(math.prod(dims) for _, dims in gathered)
