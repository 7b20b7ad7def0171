"""Every command refuses a mistake in one line, which says the flag and what is wrong, and leaves nothing behind.

A row of the tables is a command, in a directory with the files of `place`, and a part of what it answers.
"""

import gzip
import importlib
import random
import shlex
from pathlib import Path

import pytest
import toy_translation as toy

from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

# Mistakes in flags are refused before anything is read, with status 2.
_FLAGS = """
translate --saved_modl=x | no flag --saved_modl (did you mean '--saved_model'
translate | give exactly one of --saved_model and --logdir
translate --saved_model=x --logdir=y | give exactly one of --saved_model and --logdir
translate --saved_model=x --batch_size=0 | --batch_size=0: must be an integer of at least 1
translate --logdir=x --beam_size=0 | --beam_size=0: must be an integer from 1 to
translate --logdir=x --max_source_length=9999999 | --max_source_length=9999999: must be an integer from 1 to 1000000
translate --logdir='~/run' | --logdir=~/run: '~' is only replaced by a shell
translate --saved_model=s3://b/m --input=x --output=y --runner=FnApiRunner | --saved_model=s3://b/m goes without
translate --saved_model=x --trust_run | --trust_run goes with --logdir
translate --saved_model=x --shortlist=s | --shortlist=s goes with --logdir
translate --saved_model=x --weights=int8 | --weights=int8 goes with --logdir
evaluate --saved_model=x --max_per_language=0 | --max_per_language=0
generate --logdir=x --max_tokens=2000000 | --max_tokens=2000000: must be an integer from 1 to 1000000
generate --logdir=x --length_alpha=0.5 | goes with a --beam_size of 2 or more
generate --logdir=x --length_alpha=0.5 --beam_size=1 | greedy search has one text
evaluate --logdir=x --length_alpha=nan | --length_alpha=nan: must be a number in
translate --logdir=x --nbest=5 | --nbest=5 goes with a --beam_size of as many, not of 4
translate --logdir=x --temperature=1 --beam_size=2 | --beam_size=2 does not go with --temperature
translate --saved_model=x --temperature=1 | --temperature=1.0 goes with --logdir
translate --logdir=x --seed=3 | --seed=3 goes with --temperature or --noise
translate --logdir=x --noise=0.1,0.1 | must be DROP,BLANK,SHUFFLE, e.g. 0.1,0.1,3
evaluate --logdir=x --resource_bounds=5,7 | HIGH must be more than MID
export --logdir=x | --output is required
export --logdir=x --output=y --top_k=0 | --top_k=0: must be an integer of at least 1
export --logdir=x --output=y --checkpoint_step=-1 | --checkpoint_step=-1: must be
score --logdir=x --language=de --language_column=3 | --language=de does not go with --language_column=3
score --logdir=x --average_last=0 | --average_last=0: must be an integer of at least 1
serve --saved_model=x --max_connections=1000000000 | must be an integer from 1 to 65536
serve --saved_model=x --read_timeout=0 | --read_timeout=0: must be a positive number
serve --saved_model=x --max_waiting_lines=5 | must be at least --max_lines, 128
serve --saved_model=x --server_names=http://a | 'http://a' must be a host's name alone
serve --saved_model=x --name=a/b | --name=a/b: must have letters, digits, - and _ only
serve --saved_model=x --beam_size=2 | --beam_size=2 goes with --logdir, which is not given
serve --saved_model=x --use_ema | it was fixed when the model was exported
build_corpus --output=x --langs=de | did you mean '--languages'
build_corpus --output=x --packages=, | --packages=,: must name at least one
prepare --output=x | nothing to read: give --input or --tfds
prepare --output=y --input=x --target_lang=../x | --target_lang=../x: must be the code of a language, e.g. en
prepare --output=y --input=x --workers=100000 | --workers=100000: must be an integer from 1 to 1024
prepare --output=y --input=x --temperature=nan | --temperature=nan: must be a positive number
prepare --output=y --input=x --max_ratio=0.5 | --max_ratio=0.5: must be a number of at least 1
prepare --output=y --input=x --dev_share=1 | --dev_share=1: must be a number in [0, 1)
prepare --output=y --input=x --json_fields=a | --json_fields=a: must be two or three names
train_vocab --data_dir=x --output=y --source_size=9 | --source_size=9: must be
train_vocab --data_dir=x --output=y --max_sentences=5 | must be an integer of at least 100
shortlist --logdir=run --output=new --per_piece=0 | --per_piece=0: must be an integer of at least 1
explain | give either --model or --program
explain --program=x --html=e --json=./e | --html and --json are both ./e; name two
explain --program=x --mesh=expert:8 | --mesh=expert:8 goes with --model, which is not given: it was fixed when
explain --model=mt.M4Tiny --mesh=expert:4 --num_devices=4 | does not go with --mesh=expert:4
explain --model=mt.M4Tiny --num_devices=1 | --num_devices=1: must be an integer from 2 to
verify | --model is required; --model alone lists all
verify --model=x --strategy=auto | only the trainer searches
verify --model=x --strategy=auto | run python -m tools.parallelize
plan --model=x --strategy=auto | only the trainer searches
plan --model=x --strategy=auto | run python -m tools.parallelize
plan --model=mt.M4Tiny | --model and --topology go together
plan | nothing to do
plan --compare=x --output=x.json | --output=x.json goes with --model
plan --model=mt.M4Tiny --topology=v3:2x2 --token_budget=inf | must be a positive number
plan --model=x --topology=v3:2x2 --what=serve | --what=serve goes with --prompt and --reply
plan --model=x --topology=v3:2x2 --slo=9s/9s | --slo=9s/9s goes with --what=serve
plan --model=x --topology=v3:2x2 --what=serve --slo=200 | '200' is no pair of times
plan --compare=x --variants=|a=1 | --variants=|a=1 goes with --model, which is not given: it is of a new plan
plan --topolgy=v3:2x2 | did you mean '--topology'
compare_experts --only=top2_e15 | did you mean
reproduce --only=T96L | --only=T96L: no 'T96L' (did you mean
reproduce --only=open | --only=open goes with --plans
goodput | nothing to do: give --logdir, or --predict
goodput --logdir=x --announced=0.3 | --announced=0.3 goes with --predict
goodput --predict --mtbf=3 | --mtbf=3: must be a positive number with a unit, e.g. 90s
goodput --predict --mtbf=1000000000000000000000000000000000000000s | must be a positive number with a unit
goodput --predict --mtbf=3h --announced=2 | --announced=2: must be a number
benchmarks.gpu.programs --output=x --kinds=indx | 'indx' (did you mean 'index'
benchmarks.gpu.programs --output=x --experts=8,1 | --experts=8,1: must be an integer of at least 2
benchmarks.gpu.train --programs=x --points=20,10 | --points=20,10: must rise
benchmarks.gpu.train --programs=x --points=, | --points=,: must be an integer of at least 1
benchmarks.decode --only=here,hf | --only=hf needs --peers
benchmarks.decode --from=DATA --only=here_mq | with --from it is some of here, ct2
benchmarks.generate --model=x --only=hf | --only=hf needs --peers
benchmarks.partition_scaling --partitions=1,2 | --partitions=1,2: must be an integer of at least 2
benchmarks.partition_scaling --partitions=x | --partitions=x
benchmarks.partition_scaling --forms=fast | --forms=fast
benchmarks.quality_peers --corpus=x --output=y --only=expert | no 'expert' (did you mean 'experts'?)
benchmarks.quality_peers --corpus=x --output=y --routers=hashed | no 'hashed' (did you mean 'hash'?)
benchmarks.quality_peers --corpus=x --output=y --experts=0 | --experts=0: must be an integer of at least 1
benchmarks.quality_peers --corpus=x --output=y --only=joeynmt | --only=joeynmt needs --peers
benchmarks.quality_peers --corpus=x --output=y --seeds=1,x | --seeds=1,x: must be an integer of at least 1
benchmarks.quality_peers --corpus=x --output=y --cpu_seconds=0 | cpu_seconds
"""
# What cannot be done is said with status 1; outputs are checked first, so these rows name inputs that are not there.
_WORK = """
translate --saved_model=none --input=lines.txt --output=out | no SavedModel there
translate --saved_model=empty --input=none --output=out | No such file
translate --logdir=none --input=lines.txt --output=out | no such directory
translate --saved_model=none --input=lines.txt --output=empty | --output=empty is a directory; name a file
translate --saved_model=none --input=lines.txt --output=none/out | --output=none/out: there is no directory
evaluate --saved_model=none | --data_dir is needed
evaluate --logdir=empty | no run there
evaluate --logdir=empty --data_dir=none | does not exist
evaluate --logdir=empty --data_dir=empty | no dev directory
evaluate --logdir=run --data_dir=corpus --languages=sv | no language 'sv' (known: de, fi, sw)
evaluate --saved_model=none --output=lines.txt | --output=lines.txt is a file; name a directory
export --logdir=empty --output=out | no run there
export --logdir=empty --output=out --top_k=9 | --top_k=9: must be an integer from 1 to 4
export --logdir=none --output=lines.txt | --output=lines.txt is a file; name a directory
export --logdir=none --output=lines.txt/deeper/out | lines.txt is not a directory
serve --port=0 --saved_model=/nowhere | /nowhere: no SavedModel there
serve --port=99999 --saved_model=x | --port=99999: at most 65535
serve --port=0 --saved_model=x --host=no.such.host.invalid | --host=no.such.host.invalid:
shortlist --logdir=run --output=empty | is a directory; name a file
shortlist --logdir=run --output=new --data_dir=none | does not exist
shortlist --logdir=empty --output=new | no run there
report --logdir=none | --logdir=none: no such directory
report --logdir=run --data_dir=corpus --languages=sv | no language 'sv' (known: de, fi, sw)
report --logdir=run --data_dir=corpus --checkpoint_step=4 | step 4: there is no such checkpoint; there are [3]
report --logdir=run --data_dir=none | none
report --logdir=run --out=/nowhere/page.html | --out=/nowhere/page.html: there is no directory /nowhere
report --logdir=run --out=page.json | name the page, e.g. report.html
report --logdir=run --no_routing --out=run/experiment.html | --out=run/experiment.json would change
build_corpus --output=new --languages=de,xx | --languages: no translations from 'xx'
build_corpus --output=new --packages=Djang | is not installed (did you mean 'Django'
build_corpus --output=new --languages=deu | 'de'
build_corpus --output=lines.txt --languages=xx | --output=lines.txt is a file; name a directory
train_vocab --data_dir=none --output=new | data directory
train_vocab --data_dir=none --output=lines.txt | --output=lines.txt is a file; name a directory
prepare --input=same --output=new | no pair is left of the input: 3 x source and target are the same
prepare --input=same --output=corpus | --output=corpus holds 'dev', which is no part of prepared data
prepare --input=none --output=new | --input=none does not exist
prepare --input=short --output=new | x.de has 2 lines and short/x.en has 3: the lines of a pair
prepare --input=cut --output=new | cannot be read, damaged or cut short
prepare --input=same --output=new --columns=lang,source,target | no line can be used: 3 x a TSV line with too few
explain --model=mt.M4Tyni | did you mean 'mt.M4Tiny'
explain --program=/none | program /none: No such file
explain --model=mt.M4Tiny --mesh=expert:3 | does not divide over the 3 devices
explain --model=mt.M4Tiny --html=/none/x | --html=/none/x: there is no directory /none
explain --model=mt.M4Tiny --json=/ | --json=/ is a directory
plan --model=mt.M4Tiny --topology=v3 --mesh=foo | --mesh='foo': 'foo' is not
plan --model=mt.M4Tiny --topology=v3:2x2 --cache_dir=/proc/x | --cache_dir=/proc/x: no permission to write in /proc
plan --model=mt.M4Tiny --topology=v3 --mesh=d:4 --variants=train.mesh=d:2 | --mesh=d:4: --variants has train.mesh=d:2
plan --model=mt.M4Tiny --topology=v3:2x2 --price=v4:2 | no plan is for v4
plan --model=mt.M4Tiny --topology=v5p:2x2x1 --variants=|task.droput=0.1 | did you mean 'dropout'
plan --model=mt.M4Tiny --topology=v3:2x2*2 | between slices of v3 is published
plan --compare=/nowhere.json | --compare=/nowhere.json: No such file
verify --model=toy_task.Line --mesh=data:2 | LinearModel cannot be verified: it has no Shrink(task, inputs, mesh)
verify --model=toy_attention.Right --mesh=a:1 | mesh a:1 has 1 devices; give --mesh of 2 to 64
goodput --logdir=run | run/time.jsonl: there is no such file
goodput --predict --mtbf=3h | --predict needs --save_seconds and --restart_seconds, or --logdir of a run
goodput --predict --json=/ | --json=/ is a directory
reproduce --docs=docs | M4MoE2048E36L-v3_32x32-decode.json: not JSON
benchmarks.gpu.layer --programs=empty | --programs=empty: manifest.json: No such file
benchmarks.gpu.layer --programs=later | --programs=later: manifest.json is not of version 1
benchmarks.gpu.train --programs=empty | --programs=empty: manifest.json: No such file
benchmarks.gpu.layer --programs=empty --output=/nowhere/x | --output=/nowhere/x: there is no directory /nowhere
benchmarks.gpu.train --programs=empty --output=/nowhere/x | --output=/nowhere/x: there is no directory /nowhere
benchmarks.moe_layer --output=/nowhere/x | --output=/nowhere/x: there is no directory /nowhere
benchmarks.moe_layer --plot=/nowhere/x | --plot=/nowhere/x: there is no directory /nowhere
"""


def _rows(table: str) -> list[tuple[str, str]]:
    return [tuple(line.split(" | ")) for line in table.strip().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without weights, a corpus, a file of lines, and inputs that cannot be used."""
    place = tmp_path_factory.mktemp("place")
    vocab = toy.train_vocab(toy.sentences(200))
    TextRunDir(place / "run").Write(
        "mt.M4Tiny", "", text_artifacts({"source": vocab, "target": vocab})
    )
    texts = {
        "lines.txt": "red\n",
        "run/checkpoints/3/x": "",
        "same/de.tsv": "eins\tEins\nzwei\tzwei\ndrei\tDREI\n",
        "short/x.de": "eins\nzwei\n",
        "short/x.en": "one\ntwo\nthree\n",
        "later/manifest.json": '{"version": 2}',
        "docs/plans/M4MoE2048E36L-v3_32x32-decode.json": "{",
        **{f"corpus/dev/{lang}.tsv": "red\ttree\n" for lang in ("de", "fi", "sw")},
    }
    for name, text in texts.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    for name in ("empty", "cut"):
        (place / name).mkdir()
    noise = random.Random(0).randbytes(9000).hex()
    (place / "cut/sw.tsv.gz").write_bytes(gzip.compress(f"a\t{noise}\n".encode())[:-1000])
    return place


def _files(place: Path) -> list[Path]:
    """All but the work of tools.prepare that could go on, in a hidden directory."""
    found = [path.relative_to(place) for path in place.rglob("*")]
    return sorted(path for path in found if not path.parts[0].startswith("."))


def _status(command: str) -> tuple[str, int]:
    """The first word of a command's messages, and the status with which it ends."""
    name, *argv = shlex.split(command)
    module = importlib.import_module(name if "." in name else f"tools.{name}")
    try:
        return name.rpartition(".")[2], module.main(argv)
    except SystemExit as e:
        return name.rpartition(".")[2], e.code


@pytest.mark.parametrize(("command", "message"), _rows(_FLAGS))
def test_flags_that_make_no_sense(command, message, capsys):
    name, status = _status(command)
    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith(f"{name}: ") and message in said


@pytest.mark.parametrize(("command", "message"), _rows(_WORK))
def test_what_cannot_be_done(command, message, place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    before = _files(place)
    name, status = _status(command)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith(f"{name}: ")]
    assert (status, len(said)) == (1, 1)
    assert message in said[0]
    assert _files(place) == before
