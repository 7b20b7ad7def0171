"""python -m tools.generate: a run and its export give the same texts, also with TensorFlow alone."""

import json
import subprocess
import sys

import pytest
import toy_text
import toy_translation as toy

from lingvo_moe.tasks.lm.generator import GenerateOptions
from lingvo_moe.tasks.text.decoding.saved_functions import ABOUT
from tools import export, generate, translate

pytestmark = pytest.mark.slow

SAMPLED = ["--temperature=0.8", "--top_p=0.9", "--seed=5", "--max_tokens=12"]
_ALONE = """
import sys, tensorflow as tf, tensorflow_text
generate = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
settings = dict(max_tokens=[12], temperature=[0.8], top_k=[0], top_p=[0.9], seed=[[5, 1]])
settings |= dict(min_p=[0.0], repetition_penalty=[1.0])
out = generate(text=tf.constant(["open"]), **{name: tf.constant(x) for name, x in settings.items()})
assert "lingvo_moe" not in sys.modules
sys.stdout.buffer.write(out["texts"].numpy()[0])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("lm") / "run"
    toy_text.save_run(path)
    return path


@pytest.fixture(scope="module")
def saved(run):
    path = run.parent / "model"
    assert export.main([f"--logdir={run}", f"--output={path}", "--max_length=20"]) == 0
    return path


def test_a_run_and_its_export_give_the_same_texts(run, saved, tmp_path, capfd):
    prompts, out = tmp_path / "prompts", tmp_path / "out"
    prompts.write_bytes(b"red house\nopen\n\n" + b"tree " * 300)
    options = json.loads((saved / ABOUT["generate"]).read_text())["options"]
    assert options.keys() == vars(GenerateOptions()).keys()  # what the server reads
    files = [f"--input={prompts}", f"--output={out}"]
    assert generate.main([f"--saved_model={saved}", *files, "--max_tokens=20"]) == 0
    assert len(out.read_text().split("\n")) == 4
    assert "line 4 is too long: its beginning is not read" in capfd.readouterr().err
    assert generate.main([f"--logdir={run}", *files, *SAMPLED, "--json", "--batch_size=2"]) == 0
    lines = [json.loads(line) for line in out.read_text().split("\n")]
    assert [line["prompt"] for line in lines[:3]] == ["red house", "open", ""]
    assert all(line["finished"] or line["tokens"] == 12 for line in lines)
    alone = [sys.executable, "-c", _ALONE, str(saved)]
    done = subprocess.run(alone, capture_output=True, cwd=tmp_path, check=True)
    assert done.stdout.decode() == lines[1]["text"]


def test_what_does_not_fit_is_refused(run, saved, tmp_path, capfd):
    def said(command, *flags):
        assert command.main([*flags]) == 1
        return capfd.readouterr().err

    toy.save_run(tmp_path / "mt", toy_text.VOCAB, more=toy.SMALL)
    message = said(generate, f"--logdir={tmp_path}/mt")
    assert "is no language model; expected a run of one, e.g. of lm.MoEDemo" in message
    assert "tools.generate" in said(translate, f"--saved_model={saved}")
    output = f"--output={tmp_path}/out"
    assert "--top_k=2: a language model" in said(export, f"--logdir={run}", output, "--top_k=2")
    shortlist = f"--shortlist={tmp_path}/list"
    assert "--shortlist is for translation" in said(export, f"--logdir={run}", output, shortlist)
