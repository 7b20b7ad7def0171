"""Every flag of every command changes what the command does, or is refused by name: none is ignored without a word.

A command runs with stand-ins for its slow parts, without a flag and with it, for each flag in each of some situations.
"""

import contextlib
import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import toy_translation
from apache_beam_installed import A_CORPUS, NO_BEAM
from stand_ins import Done, StandIns, Through, anything, scorer

from lingvo_moe import trainer
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.pages.tables import Table, words
from lingvo_moe.core.runs.goodput import PARTS, Goodput
from lingvo_moe.core.runs.run_dir import RunDir
from lingvo_moe.core.runs.saved_steps import LIST
from lingvo_moe.tasks.image.evaluation import Scores
from lingvo_moe.tasks.text.corpus.corpus import Built
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from tools.import_graph import ROOT

_GOLDEN = ROOT / "tests/plans/M4Tiny-v3_2x2.json"
_RUN, _MODEL, _OF_TWO = "--logdir=RUN", "--saved_model=MODEL", "--num_processes=2"
# By name: another value than the default. Numbers and switches have one by themselves.
_SETTABLE = """
input=lines.txt output=out json=out.json html=out.html out=page.html png_dir=pictures tables_dir=tables
eval_dir=DATA cache_dir=CACHE data_dir=OTHER corpus=DATA docs=DOCS shortlist=lines.txt
baselines=DATA logdir=IMAGES saved_model=OTHER program=lines.txt init_from=RUN dtype=bfloat16 compare=plan.json
strategy=strategy.txt layout=tp model=mt.M4Demo mesh=expert:4 topology=v3:2x2 price=v3:2
model_params_override=task.hidden_dim=64 variants=|task.hidden_dim=64 what=decode language=de
languages=aa bleu_tokenizer=char top_p=0.5 target_lang=de resource_bounds=9,2 checkpoint_step=5 init_from_step=best
engine=tf_graph tensor=loss known_faults=warn objective=smallest activations=bfloat16 weights=int8
host=0.0.0.0 field=other server_names=mt.example.org name=other columns=target,source json_fields=a,b
tfds=opus/medical packages=Babel demo.model=mt.M4Tiny compare_experts.only=dense
reproduce.only=M4MoE2048E36L-v3_32x32 coordinator_address=host:1 mode=inspect_params memory=4
user_symbols=<a> language_column=3 num_devices=4 max_waiting_lines=99999 max_lines=7 average_last=2
source_vocab_size=300 target_vocab_size=300 vocab_sentences=500 batch_size=1 max_per_language=2 noise=0,1,0
dump_programs=programs steps=7 dev_share=0.5 max_steps=7 mtbf=2h interval=9min announced=0.25 runner=SparkRunner
runner_option=parallelism=2 slo=9s/9s batches=4 stop=END tasks=arc min_p=0.1 n=2 from=RUN system=Hi draft=TEXTS
"""
_SETTABLE = dict(pair.split("=", 1) for pair in _SETTABLE.split())
# The trainer's flags go with --mode=eval, too, so that its command only needs that flag.
_OF_THE_TRAINER = (
    "engine num_devices mesh known_faults verify coordinator_address num_processes process_id init_from "
    "init_from_step trust_run layout"
)


@dataclass
class Command:
    """A command under test.

    Attributes:
        module: its name below tools, or the trainer's.
        replaced: by 'module:attribute', see StandIns.
        situations: flags with which it runs.
        harmless: by a flag of a situation ('' for all), those that may be without effect beside it.
    """

    module: str
    replaced: Mapping[str, Any]
    situations: Sequence[Sequence[str]]
    harmless: Mapping[str, str] = field(default_factory=dict)


def _lines(lines: Sequence[Any], languages: Any = None) -> NestedMap:
    count = len(lines)
    print(count, languages)
    return NestedMap(
        translations=[["a"]] * count, scores=np.zeros((count, 1)), truncated=[False] * count
    )


def _texts(prompts: Sequence[Any], settings: Any) -> list[Any]:
    print(len(prompts), settings)
    return [anything(text="a", truncated=True, About=lambda: {"tokens": 1})] * len(prompts)


def _evaluated_by_harness(args: Any, open_model: Any) -> tuple[str, dict]:
    print(args.tasks, args.num_fewshot, args.limit)
    open_model()
    return "table", {}


def _over(args: Flags) -> None:
    names = ["mesh", "num_devices", "coordinator_address", "num_processes", "process_id"]
    print([args.Values().get(name) for name in names])


_CLI = {
    "tools._cli:load_tensorflow": None,
    "lingvo_moe.core.job.meeting:meet": None,
    "tools._mesh:engine_of": Through(_over),
    "tools._mesh:lead": None,
}
_OPTIONS = SimpleNamespace(top_k=9)
_TRANSLATOR = anything(Translate=_lines, about={}, languages=("aa", "bb"), options=_OPTIONS)
_GENERATOR = anything(Generate=_texts, about={})
_ABOUT = {"model": "mt.M4Tiny", "step": 6, "weights": "float32"}


def _ids_of(messages: Sequence[Any]) -> list[int]:
    print(messages)
    return [1]


def _stream(ids: Any, settings: Any) -> list[Any]:
    print(settings)
    return [("a", None)]


_CHATTING = anything(Stream=_stream, options=SimpleNamespace(max_source_length=9))
_EXPORTED = {
    **_CLI,
    "lingvo_moe.tasks.mt.decoding.translator:load_translator": (_TRANSLATOR, _ABOUT),
    "lingvo_moe.tasks.mt.decoding.saved_translator:SavedTranslator": _TRANSLATOR,
}


def _trained(command: Sequence[str], check: bool) -> None:
    print(*command[1:])
    (logdir,) = (flag.partition("=")[2] for flag in command if flag.startswith("--logdir="))
    Path(logdir).mkdir(parents=True)


def _evaluated(kept: Any, items: Any, pairs: Any, options: Any, progress: Any) -> Any:
    print(pairs, options, progress is None)
    for lang, rows in items:
        print(lang, rows)
        kept([source for source, _ in rows], [lang] * len(rows))
    return anything(Average=lambda *_: {}, languages={})


async def _served(_service: Any, _sockets: Any, name: str, _stop: Any) -> int:
    print(name)
    return 0


def _begun(run: Any, *_: Any) -> Any:
    """Does all that a run does before training; what it returns does not train."""
    run.Prepare(anything())
    run.InitialWeights()
    print(run.override, run.MachineLine(anything()))
    return contextlib.nullcontext(lambda: NestedMap(last_step=0, status=0))


_TRAINER = {
    "lingvo_moe.trainer:load_tensorflow": None,
    "lingvo_moe.trainer:meet": None,
    "lingvo_moe.core.engine.devices:find_devices": None,
    "lingvo_moe.trainer:TimeLimit": anything(),
    "lingvo_moe.trainer:lock_of": anything(),
    "lingvo_moe.training.beginning:prepare_run_dir": None,
    "lingvo_moe.trainer:begun_in_directory": Through(lambda *_: contextlib.nullcontext()),
    "lingvo_moe.trainer:loop_of": Through(_begun),
    "lingvo_moe.training.memory:check_memory": None,
    "lingvo_moe.analysis.explain.verifying:verify_model": ["loss"],
    "lingvo_moe.core.job.watcher:watching": Through(lambda *_: contextlib.nullcontext()),
    "lingvo_moe.core.engine.devices:request_cpu_devices": None,
    "lingvo_moe.core.engine.devices:initialize_distributed": None,
    "lingvo_moe.core.engine.compiled_cache:enable_compilation_cache": None,
    "lingvo_moe.core.engine.engines:make_engine": anything(),
    "lingvo_moe.core.engine.checkpoints.init_from:find_step": 5,
    "lingvo_moe.core.engine.checkpoints.init_from:check_model": None,
    "lingvo_moe.core.engine.checkpoints.init_from:begin_from": anything(about=None),
    "lingvo_moe.core.engine.checkpoints.init_from:describe": "",
    "lingvo_moe.core.runs.run_dir:RunDir.Write": None,
    "lingvo_moe.tasks.mt.mt_input:MtInput.Prepare": None,
    "lingvo_moe.tasks.mt.mt_input:MtInput.Warnings": [],
    "lingvo_moe.tasks.mt.mt_input:MtInput.CheckNewRun": None,
    "lingvo_moe.tasks.mt.mt_input:MtInput.Artifacts": RunArtifacts(),
    "lingvo_moe.tasks.mt.mt_model:MtModel.CheckData": None,
    "lingvo_moe.training.evaluating:_Scorer": SimpleNamespace(Score=lambda step: anything(text="scored")),
    "lingvo_moe.core.engine.loop.summaries:Summaries": anything(),
}  # fmt: skip
_TRAINED = ["--model=mt.M4Tiny", "--data_dir=DATA", "--logdir=NEW"]


COMMANDS = [
    Command("translate", {**_EXPORTED, **NO_BEAM}, [
        [_MODEL], [_RUN], [_RUN, _OF_TWO], [_RUN, "--temperature=0.5"], [_MODEL, *A_CORPUS]]),
    Command("chat", {
        **_CLI,
        "lingvo_moe.tasks.lm.generator:load_generator": (_CHATTING, _ABOUT),
        "lingvo_moe.tasks.lm.saved_generator:SavedGenerator": _CHATTING,
        "lingvo_moe.tasks.text.vocabulary.chat:chat_of": anything(Ids=_ids_of),
    }, [[_MODEL], [_RUN], [_MODEL, "--temperature=0.5"]]),
    Command(
        "generate",
        {
            **_CLI,
            "lingvo_moe.tasks.lm.generator:load_generator": (_GENERATOR, _ABOUT),
            "lingvo_moe.tasks.lm.generator:load_draft": _GENERATOR,
            "lingvo_moe.tasks.lm.saved_generator:SavedGenerator": _GENERATOR,
        },
        [
            [_MODEL],
            [_RUN],
            [_MODEL, "--temperature=0.5"],
            [_RUN, "--beam_size=2"],
            [_RUN, _OF_TWO],
            [_MODEL, "--input=texts.jsonl", "--json"],
            [_MODEL, "--temperature=0.5", "--json"],
        ],
    ),
    Command(
        "eval_harness",
        {
            **_CLI,
            "tools.eval_harness:_evaluated": Through(_evaluated_by_harness),
            "lingvo_moe.tasks.lm.generator:load_generator": (_GENERATOR, _ABOUT),
            "lingvo_moe.tasks.text.quality.forced_decoding:Scorer": Through(scorer),
        },
        [["--logdir=TEXTS", "--tasks=hellaswag"]],
    ),
    Command("score", {**_CLI, "lingvo_moe.tasks.text.quality.forced_decoding:Scorer": Through(scorer)},
        [[_RUN], [_RUN, _OF_TWO], ["--logdir=TEXTS", "--input=texts.jsonl"]]),
    Command("evaluate", {
        **_EXPORTED,
        "lingvo_moe.tasks.mt.quality.scoring:evaluate": Through(_evaluated),
        "lingvo_moe.tasks.mt.quality.baselines:read_baselines": {},
        "tools.evaluate:_rescored": (lambda lines, _: lines, {}),
        "tools.evaluate:_print_scores": None,
    }, [
        [_RUN, "--data_dir=DATA"],
        [_RUN, "--data_dir=DATA", _OF_TWO],
        [_MODEL, "--data_dir=DATA"],
        [_RUN, "--data_dir=DATA", "--rescore"],
    ],
        {"": "trust_run"}),  # a permission
    Command(
        "evaluate_images",
        {**_CLI, "lingvo_moe.tasks.image.evaluation:evaluate": Scores(1, False, 2, 0.5, 0.5, 1.0)},
        [["--logdir=IMAGES"]],
    ),
    Command("export", {**_EXPORTED, "lingvo_moe.tasks.text.decoding.export:export": None}, [[_RUN, "--output=o"]]),
    Command(
        "trainer",
        _TRAINER,
        [
            _TRAINED,
            [*_TRAINED, "--init_from=RUN", "--num_processes=2"],
            ["--model=mt.M4Tiny", "--data_dir=DATA", _RUN, "--mode=eval", "--max_steps=6"],
            ["--model=mt.M4Tiny", "--mode=inspect_model"],
            ["--model=mt.M4Tiny", "--mode=inspect_params"],
        ],
        # The trainer's command, with this flag, is that of an evaluator.
        {"--mode=eval": _OF_THE_TRAINER},
    ),
]  # fmt: skip

_PLAN = json.loads(_GOLDEN.read_text())
_BYTES = dict.fromkeys(["weights", "caches", "needed", "hbm"], 1)
_TIMES = dict.fromkeys(["first_token_seconds", "step_seconds", "chip_seconds_per_million"], 1e-3)
_RATES = dict.fromkeys(["user_tokens_per_second", "chip_tokens_per_second"], 1.0)
_SERVED = {**_BYTES, **_TIMES, **_RATES, "layout": "ep", "batch": 8, "fits": True}
_PROGRAM = SimpleNamespace(name="train", mesh=anything(size=8))
_EXPLANATION = SimpleNamespace(
    Sharding=lambda name: [], ToJson=dict, ToHtml=lambda: "page", Check=lambda: None
)
_FOUND = SimpleNamespace(
    ToText=lambda: "found", ToJson=dict, Ranked=list, ended="", candidates=(1, 1), tried=[],
    search=SimpleNamespace(model="m"), machine=SimpleNamespace(name="n"),
)  # fmt: skip
_MEASURED = SimpleNamespace(about={}, layers=[SimpleNamespace(name="layer")], tables={})
_GATHERED = SimpleNamespace(ToDict=dict, metrics=1, scores=1, routing=1)
_SHORTLIST = SimpleNamespace(
    Save=lambda path: Path(path).touch(), About=lambda: {"per_source_piece": 1, "every_line": 1}
)
_COMPILING = {**_CLI, "tools._cli:request_devices": None}
_MACHINE = ["--model=mt.M4Tiny", "--topology=v3:2x2"]
_BUILT = Built({"aa": (1, 1)}, 1)
_GOODPUT = Goodput(dict.fromkeys(PARTS, 60.0), 3, 2, 100, 0.5, 4, 2.0, 9.0, 10, 0.9)
COMMANDS += [
    Command("explain", {
        **_COMPILING,
        "lingvo_moe.analysis.explain.explaining:explain": _EXPLANATION,
        "lingvo_moe.core.engine.loop.steps:train_step": None,
        "lingvo_moe.core.engine.lowering.lowering:lower_step": _PROGRAM,
        "lingvo_moe.core.engine.lowering.program:Program.Load": _PROGRAM,
    }, [["--model=mt.M4Tiny"], ["--program=lines.txt"]]),
    Command("export_checkpoint", {
        **_CLI,
        "lingvo_moe.tasks.families.exporting:export_checkpoint": "line",
    }, [["--logdir=RUN", "--output=NEW"]]),
    Command("import_checkpoint", {
        **_CLI,
        "lingvo_moe.tasks.families.importing:open_published": SimpleNamespace(codes=None),
        "lingvo_moe.tasks.families.importing:import_checkpoint": None,
        "lingvo_moe.tasks.families.importing:placement": Table([], []),
    }, [["--from=DATA", "--output=NEW"]]),
    Command("param_stubs", {"tools.param_stubs:_run": Through(lambda out: print(out) or 0)}, [[]]),
    Command("parallelize", {**_COMPILING, "lingvo_moe.analysis.search.parallelizing:find": _FOUND},
        [_MACHINE, ["--model=mt.M4Tiny", "--devices=8"]]),
    Command("plan", {
        **_CLI,
        "lingvo_moe.analysis.search.best_plan:laid_out": _PLAN,
        "lingvo_moe.analysis.search.best_plan:smallest_slice": _PLAN,
        "lingvo_moe.analysis.plans.report:html_report": "page",
        "lingvo_moe.analysis.plans.report:print_plan": None,
        "lingvo_moe.analysis.search.serving_plan:make_serving_plan": {"rows": [_SERVED]},
    }, [_MACHINE, ["--compare=plan.json"], ["--validate"],
        [*_MACHINE, "--what=serve", "--prompt=8", "--reply=8"]]),
    Command("prepare", {
        **NO_BEAM,
        "tools.prepare:prepare": {},
        "tools.prepare:_report": Through(lambda *_: None),
        "tools.prepare:_print_next": Through(lambda *_: None),
    }, [["--input=DATA", "--output=o"], ["--input=DATA", "--output=o", "--runner=FnApiRunner"]]),
    Command("report", {
        **_CLI,
        "lingvo_moe.tasks.mt.reports.routing:measure_routing": _MEASURED,
        "lingvo_moe.tasks.mt.reports.run_report:gather": _GATHERED,
        "lingvo_moe.tasks.mt.reports.report_page:html_report": "page",
        "lingvo_moe.tasks.mt.reports.routing_page:plot_layer": None,
        "lingvo_moe.tasks.mt.reports.routing_page:table_of": Table(words("a", "b", "c"), []),
        "lingvo_moe.core.pages.drawing:png": b"",
    }, [[_RUN], [_RUN, "--no_routing"]], {"": "quiet"}),  # the stand-in makes no progress
    Command("reproduce", {
        "lingvo_moe.reproduction.making:in_own_process": _PLAN,
        "lingvo_moe.reproduction.page:write": "text",
        "lingvo_moe.reproduction.goldens:read_all": {},
        "lingvo_moe.reproduction.goldens:read": _PLAN,
        "lingvo_moe.reproduction.goldens:write": None,
    }, [["--docs=DOCS"], ["--docs=DOCS", "--plans"], ["--docs=DOCS", "--list"]]),
    Command("serve", {
        **_EXPORTED,
        "lingvo_moe.tasks.text.serving.server:bind": [],
        "lingvo_moe.tasks.text.serving.server:is_loopback": True,
        "lingvo_moe.tasks.text.serving.server:stop_on_signals": None,
        "lingvo_moe.tasks.text.serving.server:serve": Through(_served),
        "lingvo_moe.tasks.text.serving.service:Service": None,
        "tools.serve:_start_log": None,
    }, [[_MODEL], [_RUN], [_RUN, _OF_TWO]], {"": "draft"}),  # for language models, as in generate
    Command("shortlist", {
        **_CLI,
        "lingvo_moe.tasks.mt.decoding.making_shortlists:make_shortlist": _SHORTLIST,
        "lingvo_moe.tasks.mt.decoding.making_shortlists:coverage": SimpleNamespace(
            tokens=1, lines=1, inside=1, size=1.0
        ),
    }, [[_RUN, "--output=o.npz"]], {"": "quiet trust_run"}),  # without progress, and a permission
    Command("train_vocab", {"tools.train_vocab:scan": None, "tools.train_vocab:cached_vocabularies": {}},
        [["--data_dir=DATA", "--output=o"]]),
    Command("verify", {**_COMPILING, "lingvo_moe.analysis.explain.verifying:verify_model": ["loss"]},
        [["--model=mt.M4Tiny"]]),
    Command("build_corpus", {"tools.build_corpus:build_corpus": _BUILT}, [["--output=o"]]),
    Command("build_files", {
        "tools.build_files:stale_files": {"lines.txt": "text"},
        "tools.build_files:ROOT": Through(Path()),
    }, [[]]),
    Command("compare_experts", {
        **_CLI,
        "tools._cli:subprocess.run": Through(_trained),
        "lingvo_moe.tasks.text.corpus.corpus:build_corpus": None,
        "lingvo_moe.tasks.text.quality.held_out_loss:held_out_loss": anything(
            step=9, nll=1, accuracy=1, tokens=1
        ),
        "lingvo_moe.core.engine.loop.summaries:read_metrics": [{"nll": 1}],
        "lingvo_moe.core.task.inspect:count_parameters": 1,
        "lingvo_moe.tasks.text.runs.run_dir:TextRunDir.Task": anything(),
        "lingvo_moe.reproduction.expert_comparison:routing": {},
        "lingvo_moe.reproduction.expert_comparison:groups": [],
    }, [[]]),
    Command("demo", {
        **_EXPORTED,
        "tools._cli:subprocess.run": Through(_trained),
        "tools.demo:Demo._collectives": {"all-to-all": 1},
        "tools.demo:Demo._report": Through(lambda *_: None),
        "tools.demo:Demo._show": Through(lambda *_: None),
        "tools.demo:_initial_theta": None,
        "lingvo_moe.tasks.text.corpus.corpus:build_corpus": _BUILT,
        "lingvo_moe.tasks.text.data.dev_set:DevSet": anything(languages=["aa"]),
        "lingvo_moe.tasks.mt.quality.scoring:count_train_pairs": {},
        "lingvo_moe.tasks.mt.quality.scoring:evaluate": anything(Average=lambda: {"chrf": 1.0}),
        "lingvo_moe.tasks.text.runs.run_dir:TextRunDir.Task": None,
        "lingvo_moe.tasks.text.decoding.export:export": None,
    }, [[]]),
    Command("goodput", {"tools.goodput:measured": _GOODPUT},
        [[_RUN, "--predict"], ["--predict", "--mtbf=1h", "--save_seconds=2", "--restart_seconds=9"]]),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of translation, one of images, two corpora, and some files."""
    place = tmp_path_factory.mktemp("effect") / "files"
    for name in ("DATA", "OTHER"):
        for part in ("", "dev"):
            (place / name / part).mkdir(parents=True, exist_ok=True)
            for language in ("aa", "bb"):
                text = "".join(f"{name} {language}{i}\tword {i}\n" for i in range(4))
                (place / name / part / f"{language}.tsv").write_text(text)
    for name in ("M4MoE2048E36L-v3_32x32", "T96L-v3_32x32"):
        (place / "DOCS" / "plans").mkdir(parents=True, exist_ok=True)
        (place / "DOCS" / "plans" / f"{name}.json").touch()
    vocab = toy_translation.train_vocab(toy_translation.sentences(200))
    runs = {"RUN": "mt.M4Tiny", "IMAGES": "image.ResNet50"}
    for name, model in runs.items():
        run = RunDir(place / name)
        artifacts = (
            text_artifacts({"source": vocab, "target": vocab}) if name == "RUN" else RunArtifacts()
        )
        run.Write(model, "input.data_dir=DATA", artifacts)
        for step in ("5", "6"):
            (run.path / "checkpoints" / step).mkdir(parents=True)
            (run.path / "checkpoints" / step / LIST).touch()
    (place / "strategy.txt").write_text("train.mesh=expert:4\ntask.remat=dots\n")
    (place / "lines.txt").write_text("drei\tthree\tde\n")
    (place / "texts.jsonl").write_text('{"text": "three", "other": "four"}\n' * 3)
    shutil.copy(_GOLDEN, place / "plan.json")
    return place


def _other(module: str, flags: Flags, name: str) -> str:
    """The flag, with a value that is not its default."""
    flag = flags[name]
    if flag.boolean:
        return f"--no{name}" if flag.default else f"--{name}"
    if value := _SETTABLE.get(f"{module}.{name}", _SETTABLE.get(name)):
        return f"--{name}={value}"
    assert flag.parser.flag_type() in ("int", "float"), f"_SETTABLE has no value for --{name}"
    return f"--{name}={(flag.default or 2) + 1}"


def _is_told(done: Done, given: str) -> bool:
    """Whether the message of a command that failed names the flag, or the parameter that it sets."""
    name, _, value = given.partition("=")
    return any(word in done.said for word in (name, value.partition("=")[0] or name))


def test_a_situation_is_there_for_every_command():
    having = [
        p.stem for p in (ROOT / "tools").glob("*.py") if "\ndef main(" in p.read_text("utf-8")
    ]
    assert {command.module for command in COMMANDS} == {*having, "trainer"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.module)
def test_every_flag_has_an_effect_or_is_refused(command, files, monkeypatch):
    if command.module == "trainer":
        module, flags = trainer, importlib.import_module("lingvo_moe.training.flags").define_flags()
    else:
        module = importlib.import_module(f"tools.{command.module}")
        flags = module.define_flags()
    stand_ins = StandIns(command.replaced, monkeypatch)
    ignored, accepted = [], set()
    for situation in command.situations:
        before = stand_ins.Run(module.main, situation, files)
        assert before.status == 0, f"{situation}: {before.said}"
        given = {flag.partition("=")[0].removeprefix("--") for flag in situation}
        accepted |= given
        harmless = {*command.harmless.get("", "").split()}
        for flag in situation:
            harmless |= {*command.harmless.get(flag, "").split()}
        for name in {*flags.Names()} - given:
            flag = _other(command.module, flags, name)
            done = stand_ins.Run(module.main, [*situation, flag], files)
            last = done.said.splitlines()[-1:]
            if done.status and last[0].startswith((f"{command.module}: ", "error: ")):
                assert _is_told(done, flag), f"{situation} {flag}: {done.said}"
            elif done != before:
                accepted.add(name)
            elif name not in harmless:
                ignored.append(f"{flag} with {' '.join(situation)}")
    assert ignored == [], "\n".join(ignored)
    # A checkpoint that is imported: tests/tools/test_published.py.
    assert {*flags.Names()} - accepted - harmless - {"from"} == set()
