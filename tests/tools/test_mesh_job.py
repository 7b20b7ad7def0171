"""A command over a mesh in two processes: the first one reads and writes, the other one follows it to the end."""

import pytest
import toy_translation as toy
from processes import free_address, start_python

from tools import score

_FLAGS = ["--max_source_length=8", "--max_length=8", "--quiet"]


@pytest.mark.slow
def test_two_processes_score_as_one_does(tmp_path):
    toy.save_run(tmp_path / "run", toy.train_vocab(toy.sentences(200)), more="task.num_experts=4")
    pairs = zip(toy.sentences(6, seed=1, longest=4), toy.sentences(6, seed=2, longest=4))
    (tmp_path / "pairs").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    flags = [f"--logdir={tmp_path}/run", f"--input={tmp_path}/pairs", *_FLAGS]
    assert score.main([*flags, f"--output={tmp_path}/alone"]) == 0
    job = [f"--coordinator_address={free_address()}", "--num_processes=2", "--num_devices=2"]
    job += ["--mesh=expert:4", f"--output={tmp_path}/of_two"]
    env = {"XLA_FLAGS": None, "JAX_PLATFORMS": "cpu"}
    processes = [
        start_python("-m", "tools.score", *flags, *job, f"--process_id={i}", env=env)
        for i in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    alone, of_two = ((tmp_path / name).read_text().splitlines() for name in ("alone", "of_two"))
    assert len(alone) == 6
    for one, other in zip(alone, of_two, strict=True):
        log_prob, tokens, _ = one.split("\t")
        assert other.split("\t")[1] == tokens
        assert float(other.split("\t")[0]) == pytest.approx(float(log_prob), rel=1e-5)
