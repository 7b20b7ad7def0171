"""The trainer's flags and run directories: a mistake is one clear line and status 2; nothing is half written."""

import gzip
import json
import os
from types import SimpleNamespace

import pytest
import trainer_testing
from processes import run_python

from lingvo_moe import trainer
from lingvo_moe.core.config import registry
from lingvo_moe.core.runs.directories import check_logdir
from lingvo_moe.core.runs.run_lock import LOCK_FILE, RunLock
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.training import beginning, same_run
from lingvo_moe.training.checks import UsageError


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def data_dir(tmp_path):
    directory = tmp_path / "data"
    _write(directory / "de.tsv", *(f"wort{i} haus\tword{i} house" for i in range(40)))
    return directory


def _write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _error(capfd, *flags):
    """Returns the one line of error for these flags."""
    assert trainer_testing.status(*flags) == 2
    out, err = capfd.readouterr()
    progress = ("reading ", "sampling ", "training ", "tokenising ")
    lines = [line for line in err.splitlines() if not line.startswith(progress)]
    assert out == "" and len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return lines[0]


TINY = "--model=mt.M4Tiny"


@pytest.mark.parametrize("kind, override, expected", [
    ("nothing", "", "does not exist"),
    ("no files", "", "no data in"),
    ("empty files", "", "all files are empty"),
    ("malformed", "", "all 2 lines are malformed: {'no_tab': 1, 'empty_side': 1}"),
    ("cut short", "", "cannot be read, damaged or cut short"),
    ("good", "input.languages=['dd']", "no language 'dd' (known: de)"),
    ("good", "input.target_vocab_size=20", "target_vocab_size=20 is too small"),
    ("good", "", "target_vocab_size=300 is more than this data can fill: at most 273 for 40"),
])  # fmt: skip
def test_data_that_cannot_be(kind, override, expected, data_dir, tmp_path, capfd):
    other = tmp_path / "other"
    if kind == "good":
        other = data_dir
    elif kind != "nothing":
        other.mkdir()
    if kind == "empty files":
        _write(other / "de.tsv")
    if kind == "malformed":
        _write(other / "de.tsv", "no tab", "\tno source")
    if kind == "cut short":
        whole = gzip.compress(os.urandom(100).hex().encode() * 100)
        (other / "de.tsv.gz").write_bytes(whole[:-20])
    flags = [TINY, f"--data_dir={other}", f"--logdir={tmp_path / 'run'}"]
    assert expected in _error(capfd, *flags, f"--model_params_override={override}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("logdir, expected", [
    ("data", "is also --data_dir="),
    ("data/run", "lies inside --data_dir="),
    (".", "holds --data_dir="),
    ("model", "is an exported model (it holds saved_model.pb), which a run would damage"),
    ("model/assets/run", "model, which is an exported model (it holds saved_model.pb); name a directory outside of it"),
    ("prepared", "is prepared data"),
    ("run/checkpoints", "run, which is a run (it holds experiment.json); name"),
    ("runs", "holds first, which is a run (it holds experiment.json); --restart would move it away"),
])  # fmt: skip
def test_a_logdir_that_is_something_else(logdir, expected, data_dir, tmp_path, capfd, monkeypatch):
    for name in (
        "model/saved_model.pb",
        "prepared/prepared.json",
        "corpus/corpus.json",
        "run/experiment.json",
        "run/checkpoints/5/x",
        "runs/first/experiment.json",
        "runs/first/manifest.sha256",
    ):
        _write(tmp_path / name)
    before = _files(tmp_path)
    for more in ([], ["--restart"]):
        flags = [TINY, f"--data_dir={data_dir}", f"--logdir={tmp_path / logdir}", *more]
        line = _error(capfd, *flags)
        assert line.startswith(f"error: --logdir={tmp_path / logdir} ") and expected in line
    assert _files(tmp_path) == before


def test_no_cache_in_an_exported_model(data_dir, tmp_path, capfd):
    _write(tmp_path / "model" / "saved_model.pb")
    override = f"--model_params_override=input.cache_dir={tmp_path}/model"
    line = _error(capfd, TINY, f"--data_dir={data_dir}", f"--logdir={tmp_path}/run", override)
    assert line.startswith(f"error: input.cache_dir={tmp_path}/model is an exported model")
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["saved_model.pb"]


def test_a_logdir_may_hold_files_of_others(data_dir, tmp_path):
    _write(tmp_path / "run/notes.txt", "to do")
    _write(tmp_path / "run/eval/report.json", "{}")
    check_logdir(tmp_path / "run", {"--data_dir": data_dir})
    _write(tmp_path / "run/experiment.json", "{}")
    _write(tmp_path / "run/manifest.sha256")
    _write(tmp_path / "run/model/saved_model.pb")  # of before exports into runs were refused
    check_logdir(tmp_path / "run", {"--data_dir": data_dir})


def test_a_logdir_that_cannot_be_written_is_found_before_the_data_is_read(
    data_dir, tmp_path, capfd, monkeypatch
):
    (tmp_path / "file").write_text("not a directory")
    for logdir in ("file", "file/run"):
        flags = [TINY, f"--data_dir={data_dir}", f"--logdir={tmp_path / logdir}"]
        assert f"{tmp_path / 'file'} is not a directory" in _error(capfd, *flags)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root can write anywhere
    flags = [TINY, f"--data_dir={data_dir}", f"--logdir={tmp_path / 'a/b'}"]
    assert f"no permission to write in {tmp_path}" in _error(capfd, *flags)
    assert not (tmp_path / "a").exists()


# --- run directories


def _run(tmp_path, override="", model="mt.M4Tiny", begun=True):
    run_dir = TextRunDir(tmp_path / "run")
    run_dir.Write(model, override, text_artifacts({"source": b"s", "target": b"t"}))
    if begun:
        (run_dir.path / "checkpoints/5").mkdir(parents=True)
    return run_dir


def _prepare(run_dir, model, override, restart):
    """Calls prepare_run_dir with the directory's lock held, like the trainer."""
    with RunLock(run_dir.path) as lock:
        lock.Acquire()
        params = registry.GetParams(model, override)
        same_run.prepare_run_dir(run_dir, model, override, params, lock, restart)


def _files(path):
    found = (p for p in path.rglob("*") if p.name != LOCK_FILE)
    return sorted((str(p), p.stat().st_mtime_ns) for p in found)


def test_another_experiment_in_the_same_logdir_is_refused_with_the_difference(tmp_path):
    run_dir = _run(tmp_path, "task.num_experts=16;train.max_steps=7")
    before = _files(run_dir.path)
    with pytest.raises(UsageError) as e:
        _prepare(run_dir, "mt.M4Tiny", "task.model_dim=32", restart=False)
    message = str(e.value)
    assert f"--logdir={run_dir.path} holds a run of mt.M4Tiny with other parameters" in message
    assert "> task.num_experts : 16\n< task.num_experts : 8" in message
    assert "> task.model_dim : 16\n< task.model_dim : 32" in message
    assert "--model_params_override=task.num_experts=16." in message and "max_s" not in message
    with pytest.raises(UsageError, match=r"holds a run of mt\.M4Tiny"):
        _prepare(run_dir, "mt.M4Demo", "task.num_experts=16", restart=False)
    assert _files(run_dir.path) == before


def test_a_run_of_before_a_parameter_was_there_goes_on(tmp_path):
    """A run older than a parameter resumes with the default, not with another value."""
    run_dir = _run(tmp_path)
    file = run_dir.path / "params.txt"
    line = "task.num_kv_heads : 0\n"
    assert line in file.read_text()
    file.write_text(file.read_text().replace(line, ""))
    run_dir.ListFiles()
    _prepare(run_dir, "mt.M4Tiny", "", restart=False)
    with pytest.raises(UsageError, match=r"would run now:\n< task\.num_kv_heads : 1$"):
        _prepare(run_dir, "mt.M4Tiny", "task.num_kv_heads=1", restart=False)


def test_an_experiment_that_was_changed_under_its_run_is_noticed(tmp_path):
    """The flags are the same, but the experiment's values have changed."""
    run_dir = _run(tmp_path)
    text = (run_dir.path / "params.txt").read_text()
    assert "task.aux_loss_weight : " in text
    was = "".join(
        "task.aux_loss_weight : 0.5\n" if line.startswith("task.aux_loss_weight") else line
        for line in text.splitlines(keepends=True)
    )
    (run_dir.path / "params.txt").write_text(was)
    run_dir.ListFiles()
    with pytest.raises(UsageError, match=r"> task\.aux_loss_weight : 0\.5\n< task\.aux") as e:
        _prepare(run_dir, "mt.M4Tiny", "", restart=False)
    restored = "task.aux_loss_weight=0.5"
    assert f"With --model_params_override={restored} added, it goes on" in str(e.value)
    _prepare(run_dir, "mt.M4Tiny", restored, restart=False)


def test_a_process_with_other_parameters_than_the_first_is_refused(tmp_path):
    run = SimpleNamespace(run_dir=_run(tmp_path, "task.num_experts=16"))
    run.params = registry.GetParams("mt.M4Tiny")
    with pytest.raises(
        UsageError, match=r"all processes of the job the same flags.*num_experts=16"
    ):
        beginning.Run.Follow(run)


def test_the_same_run_may_be_longer_and_its_data_elsewhere(tmp_path):
    run_dir = _run(tmp_path, "train.max_steps=7;input.data_dir=/a;task.num_experts=16")
    override = "task.num_experts=16;train.max_steps=9;input.data_dir=/b"
    _prepare(run_dir, "mt.demo.M4Tiny", override, restart=False)
    assert trainer.has_begun(run_dir)


def test_a_run_that_never_began_gives_way(tmp_path):
    """Flags may be corrected after a mistake that was found late."""
    run_dir = _run(tmp_path, "task.num_experts=16", begun=False)
    _prepare(run_dir, "mt.M4Tiny", "", restart=False)
    assert not trainer.has_begun(run_dir)


def test_a_run_that_lacks_something_is_not_begun_anew(tmp_path):
    run_dir = _run(tmp_path)
    (run_dir.path / "experiment.json").unlink()
    with pytest.raises(UsageError, match=r"experiment\.json is missing.*--restart"):
        _prepare(run_dir, "mt.M4Tiny", "", restart=False)
    run_dir = TextRunDir(tmp_path / "second")
    (run_dir.path / "train").mkdir(parents=True)
    (run_dir.path / "train/metrics.jsonl").write_text(json.dumps({"step": 3}) + "\n")
    with pytest.raises(UsageError, match=r"no checkpoint of it; --restart"):
        _prepare(run_dir, "mt.M4Tiny", "", restart=False)


def test_restart_moves_the_run_aside(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(_run(tmp_path).path)
    for number in (1, 2):
        _prepare(TextRunDir(tmp_path / "run"), "mt.M4Demo", "", restart=True)
        aside = tmp_path / f"run.before_restart_{number}"
        assert (aside / "checkpoints/5").is_dir()
        assert f"{tmp_path / 'run'} is now in {aside}" in capfd.readouterr().err
        _run(tmp_path)
    assert TextRunDir(tmp_path / "run.before_restart_1").experiment["model"] == "mt.M4Tiny"


def test_restart_moves_nothing_that_is_not_a_run(tmp_path):
    _write(tmp_path / "home" / "letters.txt", "dear")
    _prepare(TextRunDir(tmp_path / "home"), "mt.M4Tiny", "", restart=True)
    assert (tmp_path / "home" / "letters.txt").exists()


def test_restart_leaves_a_run_where_its_beginning_would_be_another_model_s(
    tmp_path, data_dir, capfd
):
    run_dir = _run(tmp_path)
    other = TextRunDir(tmp_path / "other")
    other.Write("mt.M4Tiny", "task.hidden_dim=64", text_artifacts({"source": b"s", "target": b"t"}))
    (other.path / "checkpoints/5").mkdir(parents=True)
    flags = [TINY, f"--logdir={run_dir.path}", f"--data_dir={data_dir}", "--engine=tf_graph"]
    assert trainer.main([*flags, "--restart", f"--init_from={other.path}"]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: --init_from={other.path}: ") and "hidden_dim : 64" in said
    assert (run_dir.path / "checkpoints/5").is_dir()


# --- inspection


def test_inspect_params_reads_back_and_explains_each(capfd):
    flags = [TINY, "--mode=inspect_params", "--max_steps=7", "--model_params_override=task.seed=5"]
    assert trainer.main(flags) == 0
    text = capfd.readouterr().out
    lines = text.splitlines()
    assert "task.seed : 5" in lines and "train.max_steps : 7" in lines
    plain = registry.GetParams(TINY.removeprefix("--model="))
    assert plain.FromText(text).ToText(with_help=True) == text
    for part in text.split("\n\n"):  # the help of each, and its value
        *help_lines, line = part.strip().splitlines()
        assert help_lines and all(part.startswith("# ") for part in help_lines), part
        assert " : " in line and len(max(help_lines, key=len)) <= 100


_INSPECT = """
import resource, sys
from lingvo_moe import trainer
code = trainer.main(["--model=mt.M4MoE2048E36L", "--mode=inspect_model"])
# Not ru_maxrss: what the process was forked from counts in it.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) // 1024
print(code, peak, resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)
"""


def test_a_fresh_process_says_one_line(tmp_path):
    """Neither TensorFlow nor JAX's search for accelerators prints anything."""
    env = dict.fromkeys(("TF_CPP_MIN_LOG_LEVEL", "JAX_PLATFORMS", "XLA_FLAGS"))
    flags = [TINY, f"--logdir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'none'}"]
    done = run_python("-m", "lingvo_moe.trainer", *flags, env=env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr == f"error: --data_dir={tmp_path / 'none'} does not exist\n"


def test_the_600_billion_parameter_model_is_inspected_in_seconds():
    """Within an import and some seconds, in less than 2 GB."""
    done = run_python("-c", _INSPECT, env={"TF_CPP_MIN_LOG_LEVEL": None}, check=True)
    *noise, numbers = done.stderr.splitlines()
    code, megabytes, seconds = numbers.split()
    assert noise == []  # TensorFlow printed nothing
    assert (int(code), int(megabytes) < 2000, float(seconds) < 20) == (0, True, True), numbers
    assert "619,366,506,496 parameters (619.4 billion)" in done.stdout
    moe = next(
        line
        for line in done.stdout.splitlines()
        if "m4.encoder" in line and "ffn.experts.wi" in line
    )
    assert "9x2048x1024x8192" in moe and "LEMH" in moe and "E:expert" in moe
