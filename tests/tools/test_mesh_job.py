"""A command over a mesh in two processes: the first one reads and writes, the other one follows it to the end."""

import pytest
import toy_translation as toy
from processes import free_address, start_python

from tools import _mesh, score, serve

_FLAGS = ["--max_source_length=8", "--max_length=8", "--quiet"]


def _job(flags, *more):
    """Runs tools.score in two processes of two devices, each with further flags: statuses, and what they say."""
    job = [f"--coordinator_address={free_address()}", "--num_processes=2", "--num_devices=2"]
    env = {"XLA_FLAGS": None, "JAX_PLATFORMS": "cpu"}
    processes = [
        start_python(
            "-m", "tools.score", *flags, *job, "--mesh=expert:4", f"--process_id={i}", *own, env=env
        )
        for i, own in enumerate(more)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    return [process.returncode for process in processes], said


@pytest.mark.slow
def test_two_processes_score_as_one_does(tmp_path):
    more = (
        "task.num_experts=4;task.moe.exchange_factor=0.05"  # rows reach experts in several rounds
    )
    toy.save_run(tmp_path / "run", toy.train_vocab(toy.sentences(200)), more=more)
    pairs = zip(toy.sentences(6, seed=1, longest=4), toy.sentences(6, seed=2, longest=4))
    (tmp_path / "pairs").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    flags = [f"--logdir={tmp_path}/run", f"--input={tmp_path}/pairs", *_FLAGS]
    assert score.main([*flags, f"--output={tmp_path}/alone"]) == 0
    output = f"--output={tmp_path}/of_two"
    statuses, said = _job(flags, [output], [output])
    assert statuses == [0, 0], said
    alone, of_two = ((tmp_path / name).read_text().splitlines() for name in ("alone", "of_two"))
    assert len(alone) == 6
    for one, other in zip(alone, of_two, strict=True):
        log_prob, tokens, _ = one.split("\t")
        assert other.split("\t")[1] == tokens
        assert float(other.split("\t")[0]) == pytest.approx(float(log_prob), rel=1e-5)

    # A command with files of its own is not a part of a job.
    statuses, (first, second) = _job(flags, [f"--output={tmp_path}/a"], [f"--output={tmp_path}/b"])
    assert statuses == [1, 1]
    assert "process 1 of the job could not begin; its error says why" in first
    assert f"was given --output={tmp_path}/b, there {tmp_path}/a; the processes of a job" in second
    assert not (tmp_path / "a").exists()

    # Nobody waits for a process that has ended.
    statuses, (first, second) = _job(flags, [], [f"--logdir={tmp_path}"])
    assert statuses == [1, 1]
    assert "process 1 has ended before it joined the job" in first
    assert f"{tmp_path}" in second


def test_the_first_process_alone_listens():
    """Others may be on its machine, where they could not take the same port."""
    flags = ["--logdir=x", "--coordinator_address=localhost:1", "--num_processes=2"]
    args = [serve.define_flags().Parse([*flags, f"--process_id={i}"]) for i in range(2)]
    assert [_mesh.follows(one) for one in args] == [False, True]
    assert not _mesh.follows(serve.define_flags().Parse(flags[:1]))
