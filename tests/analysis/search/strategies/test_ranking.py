"""The choice of the candidate that is compiled next, and the corrections that its plan gives."""

import pytest

from lingvo_moe.analysis.search.strategies.candidate import DOTS, FULL, Candidate
from lingvo_moe.analysis.search.strategies.estimates import Estimate
from lingvo_moe.analysis.search.strategies.mesh_layout import MeshLayout
from lingvo_moe.analysis.search.strategies.ranking import Ranking, Tried
from lingvo_moe.analysis.search.strategies.strategy_file import (
    StrategyError,
    read_overrides,
    to_text,
)
from lingvo_moe.core.config import registry
from lingvo_moe.core.sharding import Mesh

_MODEL = "mt.M4Tiny"
_LAYOUT = MeshLayout(Mesh(("data",), (8,)), (("B", "data"),), ())
OUTPUTS, MOVED = ("attention", "feed_forward"), ("dispatched", "returned")
_FAST, _SLOW, _LARGE = (Candidate(_LAYOUT, remat=each) for each in (MOVED, FULL, DOTS))


def _estimates():
    return {
        _FAST: Estimate({"experts": 2.0}, 1.0, 1.0, 4, 4, 4.0),
        _SLOW: Estimate({"experts": 3.0}, 1.0, 1.0, 4, 4, 2.0),
        _LARGE: Estimate({"experts": 1.0}, 1.0, 1.0, 4, 4, 8.0),
    }


def _plan(work, rest, network, needed, fits=True):
    rows = [{"part": p, "roofline_seconds": s} for p, s in (("experts", work), ("loss", rest))]
    time = {"step_seconds": work + rest + network, "collective_seconds": network}
    return {
        "memory": {"fits": fits, "needed": needed},
        "work": rows if fits else [],
        "time": time if fits else None,
    }


def _tried(candidate, plan, refused=""):
    return Tried(candidate, str(candidate), candidate.Overrides(), 1.0, plan, refused)


def test_the_fastest_that_fits_is_compiled_first_and_its_plan_corrects_the_rest():
    ranking = Ranking(_estimates(), memory=10)
    assert ranking.Next()[0] == _FAST
    ranking.Add(_tried(_FAST, _plan(4.0, 1.0, 3.0, 6)))
    assert ranking.Correction(_SLOW).work == {"experts": 2.0}
    assert ranking.Correction(_SLOW).network == 3.0
    assert ranking.Correction(_SLOW).memory == 0.5  # 2 bytes beside the state instead of 4
    assert ranking.Next()[0] == _LARGE  # which now seems to fit
    ranking.Add(_tried(_LARGE, _plan(2.0, 1.0, 3.0, 8)))
    assert not ranking.Next()  # what is left cannot be faster
    assert ranking.best is not None and ranking.best.candidate == _LARGE


def test_a_misfit_makes_others_seem_larger():
    ranking = Ranking(_estimates(), memory=10)
    ranking.Add(_tried(_FAST, _plan(0, 0, 0, 16, fits=False)))
    assert ranking.Correction(_SLOW).memory == 3.0
    assert ranking.Next()[0] == _SLOW  # all seem too large now; this is the smallest
    assert ranking.best is None


def test_a_plan_corrects_first_of_all_the_candidates_that_are_like_it():
    parted = Candidate(_LAYOUT, remat=MOVED, micro_batches=4)
    like_it = Candidate(_LAYOUT, remat=DOTS, micro_batches=4)
    ranking = Ranking({**_estimates(), parted: _estimates()[_FAST]}, memory=10)
    ranking.Add(_tried(_SLOW, _plan(3.0, 1.0, 1.0, 6)))
    ranking.Add(_tried(parted, _plan(8.0, 1.0, 1.0, 6)))
    assert ranking.Correction(like_it).work == {"experts": 4.0}
    assert ranking.Correction(_FAST).work == {"experts": 1.0}
    assert ranking.Next()[0] == _FAST


def test_what_was_refused_is_not_the_best():
    ranking = Ranking(_estimates(), memory=10)
    ranking.Add(_tried(_FAST, None, "XLA computes it wrongly"))
    assert ranking.best is None
    assert ranking.Next()[0] == _SLOW


@pytest.mark.parametrize("text", [
    "",
    "# nothing",
    "train.mesh",
    "train.mesh=",
    "input.batch_size=8",
    "train.mesh=type/this/Zen",
])  # fmt: skip
def test_a_strategy_file_holds_parameters_of_strategies(tmp_path, text):
    path = tmp_path / "strategy.txt"
    path.write_text(text)
    with pytest.raises(StrategyError, match="--strategy="):
        read_overrides(path, registry.AsDefined(_MODEL))


def test_every_choice_in_a_strategy_file_reaches_the_experiment(tmp_path):
    """Lists have commas and quotes, which overrides are divided at."""
    layout = MeshLayout(Mesh(("stage", "data"), (2, 4)), (("B", "data"),), ())
    chosen = Candidate(
        layout, "weights", (*OUTPUTS, *MOVED), "bfloat16", 8, ("experts", "slots"), repeats=2
    )
    path = tmp_path / "strategy.txt"
    path.write_text(to_text(chosen.Overrides(), []))
    params = registry.GetParams(_MODEL, read_overrides(path, registry.AsDefined(_MODEL)))
    assert params.train.offload == ["experts", "slots"]
    assert params.train.shard_state == "weights"
    assert tuple(params.task.remat) == (*OUTPUTS, *MOVED)
    assert params.task.fprop_dtype == "bfloat16"
    pipeline = params.task.pipeline
    assert (pipeline.schedule, pipeline.repeats, pipeline.stages) == ("interleaved", 2, 2)
    assert pipeline.micro_batches == 8 * 4  # of all devices along `data`
