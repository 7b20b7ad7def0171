"""The requests of lm-evaluation-harness, answered by a small model; the library itself is not needed."""

import itertools
import sys
import types

import numpy as np
import pytest
import toy_text

from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.lm.generator import GenerateOptions, load_generator
from lingvo_moe.tasks.text.quality.forced_decoding import ScoreOptions, Scorer
from tools import eval_harness


def _request(*args):
    return types.SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("lm") / "run"
    toy_text.save_run(path)
    return path


@pytest.fixture(scope="module")
def scorer(run):
    return Scorer(run, ScoreOptions(max_length=16, rows=4))


@pytest.fixture(scope="module")
def model(run, scorer):
    generator, _ = load_generator(run, GenerateOptions(max_source_length=16, max_length=8))
    return eval_harness.HarnessModel(scorer, generator)


def _log_probs(scorer, text):
    (score,) = scorer.Score([""], [text])
    assert not score.truncated
    return score.token_log_probs[:-1]


def test_a_continuation_has_its_log_probability_also_with_its_blank_in_the_context(model, scorer):
    before = scorer.Encode("red house")
    want = _log_probs(scorer, "red house open")[len(before) :].sum()
    requests = [_request("red house", " open"), _request("red house ", "open"), _request("red", "")]
    (one, two, empty) = model.loglikelihood(requests)
    assert one == two and one[0] == pytest.approx(want, abs=1e-4) and empty == (0.0, True)


def test_what_greedy_search_finds_is_likeliest_and_nothing_else_is(model, scorer):
    ids = scorer.Encode("red house")
    for _ in range(3):
        best = [int(i) for i in range(4, 290) if scorer.ScoreIds([[*ids, i]])[0][1][-1]]
        assert len(best) <= 1
        if not best:
            break
        ids += best
    after = len(ids) - len(scorer.Encode("red house"))
    _, likeliest = scorer.ScoreIds([ids])[0]
    assert after and likeliest[-after:].all()
    other = [*ids[:-1], 4 + (ids[-1] + 1) % 280]
    assert not scorer.ScoreIds([other])[0][1][-1]


def test_a_text_of_several_pieces_counts_each_token_once(model, scorer):
    text = "red house open the green tree close stone " * 6
    ids = scorer.Encode(text)
    most = scorer.most_ids
    pieces = list(model._Pieces(ids))
    assert len(ids) > 3 * most and sum(new for _, new in pieces) == len(ids)
    assert [i for piece, new in pieces for i in piece[-new:]] == ids
    assert all(len(piece) <= most for piece, _ in pieces)
    for (before, _), (piece, new) in itertools.pairwise(pieces):
        assert piece[:-new] == before[-1:]
    short = "red house open"
    (one, two, none) = model.loglikelihood_rolling([_request(short), _request(text), _request("")])
    assert one == pytest.approx(_log_probs(scorer, short).sum(), abs=1e-4) and none == 0.0
    want = sum(scorer.ScoreIds([piece])[0][0][-new:].sum() for piece, new in pieces)
    assert two == pytest.approx(want, abs=1e-3)


def test_a_context_that_is_too_long_loses_its_beginning(model, scorer):
    context = "red house open the green tree " * 4
    before, after = model._Split(context, "close stone")
    assert len(before) + len(after) == scorer.most_ids
    ids = scorer.Encode(context + "close stone")
    assert [*before, *after] == ids[-scorer.most_ids :]


def test_texts_end_before_a_stop(model):
    (whole,) = model._generator.Generate(["red house"], [Sampling(8)])
    stop = whole.text[4:6]
    asked = {"until": [stop, ""], "do_sample": False, "temperature": 0.7, "max_gen_toks": 8}
    assert model.generate_until([_request("red house", asked)]) == [
        whole.text[: whole.text.find(stop)]
    ]
    with pytest.raises(ValueError, match="generation_kwargs has num_beams; known are do_sample"):
        model.generate_until([_request("red house", {"num_beams": 3})])


def test_without_the_library_it_says_how_to_get_it(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert eval_harness.main([f"--logdir={run}", "--tasks=arc_easy"]) == 1
    assert "lm_eval is not installed" in capsys.readouterr().err


def test_the_library_gets_a_model_and_its_results_are_written(run, monkeypatch, tmp_path, capsys):
    class LM:
        pass

    def simple_evaluate(model, tasks, num_fewshot, limit):
        assert isinstance(model, LM) and (tasks, num_fewshot, limit) == (["a", "b"], None, 3)
        ((log_prob, _),) = model.loglikelihood([_request("red", " house")])
        return {"results": {"a": {"log_prob": np.float32(log_prob)}}}

    parts = {
        "lm_eval": types.SimpleNamespace(simple_evaluate=simple_evaluate),
        "lm_eval.api": types.ModuleType("lm_eval.api"),
        "lm_eval.api.model": types.SimpleNamespace(LM=LM),
        "lm_eval.utils": types.SimpleNamespace(make_table=lambda results: "a table"),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    output = tmp_path / "results.json"
    flags = [f"--logdir={run}", "--tasks=a,b", "--limit=3", f"--output={output}", "--max_length=16"]
    assert eval_harness.main(flags) == 0
    assert "log_prob" in output.read_text() and "a table" in capsys.readouterr().out
