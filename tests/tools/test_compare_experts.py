"""python -m tools.compare_experts trains its variants, measures them on held-out pairs, and resumes."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
import trainer_testing

from lingvo_moe.core import sharding
from lingvo_moe.reproduction import expert_comparison
from lingvo_moe.reproduction.expert_variants import GROUPS, VARIANTS
from lingvo_moe.tasks.mt.input import file_list
from lingvo_moe.tasks.mt.input.errors import DataError
from lingvo_moe.tasks.mt.runs.run_dir import RunDir
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
    return [{name: rows[i] for name, rows in names} for i in range(2)]


def test_routing_is_averaged_over_layers_and_rows():
    found = expert_comparison.routing(_rows())
    assert found == pytest.approx(
        # mean(0.1, 0.3, 0.2, 0.2) = 0.2; peaks 1.5, 1, 1 and 2
        {"dropped": 0.2, "without_expert": 0.01, "imbalance": 1.375}
    )
    assert expert_comparison.routing([{"loss": 1.0}]) == {}


def test_table_has_a_row_for_each_variant_of_a_group():
    one = {
        "params": 1234,
        "held_out_nll": 3.0,
        "says": "A",
        "group": "experts routers recipes",
        "experts": 1,
    }
    two = {
        **one,
        "held_out_nll": 2.875,
        "says": "B",
        "group": "experts",
        "experts": 4,
        "dropped": 0.25,
    }
    two |= {"without_expert": 0.0, "imbalance": 1.5}
    results = {"dense": one, "b": two}
    assert expert_comparison.groups(results) == ["experts"]
    table = expert_comparison.table(results, "experts")
    assert "| B | 1,234 | 2.875 | -0.125 | 25.0 % | 0.0 % | 1.5 |" in table
    assert table.count("| A |") == 1
    assert "| B |" not in expert_comparison.table(results, "routers")
    for group in GROUPS:
        assert expert_comparison.picture(results, group).startswith(b"<?xml")


def test_a_damaged_result_is_measured_again(tmp_path, capsys):
    args = compare_experts.define_flags().Parse([f"--output={tmp_path}", "--steps=20"])
    comparison = compare_experts.Comparison(args)
    result = tmp_path / "dense" / "result.json"
    assert not comparison._is_done(result, 20)
    result.parent.mkdir()
    file_list.write_listed(result, json.dumps({"steps": 20, "held_out_nll": 3.25}).encode())
    assert comparison._is_done(result, 20)
    assert comparison._results()["dense"]["held_out_nll"] == 3.25
    assert capsys.readouterr().out == ""
    result.write_text(result.read_text().replace("3.25", "2.25"))
    assert not comparison._is_done(result, 20)
    assert "result.json was changed or damaged" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"result\.json was changed .*; measure it .*--only=dense"):
        comparison._results()


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

    run = tmp_path / "out" / "dense"
    assert results["dense"]["held_out_nll"] == pytest.approx(
        _by_hand(run, corpus, monkeypatch), rel=1e-5
    )

    assert compare_experts.main(flags) == 0
    assert "done before" in capfd.readouterr().out


def _by_hand(run, corpus, monkeypatch):
    """Computes minus the mean log probability of the target tokens of two batches, from logits."""
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer

    task, run = RunDir(run).Task(), RunDir(run)
    p = run.Params().input.Copy().Set(data_dir=str(corpus))
    batches = p.Instantiate().Prepare(artifacts=run.artifacts).HeldOut()
    with Checkpointer(str(run.checkpoint_dir), read_only=True) as checkpointer:
        theta, _ = checkpointer.RestoreToNumpy("theta", 2)
    theta = theta.Transform(tf.constant)
    logits, shard = [], task.softmax.Shard
    monkeypatch.setattr(
        task.softmax, "Shard", lambda x, letters: logits.append(x) or shard(x, letters)
    )
    losses = []
    with sharding.use_mesh(sharding.single_device()):
        for _ in range(2):
            batch = next(batches).batch.Transform(tf.constant)
            task.EvalStep(theta, batch)
            labels, real = batch.tgt.labels.numpy(), batch.tgt.segment_ids.numpy() > 0
            logp = tf.nn.log_softmax(logits[-1]).numpy()
            losses.append(-np.take_along_axis(logp, labels[..., np.newaxis], -1)[..., 0][real])
    return float(np.concatenate(losses).mean())
