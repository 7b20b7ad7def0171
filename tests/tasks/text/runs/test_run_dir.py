"""The description of a run is unchanged since it was written, or the error names the file that changed."""

import json
import os
import re
import shutil

import pytest
import toy_translation as toy

from lingvo_moe.core.config import registry
from lingvo_moe.core.config.class_names import any_class
from lingvo_moe.core.files import files
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.files.manifest import write_manifest
from lingvo_moe.core.runs.run_description import RunDirError
from lingvo_moe.core.runs.run_dir import MANIFEST, MARK
from lingvo_moe.core.runs.run_lock import RunLock
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.mt.mt_model import MtModel
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.training.same_run import check_same_run, prepare_run_dir

DESCRIPTION = ["experiment.json", "params.txt", "vocab/source.model", "vocab/target.model"]
PROGRAM = {
    "name": "train",
    "mesh": "expert:8",
    "hash": "ab" * 32,
    "collectives": {"all-to-all": 12},
}
BEGAN = {"logdir": "/old", "step": 5, "kept": {"source pieces": [310, 320]}}


@pytest.fixture(scope="module")
def vocabs() -> dict[str, bytes]:
    lines = toy.sentences(200)
    other = [line.replace("tree", "rhyddid") for line in lines]
    return {"source": toy.train_vocab(lines), "target": toy.train_vocab(other)}


@pytest.fixture(scope="module")
def written(vocabs, tmp_path_factory):
    path = tmp_path_factory.mktemp("run_dir") / "run"
    run = TextRunDir(path)
    run.Write("mt.M4Tiny", "task.num_experts=4", text_artifacts(vocabs, ["de", "sw"]), BEGAN)
    run.WriteProgram(PROGRAM)
    return path


@pytest.fixture
def run(written, tmp_path) -> TextRunDir:
    return TextRunDir(shutil.copytree(written, tmp_path / "run"))


def _describe(run: TextRunDir, content: str | bytes) -> None:
    """Replaces experiment.json, as anybody who makes a run can."""
    content = content.encode() if isinstance(content, str) else content
    (run.path / "experiment.json").write_bytes(content)
    write_manifest(run.path, MANIFEST, DESCRIPTION)


def _change(run: TextRunDir, **values) -> None:
    found = json.loads((run.path / "experiment.json").read_bytes())
    _describe(run, json.dumps(found | values))


def _read(run: TextRunDir) -> None:
    """Reads the whole description."""
    _ = run.experiment, run.params_text, run.vocabs, run.languages, run.began_from, run.program


# --- reading what was written


def test_what_was_written_is_read(run, vocabs):
    assert run.experiment["model"] == "mt.M4Tiny" and run.Params().task.num_experts == 4
    assert dict(run.vocabs) == vocabs
    assert run.languages == ["de", "sw"] and run.began_from == BEGAN and run.program == PROGRAM
    assert "task.num_experts : 4\n" in run.params_text
    (run.path / "program.json").unlink()
    assert run.program is None  # engines without a compiled step leave none


@pytest.mark.parametrize("killed_at", [0, 1, 4, 5])
def test_killed_while_it_is_described_it_can_be_described_again(
    run, vocabs, monkeypatch, killed_at
):
    """The files are all of the old description, or none of them is used; never a mixture."""
    write, seen = files.atomic_file, []

    def killed(path):
        seen.append(path)
        if len(seen) > killed_at:
            raise KeyboardInterrupt
        return write(path)

    swapped = {"source": vocabs["target"], "target": vocabs["source"]}
    with monkeypatch.context() as patch:
        patch.setattr(files, "atomic_file", killed)
        with pytest.raises(KeyboardInterrupt):
            run.Write("mt.M4Tiny", "", text_artifacts(swapped))
    assert [os.path.basename(path) for path in seen][killed_at:] == [
        ["source.model", "target.model", "params.txt", "experiment.json", MARK, MANIFEST][killed_at]
    ]
    if killed_at == 0:
        assert dict(run.vocabs) == vocabs
    else:
        with pytest.raises(RunDirError):
            _read(run)
    run.Write("mt.M4Tiny", "", text_artifacts(swapped))
    assert dict(run.vocabs) == swapped and run.Params().task.num_experts == 8


# --- damage


@pytest.mark.parametrize("name", ["params.txt", "vocab/target.model", MANIFEST])
def test_a_pipe_in_place_of_a_file_is_not_read(run, name):
    (run.path / name).unlink()
    os.mkfifo(run.path / name)  # which would never end
    with pytest.raises(RunDirError, match=f"{re.escape(name)}.* is missing"):
        _read(run)


@pytest.mark.parametrize("lost", ["params.txt", "vocab/source.model"])
def test_a_list_that_lacks_a_file_is_refused(run, lost):
    write_manifest(run.path, MANIFEST, set(DESCRIPTION) - {lost})
    with pytest.raises(RunDirError, match=f"{re.escape(lost)} is not in {MANIFEST}"):
        _read(run)


def test_a_program_of_before_there_were_digests_says_what_to_do(run):
    (run.path / "program.json").write_text(json.dumps(PROGRAM, indent=1))
    with pytest.raises(RunDirError, match=r"program\.json: was changed .*older version; delete it"):
        _ = run.program


# --- files that somebody else wrote


_WHOLE = {"model": "mt.M4Tiny", "params_override": "", "files": ["s", "t"], "input": {}}
_OLD = {"model": "mt.M4Tiny", "params_override": "", "vocab": {"source": "s", "target": "t"}}


@pytest.mark.parametrize("content, message", [
    ("5", "must be an object with model, .*but is 5"),
    ("{}", "model and params_override and files and input missing"),
    ("9" * 5000, "not JSON"),
    (b'{"model": "\xff"}', "not UTF-8, at byte 11"),
    ("[" * 1_000_000, "brackets are too deep"),
    (_WHOLE | {"model": 5}, "model must be a string, but is 5"),
    (_OLD | {"vocab": {"source": "s"}}, "vocab must be an object with the strings source and"),
    (_OLD | {"vocab": {"source": "s", "target": "t\0"}}, "vocab must be an object"),
    (_OLD | {"languages": "de"}, "languages must be a list of strings, but is 'de'"),
    (_WHOLE | {"files": ["s", 1]}, "files must be a list of strings"),
    (_WHOLE | {"input": ["de"]}, "input must be an object"),
    (_WHOLE | {"began_from": BEGAN | {"step": True}}, "began_from must be an object"),
    (_WHOLE | {"began_from": BEGAN | {"kept": {"a": [1]}}}, "began_from must be an object"),
])  # fmt: skip
def test_a_description_of_another_shape_is_refused(run, content, message):
    _describe(run, json.dumps(content) if isinstance(content, dict) else content)
    with pytest.raises(RunDirError, match=f"experiment.json: .*{message}"):
        _ = run.experiment


@pytest.mark.parametrize(
    "content", ["null", json.dumps(PROGRAM | {"collectives": [1]}), "[" * 100_000]
)
def test_a_program_of_another_shape_is_refused(run, content):
    (run.path / "program.json").write_text(content)
    with pytest.raises(RunDirError, match=r"program\.json: "):
        _ = run.program


@pytest.mark.parametrize(
    "outside", ["/etc/hostname", "vocab/../../secret", "vocab/../vocab/source.model"]
)
def test_a_path_that_leads_out_of_the_run_is_refused(run, outside):
    (run.path.parent / "secret").write_bytes((run.path / "vocab/source.model").read_bytes())
    _change(run, files=["vocab/source.model", outside])
    message = rf"experiment\.json: lists '{re.escape(outside)}', which is not in the run"
    for read in (lambda: run.vocabs, run.Task):
        with pytest.raises(RunDirError, match=message):
            read()


def test_a_run_of_an_older_version_is_read(run, vocabs):
    new = json.loads((run.path / "experiment.json").read_bytes())
    old = {key: new[key] for key in ("model", "params_override", "began_from")}
    names = {"source": "vocab/source.model", "target": "vocab/target.model"}
    _describe(run, json.dumps(old | {"languages": ["de", "sw"], "vocab": names}))
    assert run.experiment == {key: new[key] for key in new if key != "version"}
    assert dict(run.vocabs) == vocabs and run.languages == ["de", "sw"]


def test_a_run_of_another_task_is_no_translation_model(tmp_path):
    TextRunDir(tmp_path).Write("image.Digits", "", RunArtifacts())
    with pytest.raises(RunDirError, match=r"--logdir=.*: ImageClassifier is no translation model"):
        TextRunDir(tmp_path).Task(MtModel)


def test_a_run_of_another_task_is_no_run_of_translation(run):
    _change(run, files=[], input={})
    with pytest.raises(
        RunDirError, match=r"keeps no vocab/source\.model: it is no run of a model of texts"
    ):
        _ = run.vocabs
    _change(run, input={"languages": "de"})
    with pytest.raises(RunDirError, match="languages must be a list of strings"):
        _ = run.languages


@pytest.mark.parametrize("name", ["train/metrics.jsonl", "experiment.json"])
def test_an_input_keeps_nothing_in_place_of_the_runs_own_files(run, name):
    with pytest.raises(RunDirError, match=f"{name}.* is a place of the run itself"):
        run.Write("mt.M4Tiny", "", RunArtifacts({name: b""}))


@pytest.mark.parametrize("name", ["vocab", "experiment.json"])
def test_a_link_that_leads_out_of_the_run_is_neither_read_nor_written(run, vocabs, name):
    outside = run.path.parent / "outside"
    (run.path / name).rename(outside)
    (run.path / name).symlink_to(outside)
    message = f"{name}.* is a link that leads out of the run, to {outside}"
    with pytest.raises(RunDirError, match=message):
        _ = run.vocabs
    before = outside.is_file() and outside.read_bytes()
    with pytest.raises(RunDirError, match="leads out of the run"):
        run.Write("mt.M4Tiny", "", text_artifacts(vocabs))
    assert before == (outside.is_file() and outside.read_bytes())


def _prepare(run_dir, override, lock):
    params = registry.GetParams("mt.M4Tiny", override)
    prepare_run_dir(run_dir, "mt.M4Tiny", override, params, lock, restart=False)


@pytest.mark.parametrize("place", ["train/metrics.jsonl", "checkpoints"])
def test_a_trainer_does_not_go_on_where_it_would_write_elsewhere(run, place):
    outside = run.path.parent / "outside"
    outside.mkdir()
    (run.path / place).parent.mkdir(exist_ok=True)
    (run.path / place).symlink_to(outside)
    message = f": {place} is a link that leads out of the run, to {outside}"
    with pytest.raises(RunDirError, match=message), RunLock(run.path) as lock:
        _prepare(run, "task.num_experts=4", lock)


def test_links_within_a_run_and_to_a_run_are_followed(run, vocabs):
    link = run.path.parent / "link"
    link.symlink_to(run.path)
    (run.path / "vocab/source.model").rename(run.path / "vocab/kept.model")
    (run.path / "vocab/source.model").symlink_to("kept.model")
    assert dict(TextRunDir(link).vocabs) == vocabs


@pytest.mark.parametrize("values, message", [
    ({"model": "os.path"}, "'os.path' is not of lingvo_moe, so it is not imported"),
    ({"model": "mt.M4Tinny"}, "no such experiment"),
])  # fmt: skip
def test_an_experiment_that_is_not_there_is_an_error_of_the_file(run, values, message):
    _change(run, **values)
    told = rf"^{re.escape(str(run.path))}/experiment\.json: .*{message}"
    with pytest.raises(RunDirError, match=told):
        run.Params()


def test_a_class_that_is_no_task_is_an_error_of_the_file(run):
    """Also where somebody put it there: the list of files can be written by anybody."""
    file = run.path / "params.txt"
    cls = "task.cls : type/lingvo_moe.core.moe.routers.top2/Top2Router"
    text = re.sub(r"(?m)^task\.cls : .*$", cls, file.read_text())
    file.write_text(text)
    run.ListFiles()
    with pytest.raises(RunDirError, match=r"params\.txt: mt\.M4Tiny cannot be what this run was"):
        run.Params()


def test_another_program_s_file_of_the_same_name_is_not_replaced(tmp_path):
    content = b'{"lr": 0.1}'
    (tmp_path / "experiment.json").write_bytes(content)
    with RunLock(tmp_path) as lock:
        with pytest.raises(RunDirError, match=r"holds an experiment\.json that is no run's"):
            _prepare(TextRunDir(tmp_path), "", lock)
    assert (tmp_path / "experiment.json").read_bytes() == content


@pytest.mark.parametrize("module", ["input.pipeline", "input.mt_input"])
def test_a_run_goes_on_whose_classes_were_in_modules_of_other_names(run, module):
    file = run.path / "params.txt"
    text = file.read_text().replace("mt.mt_model/", "mt.model/")
    file.write_text(text.replace("mt.mt_input/", f"mt.{module}/"))
    run.ListFiles()
    assert f"mt.{module}/MtInput" in file.read_text()
    check_same_run(run, run.Params(), "name another directory")
    assert any_class(f"type/lingvo_moe.tasks.mt.{module}/MtInput") is MtInput
