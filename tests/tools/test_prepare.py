import gzip
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from processes import run_python

from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.text.data import tsv
from lingvo_moe.tasks.text.data.dev_set import DevSet
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.preparing import read_stage
from lingvo_moe.tasks.text.preparing.workers import run_jobs
from lingvo_moe.tasks.text.runs.artifacts import target_language_of
from tools import prepare

_SYLLABLES = [c + v for c in "bdfgklmnprstvw" for v in "aeiou"]
_SIZES = ["--source_vocab_size=420", "--target_vocab_size=330"]


def _sentence(i: int, words: int = 6) -> str:
    rng = np.random.default_rng(i)
    return " ".join("".join(rng.choice(_SYLLABLES, 2)) for _ in range(words))


def _russian(text: str) -> str:
    return text.translate(str.maketrans("abdefgiklmnoprstuvw", "абдефгиклмнопрстувш"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every form of file, with a mistake in each."""
    directory = tmp_path_factory.mktemp("prepare") / "texts"
    directory.mkdir()
    good = [f"{_sentence(i)[::-1]}\t{_sentence(i)}" for i in range(1500)]
    bad = ["no tab", "x\t", "gleich\tGleich", "Это не то\tthis is not it", "kurz\t" + "long " * 20]
    with gzip.open(directory / "de.tsv.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join([*good, *bad, *good[:7], good[3].upper()]) + "\n")
    lines = [
        json.dumps({"source": _russian(_sentence(i)), "target": _sentence(i), "lang": "ru"})
        for i in range(1000, 1800)
    ]
    lines += [json.dumps({"src": "Glück", "tgt": "luck and more", "lang": "de"}), "{]"]
    (directory / "mixed-pairs.jsonl.zst").write_bytes(
        zstandard.compress("\n".join([*lines, '{"source": "a", "target": "b"}', ""]).encode())
    )
    sources = [f"ŋ{_sentence(i)[1:]}" for i in range(600)]
    (directory / "web.ee").write_text("\n".join(sources) + "\n")
    (directory / "web.en").write_text("\n".join(_sentence(i) for i in range(600)) + "\n")
    return directory


@pytest.fixture(scope="module")
def data(texts: Path) -> Path:
    arguments = [f"--input={texts}", f"--output={texts.parent}/data", "--dev_share=0.05"]
    assert prepare.main([*arguments, *_SIZES, "--pairs_per_shard=100", "--max_dev=40"]) == 0
    return texts.parent / "data"


def _summary(data: Path) -> dict:
    return json.loads((data / "prepared.json").read_text())


def test_every_line_is_accounted_for(data):
    about = _summary(data)
    every = {**about["languages"], **about["left_out"]}
    assert set(about["languages"]) == {"de", "ru", "ee"}
    assert set(about["left_out"]) == {"?"}
    for lang, numbers in every.items():
        lost = sum(numbers["dropped"].values())
        assert numbers["read"] == numbers["kept"] + numbers["dev"] + lost, lang
    assert [every[lang]["read"] for lang in ("de", "ru", "ee", "?")] == [1514, 800, 600, 2]
    dropped = every["de"]["dropped"]
    once = {"no_tab", "empty", "equal_sides", "wrong_script", "length_ratio"}
    assert {reason for reason, n in dropped.items() if n == 1} == once
    assert 6 <= dropped["duplicate"] <= 8
    assert every["?"]["dropped"] == {"bad_json": 1, "no_language": 1}
    assert every["de"]["examples"]["wrong_script"] == ["Это не то | this is not it"]
    for lang in ("de", "ru", "ee"):
        pairs = list(tsv.read_pairs(data / f"{lang}.tsv.gz"))
        assert len(pairs) == every[lang]["kept"] == len(set(pairs))


def test_what_is_held_out_is_held_out_of_all_languages(data):
    dev = {target for _, pairs in DevSet(data).items() for _, target in pairs}
    assert len(dev) > 40
    for lang in ("de", "ru", "ee"):
        assert not dev & {target for _, target in tsv.read_pairs(data / f"{lang}.tsv.gz")}
        assert 5 < len(DevSet(data)[lang]) <= 40


def test_the_trainer_takes_it_as_it_lies(data, tmp_path):
    params = MtInput.Params().Set(
        data_dir=str(data),
        cache_dir=str(tmp_path / "no cache is needed"),
        source_vocab_size=420,
        target_vocab_size=330,
        batch_size=4,
    )
    inputs = params.Instantiate().Prepare()
    assert not (tmp_path / "no cache is needed").exists()
    assert target_language_of(inputs.Artifacts()) == "en"
    about = _summary(data)["languages"]
    assert inputs.languages == {lang: numbers["kept"] for lang, numbers in sorted(about.items())}
    assert len(inputs.records.shards["de"]) > 10
    pairs = list(tsv.read_pairs(data / "de.tsv.gz"))
    source, target = inputs.records.Read(0, 1234)
    assert inputs.vocabs.source.Decode(source.tolist()) == pairs[1234][0]
    assert inputs.vocabs.target.Decode(target.tolist()) == pairs[1234][1]
    tokens = [inputs.records.Read(0, i) for i in range(len(pairs))]
    assert about["de"]["source_tokens"] == sum(len(source) for source, _ in tokens)
    assert about["de"]["target_tokens"] == sum(len(target) for _, target in tokens)
    some = params.Copy().Set(languages=["ru", "ee"]).Instantiate().Prepare()
    assert list(some.languages) == ["ee", "ru"]
    with pytest.raises(DataError, match="saved position of the input is of other data"):
        iter(some).SetState(iter(inputs).GetState())


def test_sizes_that_do_not_match_are_reported_together(data):
    message = (
        r"source.model has 420 ids, .* is 64000; .*target.model has 330 ids, .* is 32000: set --model_params_override="
        r"'input.source_vocab_size=420;.*task.target_vocab_size=330', or run tools.prepare with"
        r" --source_vocab_size=64000 --target_vocab_size=32000$"
    )
    with pytest.raises(DataError, match=message):
        MtInput.Params().Set(data_dir=str(data)).Instantiate().Prepare()


def test_the_table_is_printed(data, texts, capsys, caplog):
    again = ["--dev_share=0.05", *_SIZES, "--pairs_per_shard=100", "--max_dev=40"]
    assert prepare.main([f"--input={texts}", f"--output={data}", *again]) == 0
    out = capsys.readouterr().out
    assert "bad json" in out and "share T=5" in out
    (row,) = [line for line in out.splitlines() if line.startswith("de ")]
    assert row.split()[1] == "1,514"
    assert "de: Это не то | this is not it" in out
    assert "mixed-pairs.jsonl.zst:802: a line that is no JSON object" in caplog.text
    assert not list(data.parent.glob(".*"))


def test_given_held_out_pairs_stay_as_they_are(texts, tmp_path, capsys):
    first = _sentence(1000)
    (tmp_path / "in" / "dev").mkdir(parents=True)
    (tmp_path / "in" / "dev" / "ru.tsv").write_text(f"<b>да</b> \t  {first}\nнет\tno, &amp; no!\n")
    french = {"source": "un chat", "target": "a cat", "lang": "fr"}
    (tmp_path / "in" / "dev" / "sw.jsonl").write_text(json.dumps(french))
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    text = gzip.decompress((texts / "de.tsv.gz").read_bytes())
    (tmp_path / "in" / "de.tsv").write_bytes(text)
    arguments = [f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", *_SIZES]
    assert prepare.main(arguments) == 0
    assert "no pairs are held out of de, so they cannot be scored" in capsys.readouterr().out
    assert DevSet(tmp_path / "out")["ru"] == [("<b>да</b>", first), ("нет", "no, &amp; no!")]
    assert first not in {target for _, target in tsv.read_pairs(tmp_path / "out" / "de.tsv.gz")}
    about = _summary(tmp_path / "out")
    assert about["languages"]["de"]["dropped"]["held_out"] == 1
    assert about["left_out"]["ru"]["dev"] == 2
    assert DevSet(tmp_path / "out")["fr"] == [("un chat", "a cat")]
    assert (tmp_path / "out").is_symlink()


_STOPPED_AT_THE_SECOND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from lingvo_moe.tasks.text.preparing import read_stage
from tools import prepare
run = read_stage._LineReader.Run
def stopped(self, report):
    if os.path.basename(self._job.output) == "00001":
        os.kill(os.getpid(), signal.SIGINT)
    run(self, report)
read_stage._LineReader.Run = stopped
sys.exit(prepare.main(sys.argv[1:]))
"""


def test_stopped_and_gone_on_gives_the_same(texts, data, tmp_path, monkeypatch):
    output = tmp_path / "data"
    flags = [f"--input={texts}", f"--output={output}"]
    flags += ["--dev_share=0.05", *_SIZES, "--pairs_per_shard=100", "--max_dev=40"]
    work = tmp_path / ".data.preparing"
    process = run_python("-c", _STOPPED_AT_THE_SECOND, *flags)
    assert process.returncode == 130, process.stderr
    assert "stopped; the same command resumes from here" in process.stderr
    assert not output.exists()
    done = {path.parent.name for path in work.glob("read-*/*/summary.json")}
    assert "00000" in done
    read: list[str] = []
    run = read_stage._LineReader.Run

    def noted(self, told: Callable[[int], None]) -> None:
        read.append(Path(self._job.output).name)
        run(self, told)

    monkeypatch.setattr(read_stage._LineReader, "Run", noted)
    left, other = tmp_path / ".data.0123456789ab", tmp_path / ".data.of_mine"
    (left / "dev").mkdir(parents=True)  # as a kill leaves it while all is put in place
    other.mkdir()
    assert prepare.main(flags) == 0
    assert other.exists() and not left.exists()
    assert done | set(read) == {"00000", "00001", "00002"} and not done & set(read)
    for name in (
        "de.tsv.gz",
        "dev/ru.tsv.gz",
        "vocab/source.model",
        "records/de-00003.array_record",
    ):
        assert (output / name).read_bytes() == (data / name).read_bytes(), name
    assert not work.exists()


def test_several_processes_give_the_same(texts, data, tmp_path, monkeypatch):
    monkeypatch.setattr("lingvo_moe.tasks.text.preparing.prepare._SMALL", 0)
    arguments = [f"--input={texts}", f"--output={tmp_path / 'data'}", "--workers=2"]
    arguments += ["--dev_share=0.05", *_SIZES, "--pairs_per_shard=100", "--max_dev=40"]
    assert prepare.main(arguments) == 0
    ours, theirs = _summary(tmp_path / "data"), _summary(data)
    for summary in (ours, theirs):
        del summary["made"]
    assert ours == theirs


def test_changed_data_is_not_used(data, tmp_path):
    def inputs(directory: Path) -> MtInput:
        return MtInput.Params().Set(data_dir=str(directory), cache_dir=str(tmp_path)).Instantiate()

    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(data), str(copy)], check=True)
    (copy / "sw.tsv").write_text("moja\tone\n")
    message = r"sw.tsv was added .*tools.prepare again, or delete prepared.json"
    with pytest.raises(DataError, match=message):
        inputs(copy).Prepare()
    (copy / "sw.tsv").unlink()
    (copy / "records" / "de-00002.array_record").unlink()
    sizes = {"source_vocab_size": 420, "target_vocab_size": 330}
    with pytest.raises(DataError, match=r"de-00002.* is missing .*; run tools.prepare again"):
        MtInput.Params().Set(data_dir=str(copy), **sizes).Instantiate().Prepare()


def test_a_temperature_goes_to_the_trainer_and_long_pairs_are_a_warning(
    texts, tmp_path, capsys, monkeypatch
):
    sizes = {"source_vocab_size": 420, "target_vocab_size": 330, "source_length": 12}
    experiment = NestedMap(input=MtInput.Params().Set(**sizes))
    monkeypatch.setattr("lingvo_moe.core.config.registry.GetParams", lambda name: experiment)
    data = tmp_path / "my data"
    arguments = [f"--input={texts / 'web.ee'}", f"--output={data}", "--model=mt.M4Tiny"]
    assert prepare.main([*arguments, "--temperature=1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("target tokens  share T=1")  # and no second such column
    inputs = experiment.input.Set(data_dir=str(data)).Instantiate().Prepare()
    needed = np.array(
        [len(inputs.records.Read(0, i)[0]) + 1 for i in range(inputs.languages["ee"])]
    )
    about = _summary(data)["row_lengths"]
    ordered = np.sort(needed)
    shares = {50: 0.5, 90: 0.9, 95: 0.95, 99: 0.99, 100: 1}
    at = [ordered[int(np.ceil(share * len(ordered))) - 1] for share in shares.values()]
    assert about["percentiles"]["source"] == at
    assert about["loss"]["share"] == np.mean(needed > 12) > 0.01
    (enough, same) = about["loss"]["enough"]
    assert np.mean(needed <= enough) >= 0.99 > np.mean(needed <= enough - 8) and same == 64
    warning = f"{np.mean(needed > 12):.1%} of the pairs are longer than a row (input.source_length=12, input.target_"
    remedy = f"--model_params_override='input.source_length={enough}' keeps 99%"
    assert f"warning: of mt.M4Tiny's rows: {warning}" in out and remedy in out
    assert [warning in line and remedy in line for line in inputs.Warnings()] == [True]
    # The command has what the warning advises, with the rest of the overrides.
    assert out.splitlines()[-1] == (
        f"next: python -m lingvo_moe.trainer --model=mt.M4Tiny --data_dir='{data}' --logdir=RUN"
        f" --model_params_override='input.temperature=1;input.source_length={enough}'"
    )


def _die(job: int, told: Callable[[int], None]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed():
    with pytest.raises(DataError, match=r"one of 2 worker processes was killed.*fewer --workers"):
        run_jobs(_die, [1, 2], 2, lambda done, told, seconds: None)
