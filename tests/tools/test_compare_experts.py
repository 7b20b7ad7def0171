"""python -m tools.compare_experts trains its variants, measures them on held-out pairs, and resumes."""

import json
import shutil

import pytest
import trainer_testing

from lingvo_moe.reproduction import expert_comparison
from lingvo_moe.reproduction.expert_variants import VARIANTS
from lingvo_moe.tasks.text.quality.held_out_loss import held_out_loss
from tools import _cli, compare_experts


def _rows():
    """Two summaries of two layers a stack, two experts."""
    layers = {
        "moe/{}/over_capacity_ratio": [[0.1, 0.3], [0.2, 0.2]],
        "moe/{}/dispatch_0": [[0.0, 0.04], [0.0, 0.0]],
        "moe/{}/expert_load": [[[0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5], [0.0, 1.0]]],
    }
    names = [
        (name.format(stack), rows)
        for name, rows in layers.items()
        for stack in ("encoder", "decoder")
    ]
    return [{"step": i, **{name: rows[i] for name, rows in names}} for i in range(2)]


def test_routing_is_averaged_over_layers_and_rows():
    found = expert_comparison.routing(_rows())
    assert found == pytest.approx(
        # mean(0.1, 0.3, 0.2, 0.2) = 0.2; peaks 1.5, 1, 1 and 2
        {"dropped": 0.2, "without_expert": 0.01, "imbalance": 1.375}
    )
    assert expert_comparison.routing([{"step": 1, "loss": 1.0}]) == {}


def test_trains_measures_and_goes_on(tmp_path, capfd, monkeypatch):
    corpus = trainer_testing.write_corpus(tmp_path / "corpus")
    (corpus / "dev").mkdir()
    for file in corpus.glob("*.tsv"):
        shutil.copy(file, corpus / "dev" / file.name)
    flags = [
        f"--output={tmp_path / 'out'}",
        f"--corpus={corpus}",
        "--model=toy_translation.Smallest",
    ]
    flags += ["--only=dense", "--steps=2", "--batches=2", "--engine=tf_graph"]
    monkeypatch.setattr(_cli.subprocess, "run", trainer_testing.in_this_process)
    assert compare_experts.main(flags) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results) == ["dense"] and results["dense"]["steps"] == 2
    assert VARIANTS["dense"].says in capfd.readouterr().out
    found = held_out_loss(tmp_path / "out" / "dense", corpus, 2)
    assert results["dense"]["held_out_nll"] == pytest.approx(found.nll, rel=1e-5)

    assert compare_experts.main(flags) == 0
    assert "done before" in capfd.readouterr().out
