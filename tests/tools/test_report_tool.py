"""python -m tools.report on a run: its page, and the counts of a model whose routing is known."""

import json
from pathlib import Path

import numpy as np
import pytest
import toy_translation as toy

from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary
from tools import report

pytestmark = pytest.mark.slow

E, MOST = 8, 23  # of mt.M4Tiny: experts, ids of a row beside eos or bos
_PAIRS = {"de": (3, 4), "fi": (2, 40), "sw": (1, 3)}  # how many, and the words of the longest


def _lines(lang: str) -> list[tuple[str, str]]:
    number, longest = _PAIRS[lang]
    sides = [toy.sentences(number, seed, longest) for seed in (len(lang) + number, number)]
    return list(zip(*sides))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    (path / "dev").mkdir()
    for lang in _PAIRS:
        text = "".join(f"{a}\t{b}\n" for a, b in _lines(lang))
        (path / "dev" / f"{lang}.tsv").write_text(text)
    return path


@pytest.fixture(scope="module")
def vocab() -> bytes:
    return toy.train_vocab(toy.sentences(200), bytes_too=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory, vocab) -> Path:
    """An MoE layer in encoder and decoder; random weights."""
    path = tmp_path_factory.mktemp("run")
    toy.save_run(path, vocab, step=3, more="task.repeat=False")
    (path / "train").mkdir()
    rows = [
        {"step": step, "moe/encoder/over_capacity_1_ratio": [0.25 * (step == 19)]}
        for step in range(20)
    ]
    (path / "train/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_page_and_its_figures(run, corpus, tmp_path, capfd):
    page, pictures = tmp_path / "page.html", tmp_path / "pictures"
    flags = [f"--data_dir={corpus}", f"--out={page}", f"--png_dir={pictures}", "--batch_size=2"]
    assert report.main([f"--logdir={run}", *flags]) == 0
    out, err = capfd.readouterr()
    assert "report: 3 of 3 languages" in err and str(page) in out.replace("\n", "")
    numbers = json.loads((tmp_path / "page.json").read_text())["routing"]
    assert numbers["step"] == 3 and numbers["num_experts"] == E
    assert numbers["pairs"] == {lang: number for lang, (number, _) in _PAIRS.items()}
    names = [layer["name"] for layer in numbers["layers"]]
    assert names == ["encoder/layer_1", "decoder/layer_1"]
    assert sorted(p.name for p in pictures.iterdir()) == sorted(
        f"{name.replace('/', '_')}.png" for name in names
    )
    text = page.read_text()
    assert text.count("<figure class='drawing wide'><svg") == 2
    assert "python -m tools.evaluate" in text and f"no scores: there is no {run}/eval" in out

    # Of 20 summaries the last two.
    assert numbers["layers"][0]["training"] == {"over_capacity_1_ratio": 0.125}
    assert numbers["layers"][1]["training"] == {}


def test_a_preference_shows(corpus, vocab, tmp_path):
    """The encoder routes by language, expert 5 - u for language u; the decoder by the token's number."""
    router = "task.moe.router=top_k;task.moe.router.k=1;task.moe.router.level=task"
    tasks = "task.moe.router.num_tasks=4;task.decoder_router=hash"
    more = f"{router};{tasks};task.decoder_router.table=modular;task.repeat=False"
    languages = ["sw", "xx", "de", "fi"]  # not in the order of the corpus

    def planted(name: str, value: np.ndarray) -> np.ndarray:
        if name.endswith("router.task_emb"):
            return np.eye(*value.shape[1:], dtype=np.float32)[np.newaxis]
        if name.endswith("router.wg"):
            value = np.zeros_like(value)
            value[0, range(4), [5, 4, 3, 2]] = 9.0
        return value

    run = tmp_path / "run"
    toy.save_run(run, vocab, more=more, languages=languages, planted=planted)
    flags = [f"--logdir={run}", f"--data_dir={corpus}", "--quiet", f"--tables_dir={tmp_path}"]
    assert report.main(flags) == 0
    encoder, decoder = json.loads((run / "report.json").read_text())["routing"]["layers"]
    assert (encoder["router"], decoder["router"]) == ("TopKRouter", "HashRouter")
    # A logit of 9, and seven of 0.
    chosen, other = np.exp([9.0, 0.0]) / (np.exp(9.0) + E - 1)
    entropy = -chosen * np.log(chosen) - (E - 1) * other * np.log(other)
    for lang, expert in {"sw": 5, "de": 3, "fi": 2}.items():
        tokens = encoder["tokens"][lang]
        assert tokens == sum(
            len(Vocabulary(vocab).Encode(text)[:MOST]) + 1 for text, _ in _lines(lang)
        )
        assert encoder["unrouted"][lang] == 0
        assert encoder["expert_load_max_over_mean_by_language"][lang] == E
        assert encoder["probability"][lang][expert] == pytest.approx(tokens * chosen, rel=1e-4)
        assert encoder["entropy"][lang] == pytest.approx(tokens * entropy, rel=1e-3)
        assert encoder["first"][lang] == (tokens * (np.arange(E) == expert)).tolist()
        ids = [Vocabulary(vocab).Encode(text)[:MOST] for _, text in _lines(lang)]
        ids = np.concatenate([[1, *one] for one in ids])
        assert decoder["first"][lang] == np.bincount(ids % E, minlength=E).tolist()
    # The decoder's choices by id are those that it was built with, but for ids of experts that are full.
    table_LV = np.load(tmp_path / "decoder.npy")
    ids = np.unique(ids)
    assert len(table_LV) == 1 and np.mean(table_LV[0, ids] % E == ids % E) > 0.8
    assert encoder["dead_experts"] == E - 3
    assert encoder["language_bits"] == pytest.approx(np.log2(3), abs=0.05)
    assert decoder["language_bits"] < 0.5 and decoder["gate_entropy"] is None


def test_a_model_without_experts_routes_nothing(tmp_path, vocab, corpus, capfd):
    TextRunDir(tmp_path).Write(
        "mt.M4Tiny", "task.num_experts=0", text_artifacts({"source": vocab, "target": vocab})
    )
    assert report.main([f"--logdir={tmp_path}", f"--data_dir={corpus}"]) == 0
    assert "no routing: the model is dense" in capfd.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["routing"] is None
