"""python -m benchmarks.quality_peers: equal data, equal CPU seconds and the same tokens for every contender."""

import json
import sys

import numpy as np
import pytest
import trainer_testing

from benchmarks import contenders, quality_data, quality_peers, quality_report, quality_worker
from benchmarks.peers import budget
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.loop.summaries import read_metrics

# In place of JoeyNMT: translates by heart, at log-probability -2 a token, after a warning.
_PEER = """#!{python}
import json, sys
from pathlib import Path
setup = json.loads(Path(sys.argv[2]).read_text())
lines = (Path(setup["data"]) / "dev.target").read_text().split("\\n")[:-1]
lengths = [len(line.split(" ")) + 1 for line in lines]
print("a warning", flush=True)
for step, seconds in enumerate(setup["points"], 1):
    now = dict(step=step, cpu_seconds=seconds, trained_tokens=100 * step)
    now |= dict(log_probs=[-2.0 * n for n in lengths], tokens=sum(lengths) + {more})
    print(json.dumps(dict(kind="point", **now)), flush=True)
print(json.dumps(dict(kind="end", parameters=1000, version="by heart", pieces=lines)), flush=True)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two languages; the dev pairs are some that are trained on, and one longer than a row of mt.M4Tiny."""
    place = tmp_path_factory.mktemp("quality") / "corpus"
    directory = trainer_testing.write_corpus(place, held_out=6)
    with open(directory / "dev" / "bb.tsv", "a") as file:
        file.write(f"{'bka ' * 30}\t{'ka ' * 30}\n")
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "quality_cache"))


def _peer(path, more=0):
    path.write_text(_PEER.format(python=sys.executable, more=more))
    path.chmod(0o700)
    return str(path)


def _flags(corpus, output, *more):
    tiny = ("--model=mt.M4Tiny", "--model_params_override=", "--languages=aa,bb")
    return [f"--corpus={corpus}", f"--output={output}", *tiny, *more]


def test_a_budget_leaves_out_the_first_step_and_the_scoring():
    now = [100.0]
    found = budget.Budget([10.0, 20.0], clock=lambda: now[0])
    assert not found.Due()  # the first step took until 100
    now[0] = 109.0
    assert not found.Due()
    now[0] = 112.0
    assert found.Due() and found.used == 12.0
    with found.Scoring():
        now[0] = 500.0
    assert found.used == 12.0 and not found.done and not found.Due()
    now[0] = 508.0
    assert found.Due()
    with found.Scoring():
        now[0] = 900.0
    assert found.done


def test_a_budget_goes_back_to_where_a_branch_began():
    now = [0.0]
    found = budget.Budget([9.0, 10.0, 18.0], clock=lambda: now[0])
    assert not found.Due()
    now[0] = 9.5
    assert found.Due() and found.to_next == 1.0
    with found.Scoring():
        began = found.used
    now[0] = 10.5
    assert found.Due()
    with found.Scoring():
        pass
    found.Return(began)
    assert found.used == 9.5 and not found.Due()
    now[0] = 19.0
    assert found.Due() and found.used == 18.0


def test_other_systems_get_the_tokens_that_ours_reads(corpus, tmp_path):
    override = f"input.data_dir={corpus};input.languages=['aa','bb']"
    inputs = registry.GetParams("mt.M4Tiny", override).input.Instantiate().Prepare()
    data = quality_data.write_data(tmp_path / "data", inputs, most=7)
    pieces = json.loads((tmp_path / "data" / quality_data.VOCABULARIES).read_text())
    read = {}
    for side in quality_data.SIDES:
        text = (tmp_path / "data" / f"train.{side}").read_bytes().decode()
        ids = {piece: i for i, piece in enumerate(pieces[side])}
        read[side] = [[ids[piece] for piece in line.split(" ")] for line in text.splitlines()]
    shape, expected = inputs.shape, []
    for number, count in enumerate(inputs.languages.values()):
        pairs = [inputs.records.Read(number, i) for i in range(count)]
        expected += [tuple(map(list, pair)) for pair in pairs if shape.Fits(*map(len, pair))]
    assert list(zip(read["source"], read["target"], strict=True)) == expected
    assert sum(data.train_pairs.values()) == len(expected)
    targets = [target for pairs in data.held_out.values() for _, target in pairs]
    assert data.too_long == (sum(inputs.languages.values()) - len(expected), 13 - len(targets))
    assert targets and not any(target.startswith("ka ka ka") for target in targets)

    lines = (tmp_path / "data" / "dev.target").read_bytes().decode().splitlines()
    assert quality_data.decode_pieces(inputs.vocabs.target, lines) == targets
    vocabulary = inputs.vocabs.target
    assert data.tokens == sum(len(vocabulary.Encode(target)) + 1 for target in targets)


def test_a_contender_is_scored_and_kept(corpus, tmp_path, capsys):
    output, peer = tmp_path / "out", _peer(tmp_path / "peer")
    flags = _flags(corpus, output, f"--peers={peer}", "--only=joeynmt", "--cpu_seconds=80")
    assert quality_peers.main(flags) == 0
    (result,) = json.loads((output / "results.json").read_text())["results"]
    assert [p["cpu_seconds"] for p in result["curve"]] == [10.0, 20.0, 40.0, 80.0]
    assert [p["loss"] for p in result["curve"]] == [2.0] * 4
    assert result["average"]["chrf"] == pytest.approx(100.0)
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| JoeyNMT, learning rate 0.001 | 0.0 M | 4 | 0.00 M | 2.000 | 2.000 |")

    assert quality_peers.main([*flags, "--seeds=1,2"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("done before") == 1
    assert "2 seeds | 0.0 M | 4 | 0.00 M | 2.000 ± 0.000 |" in shown.out

    assert quality_peers.main([*flags, "--cpu_seconds=160"]) == 1
    told = "joeynmt_0.001_seed1/result.json has results of another points;"
    assert told in capsys.readouterr().err


def test_what_runs_are_ahead_by_has_the_error_of_pairs_and_of_seeds():
    """The error of one seed is that of drawing the pairs again; of seeds that differ alone, that of their mean."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(2, 30, 500)

    def runs(noise, *means):
        values = [
            -lengths * mean + np.sqrt(lengths) * noise * draw.normal(size=500) for mean in means
        ]
        return [
            {"setup": {"seed": i}, "curve": [{"log_probs": v.tolist()}]}
            for i, v in enumerate(values)
        ]

    dense, experts = runs(1.0, 3.0), runs(1.0, 2.9)
    mean, error = quality_report.ahead(experts, dense, lengths.tolist())
    difference = np.subtract(*(run[0]["curve"][0]["log_probs"] for run in (experts, dense)))
    again = draw.integers(0, 500, (4000, 500))
    drawn = difference[again].sum(1) / lengths[again].sum(1)
    assert mean == pytest.approx(difference.sum() / lengths.sum())
    assert error == pytest.approx(drawn.std(), rel=0.1)

    mean, error = quality_report.ahead(runs(0, 2.9, 2.8), runs(0, 3.0, 3.0), lengths.tolist())
    assert (mean, error) == pytest.approx((0.15, 0.05))
    rows = [[{"curve": [{"loss": loss}]}] for loss in (float("nan"), 2.0, 1.0)]
    assert quality_report._best(rows) is rows[2]


def test_each_number_of_experts_and_router_is_a_contender(corpus, tmp_path):
    """The page's model is built with each; those that grow are models which can."""
    more = ["--experts=2,8", f"--routers={','.join(quality_peers.ROUTERS)}", "--rates=0.1"]
    flags = [f"--corpus={corpus}", f"--output={tmp_path}", *more]
    comparison = quality_peers.Comparison(quality_peers.define_flags().Parse(flags))
    comparison._params = registry.GetParams(quality_peers.MODEL, "")
    runs = {name: setup for name, _, setup in comparison._runs()}
    assert len(runs) == 2 * 2 * 3 + 1
    for name, setup in runs.items():
        params = registry.GetParams(setup["model"], setup["override"])
        task = params.task
        task.Instantiate()
        assert (task.num_experts == 0) == name.startswith("dense")
        assert task.num_experts == 0 or f"{task.num_experts}_" in name
        assert bool(params.train.upcycle_at) == name.startswith("upcycled")
        assert not params.train.upcycle_at or task.cls.Growth(task).GrowsFrom()


def test_a_loss_of_other_tokens_is_refused(corpus, tmp_path, capsys):
    flags = _flags(corpus, tmp_path / "out", f"--peers={_peer(tmp_path / 'peer', more=1)}")
    assert quality_peers.main([*flags, "--only=joeynmt"]) == 1
    assert "joeynmt_0.001_seed1: its loss is of" in capsys.readouterr().err
    assert not (tmp_path / "out" / "joeynmt_0.001_seed1" / "result.json").exists()


def test_interrupted_it_keeps_what_was_finished(corpus, tmp_path, capsys, monkeypatch):
    flags = _flags(corpus, tmp_path / "out", f"--peers={_peer(tmp_path / 'peer')}")
    flags += ["--only=joeynmt", "--joeynmt_rates=0.001,0.002"]
    with monkeypatch.context() as context:
        line = contenders.Process.Line
        interrupt = iter([False] * 6 + [True])  # in the second contender's first point
        context.setattr(
            contenders.Process, "Line", lambda *a: _raise() if next(interrupt) else line(*a)
        )
        assert quality_peers.main(flags) == 130
    assert "quality_peers: stopped; the same command keeps" in capsys.readouterr().err
    assert not (tmp_path / "out" / "results.json").exists()
    assert quality_peers.main(flags) == 0
    assert "joeynmt_0.001_seed1: done before" in capsys.readouterr().err


def test_a_process_may_complain_much_before_it_is_ready():
    code = "import sys; sys.stderr.write('x' * 200_000); print('ready', flush=True); sys.exit('no')"
    with contenders.Process("loud", [sys.executable, "-c", code], threads=1) as process:
        assert process.Line("ready") == "ready\n"
        with pytest.raises(ChildProcessError, match=r"loud ended: x+no$"):
            process.Line("more")


def _raise():
    raise KeyboardInterrupt


def test_a_branch_takes_over_the_dense_run_until_experts_have_grown(tmp_path):
    run = tmp_path / "run"
    assert quality_worker.begun(str(run)) == f"{run}-dense"
    run.mkdir()
    assert quality_worker.begun(str(run)) == str(run)


def test_the_table_of_languages_has_most_pairs_first_and_the_lead_over_their_own_models():
    def run(name, says, first, second):
        scores = {"aa": {"bleu": first}, "bb": {"bleu": second}}
        setup = {"train_pairs": {"aa": 10, "bb": 2000}}
        return {"name": name, "says": says, "languages": scores, "setup": setup}

    alone = run("bilingual_0.03_seed1", "alone", 10.0, 20.0)
    both = [run("dense_1", "dense", 11.0, 18.0), run("dense_2", "dense", 13.0, 20.0)]
    rows = quality_report.by_language([*both, alone]).splitlines()[2:]
    assert rows == [
        "| bb | 2,000 | 20.0 | 19.0 (-1.0) |",
        "| aa | 10 | 10.0 | 12.0 (+2.0) |",
        "| all | 2,010 | 15.0 | 15.5 (+0.5) |",
    ]
    curve = quality_report.deltas([*both, alone])["dense_1"]
    assert (curve["languages"], curve["delta_bleu"]) == (["bb", "aa"], [-1.0, 2.0])
    assert quality_report.by_language(both) == "" and not quality_report.deltas(both)


def test_a_model_for_each_language_is_a_contender(corpus, tmp_path, monkeypatch):
    """Each has its share of the time and its language's pairs, and all together count as one."""
    setups = []

    def train(self, directory, setup):
        setups.append(setup)
        held_out = self._data.held_out
        pairs = [pair for k in setup.get("languages", held_out) for pair in held_out[k]]
        lengths = [len(self._target.Encode(target)) + 1 for _, target in pairs]
        now = {"step": 2, "trained_tokens": 5, "tokens": sum(lengths)}
        now |= {"log_probs": [-3.0 * n for n in lengths], "kind": "point"}
        points = [now | {"cpu_seconds": seconds} for seconds in setup["points"]]
        texts = [target if setup["bilingual"] else target.split()[0] for _, target in pairs]
        end = {"kind": "end", "parameters": 7, "version": "0", "hypotheses": texts}
        return [*points, end]

    monkeypatch.setattr(quality_peers.Comparison, "_train", train)
    flags = _flags(corpus, tmp_path, "--only=bilingual,dense", "--cpu_seconds=80")
    assert quality_peers.main(flags) == 0
    alone, other, _ = setups
    assert alone["languages"] == ["aa"] and other["languages"] == ["bb"]
    assert alone["points"] == [5.0, 10.0, 20.0, 40.0]
    for setup, language in ((alone, "aa"), (other, "bb")):
        assert registry.GetParams("mt.M4Tiny", setup["override"]).input.languages == [language]
    result, _ = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [point["cpu_seconds"] for point in result["curve"]] == [10.0, 20.0, 40.0, 80.0]
    assert result["curve"][-1]["loss"] == pytest.approx(3.0)
    assert (result["parameters"], result["curve"][0]["step"]) == (14, 4)
    assert (tmp_path / "dense_0.03_seed1.svg").stat().st_size > 1000


@pytest.mark.slow
def test_our_model_is_trained_and_scored(corpus, tmp_path, capsys, monkeypatch):
    """Two times are scored: a stable run, a branch that decays, more of the stable run, and another branch.

    The command is stopped after the first time, and goes on behind it.
    """
    monkeypatch.setattr(quality_peers, "POINTS", (1 / 4, 1))
    flags = _flags(corpus, tmp_path / "out", "--only=dense", "--cpu_seconds=3", "--beam_size=1")
    small = "task.num_encoder_layers=1;task.num_decoder_layers=1;task.repeat=False"
    flags.append(f"--model_params_override={small}")
    runs = tmp_path / "out" / "dense_0.03_seed1"
    with monkeypatch.context() as context:
        line = contenders.Process.Line
        after = iter([False, True])
        context.setattr(
            contenders.Process, "Line", lambda *a: _raise() if next(after) else line(*a)
        )
        assert quality_peers.main(flags) == 130
    first_branch = (runs / "run-0.75" / "train" / "metrics.jsonl").read_bytes()
    assert quality_peers.main(flags) == 0
    assert (runs / "run-0.75" / "train" / "metrics.jsonl").read_bytes() == first_branch
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    first, *_, last = result["curve"]
    assert last["loss"] < first["loss"] and first["step"] < last["step"]
    assert last["cpu_seconds"] >= 3.0
    rates = {}
    for name in ("run", "run-0.75", "run-3"):
        found = read_metrics(str(runs / name / "train"))
        rates[name] = {row["step"]: row["learning_rate"] for row in found}
    stable, decayed = rates["run"], rates["run-3"]
    assert stable[max(stable)] == max(stable.values()) > 2 * decayed[max(decayed)]
    assert max(stable) == min(decayed) - 1
    assert "| here, no experts, learning rate 0.03 |" in capsys.readouterr().out


def test_a_page_keeps_the_tables_of_other_machines(tmp_path):
    page, machines = tmp_path / "page.md", ["Measured on A.", "Measured on B.", "Measured on C."]
    page.write_text("before\n<!-- x: begin -->\n<!-- x: end -->\nafter\n")
    for at, machine in enumerate([*machines, machines[1]]):
        contenders.update_page(page, "x", f"table {at}\n\n| 1 |\n\n{machine}")
    tables = [f"table {at}\n\n| 1 |\n\n{machines[i]}" for at, i in ((0, 0), (2, 2), (3, 1))]
    inside = "\n\n".join(tables)
    assert page.read_text() == f"before\n<!-- x: begin -->\n{inside}\n<!-- x: end -->\nafter\n"
