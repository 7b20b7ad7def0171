"""python -m tools.shortlist, and users of its file: a run's translator, and the model exported with both."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import toy_translation as toy

from lingvo_moe.core.engine.tf_engine import TfEngine
from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
from lingvo_moe.tasks.mt.decoding.shortlist import Shortlist
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, load_translator
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.decoding.saved_functions import ABOUT
from tools import export, shortlist

OPTIONS = TranslateOptions(beam_size=3, top_k=3, max_source_length=16, max_length=14)
_FLAGS = ["--beam_size=3", "--max_source_length=16", "--max_length=14"]
LINES = [
    *toy.sentences(30, seed=3, longest=7),
    *("", "  ", "red", "日本", "\U0001f600", "a\0b", "é" * 40),
]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run")
    toy.save_run(path, toy.train_vocab(toy.sentences(200)), step=3, more=toy.SMALL)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A corpus whose translations equal its sources."""
    path = tmp_path_factory.mktemp("corpus")
    (path / "dev").mkdir()
    for name, seed in (("de.tsv.gz", 1), ("dev/de.tsv.gz", 2)):
        lines = toy.sentences(150, seed=seed, longest=6)
        (path / name).write_bytes(gzip.compress("".join(f"{a}\t{a}\n" for a in lines).encode()))
    return path


@pytest.fixture(scope="module")
def made(logdir, corpus) -> Path:
    file = logdir / "shortlist.npz"
    flags = [f"--logdir={logdir}", f"--data_dir={corpus}", "--per_piece=2", "--frequent=5"]
    assert shortlist.main([*flags, f"--output={file}", "--quiet"]) == 0
    return file


@pytest.fixture(scope="module")
def translator(logdir, made):
    found, about = load_translator(logdir, OPTIONS, shortlist=made)
    assert about["shortlist"] == {"per_source_piece": 2, "every_line": 4 + 256 + 5}
    return found


def test_pieces_are_their_own_candidates(made):
    found = Shortlist.Load(made)
    seen = [piece for piece, row in enumerate(found.candidates) if (row != 2).any()]
    assert len(seen) > 10
    assert all(piece in found.Of([piece]) for piece in seen)
    assert (found.candidates[0] == 2).all()


def test_it_says_what_it_covers(logdir, corpus, tmp_path, capsys):
    flags = [f"--logdir={logdir}", "--per_piece=2", "--frequent=0", "--quiet"]
    flags.append(f"--output={tmp_path / 'some.npz'}")
    assert shortlist.main([*flags, f"--data_dir={corpus}"]) == 0
    first, last, written, command = capsys.readouterr().out.splitlines()
    assert written == f"written: {tmp_path / 'some.npz'}" and "--shortlist=" in command
    assert "2 of" in first and "260 for every line" in first
    assert "of 150 held-out references 100.0% are within their line's shortlist" in last
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "de.tsv").write_text("red\tred\n" * 10)
    assert shortlist.main([*flags, f"--data_dir={bare}"]) == 0
    assert "coverage was not measured" in capsys.readouterr().out


def test_it_looks_at_the_run_s_languages(corpus, tmp_path, capsys):
    (tmp_path / "dev").mkdir()
    for name in ("de.tsv.gz", "dev/de.tsv.gz"):
        (tmp_path / name).write_bytes((corpus / name).read_bytes())
    for name in ("fi.tsv", "dev/fi.tsv", "dev/sw.tsv"):
        (tmp_path / name).write_text("tree\tPUU\n")
    toy.save_run(
        tmp_path / "run", toy.train_vocab(toy.sentences(200)), more="input.languages=['de','fi']"
    )
    flags = [f"--logdir={tmp_path}/run", f"--output={tmp_path}/made.npz", "--quiet"]
    assert shortlist.main([*flags, f"--data_dir={tmp_path}"]) == 0
    assert "of 151 held-out references" in capsys.readouterr().out
    (tmp_path / "dev/de.tsv.gz").unlink()
    (tmp_path / "dev/fi.tsv").unlink()
    assert shortlist.main([*flags, f"--data_dir={tmp_path}"]) == 0
    assert "coverage was not measured: " in capsys.readouterr().out


def test_an_exported_model_has_it_inside(logdir, made, translator, tmp_path, capsys):
    flags = [f"--logdir={logdir}", f"--shortlist={made}", f"--output={tmp_path / 'model'}"]
    assert export.main([*flags, *_FLAGS]) == 0
    assert "beam 3, weights float32, with a shortlist\n" in capsys.readouterr().out
    got, want = SavedTranslator(tmp_path / "model").Translate(LINES), translator.Translate(LINES)
    assert got.translations == want.translations
    np.testing.assert_array_equal(got.scores, want.scores)
    about = json.loads((tmp_path / "model" / ABOUT["translate"]).read_text())
    assert about["shortlist"] == {"per_source_piece": 2, "every_line": 265}


def test_files_that_do_not_fit_are_refused(logdir, made, tmp_path):
    run = tmp_path / "run"
    other = toy.train_vocab(line.upper() for line in toy.sentences(200))
    toy.save_run(run, toy.train_vocab(toy.sentences(200)), target_vocab=other)
    with pytest.raises(DataError, match="made for another target vocabulary than the model's"):
        load_translator(run, OPTIONS, shortlist=made)
    with pytest.raises(ValueError, match="a shortlist is for the search on one host, not over"):
        load_translator(logdir, OPTIONS, shortlist=made, engine=TfEngine())
    with pytest.raises(DataError, match=r"none\.npz: there is no such file; make one with .*"):
        load_translator(logdir, OPTIONS, shortlist=tmp_path / "none.npz")


def test_every_byte_of_the_file_counts(made, tmp_path):
    content, wrong = made.read_bytes(), tmp_path / "wrong.npz"
    with np.load(made) as arrays:  # a plain .npz nevertheless
        assert sorted(arrays)[:2] == ["always", "candidates"]
    changed = [
        content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        for at in range(4, len(content), 97)
    ]
    for data in [*changed, content + b"x", content[:-100]]:
        wrong.write_bytes(data)
        message = r"--shortlist=.*wrong\.npz is damaged, or not of this ver"
        with pytest.raises(DataError, match=message):
            Shortlist.Load(wrong)


@pytest.mark.parametrize("kind", ["text", "directory", "pickled"])
def test_what_is_no_shortlist_is_said_plainly(kind, tmp_path):
    file = tmp_path / "given"
    if kind == "text":
        file.write_text("red house\n")
    elif kind == "directory":
        file.mkdir()
    else:
        with open(file, "wb") as out:
            np.savez(out, np.array([{}]))
    message = r"^--shortlist=.*/given.*tools\.shortlist --logdir=RUN"
    with pytest.raises(DataError, match=message) as e:
        Shortlist.Load(file)
    assert "pickle" not in str(e.value) and "\n" not in str(e.value)


def test_ctrl_c_leaves_nothing(logdir, corpus, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lingvo_moe.tasks.mt.decoding.making_shortlists.lexical_table", interrupted)
    flags = [f"--logdir={logdir}", f"--data_dir={corpus}", f"--output={tmp_path}/new"]
    assert shortlist.main(flags) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
