"""README and docs are true: examples run, commands parse, links and files exist, figures equal the code's.

Not in Bazel, since it reads the whole source tree.
"""

import ast
import contextlib
import functools
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
from rich.console import Console
from trainer_testing import write_corpus

from lingvo_moe import trainer
from lingvo_moe.analysis.plans import report
from lingvo_moe.analysis.plans.machines.topology import CHIPS
from lingvo_moe.core.config import registry
from lingvo_moe.core.console import units
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task import inspect
from lingvo_moe.training import flags as trainer_flags
from lingvo_moe.training.checks import full_override
from tools import plan
from tools.import_graph import PACKAGES, ROOT

PAGES = sorted(["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
# The Python examples of these pages run, in order, in one namespace. Other pages name files of the reader.
RUNNABLE = [
    "README.md",
    "docs/auto_parallel.md",
    "docs/data.md",
    "docs/experiments.md",
    "docs/moe.md",
    "docs/explain.md",
    "docs/manual_sharding.md",
    "docs/sharding.md",
    "docs/storage.md",
    "docs/training.md",
    "docs/writing.md",
]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|md|toml|txt|sh|bazel|json|bzl)\Z|(?:[\w.-]+/)+\Z")


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _blocks(page: str, language: str) -> list[str]:
    return [body for name, body in _BLOCK.findall(_text(page)) if name == language]


# --- examples


def _said(block: str) -> Iterator[str]:
    """Yields the output that a block states: the comment after a print, or on the lines below it."""
    lines = block.splitlines()
    for i, line in enumerate(lines):
        if not re.match(r"\s*print\(", line):
            continue
        _, mark, comment = line.rpartition(")  # ")
        if mark:
            yield comment
        for below in lines[i + 1 :] if not mark else []:
            if not below.startswith("# "):
                break
            yield below[2:]


@pytest.mark.usefixtures("files_of_reader")
@pytest.mark.parametrize("page", RUNNABLE)
def test_examples_run_and_print_what_they_say(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_corpus(tmp_path / "CORPUS")
    names: dict = {"__name__": "example"}
    blocks = _blocks(page, "python")
    assert blocks
    for block in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, page, "exec"), names)
        said = " ".join(_said(block))
        if said:
            assert " ".join(out.getvalue().split()) == " ".join(said.split()), block


@pytest.mark.parametrize("page", [p for p in PAGES if p not in RUNNABLE and _blocks(p, "python")])
def test_calls_in_other_examples_have_arguments_that_exist(page):
    syntax = ast.parse("\n".join(_blocks(page, "python")))
    ours = {
        alias.name: getattr(importlib.import_module(node.module), alias.name)
        for node in ast.walk(syntax)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("lingvo_moe.")
        for alias in node.names
    }
    for call in ast.walk(syntax):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ours:
            named = {keyword.arg: keyword.value for keyword in call.keywords}
            signature(ours[call.func.id]).bind(*call.args, **named)


# --- commands


def _commands(page: str) -> list[str]:
    """The lines of a page's shell blocks that are commands of ours."""
    lines = "\n".join(_blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [
        line.strip()
        for line in lines
        if re.match(r"\s*(python -m (lingvo|tools|benchmarks)|make )", line)
    ]


def _flag_files(page: str) -> dict[str, str]:
    """The files for --flagfile that a page shows, by the name in their first line."""
    return _named_files(_blocks(page, "text"), ".flags")


def _named_files(blocks: list[str], ending: str) -> dict[str, str]:
    """The blocks that are files with this ending, by the name in their first line."""
    found = ((re.match(rf"# (\S+{re.escape(ending)})\n", body), body) for body in blocks)
    return {match[1]: body for match, body in found if match}


@pytest.fixture
def files_of_reader(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the files that a page shows into the working directory, where Python finds its modules."""
    for name, body in (_flag_files(page) | _named_files(_blocks(page, "python"), ".py")).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


_ALL_COMMANDS = [(page, command) for page in PAGES for command in _commands(page)]


def test_there_are_commands_to_check():
    assert {page for page, _ in _ALL_COMMANDS} >= {"README.md", "docs/training.md", "docs/data.md"}


@pytest.mark.usefixtures("files_of_reader")
@pytest.mark.parametrize("page, command", _ALL_COMMANDS)
def test_commands_have_flags_that_exist(page, command):
    words = shlex.split(command, comments=True)
    words = [w for w in words if not re.match(r"\d?[<>]", w)]
    if "|" in words:
        words = words[: words.index("|")]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", _text("Makefile"), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
        return
    module, argv = words[2], [w for w in words[3:] if w != "&"]
    if module == "lingvo_moe.trainer":
        args = trainer_flags.parse_flags(argv)
        _params(args)
    else:
        importlib.import_module(module).define_flags().Parse(argv)


def _params(args):
    """The Params of a trainer's flags."""
    defined = registry.AsDefined(args.model or "lm.SmolLM2_135M")  # that of --init_from
    return registry.WithOverrides(defined, full_override(args, defined))


def test_the_tests_that_the_makefile_names_exist():
    named = re.findall(r"(?<![\w/])tests/[\w/*\[\]-]+(?:\.py)?", _text("Makefile"))
    assert len(named) > 20
    assert [path for path in named if not list(ROOT.glob(path))] == []


@pytest.mark.usefixtures("files_of_reader")
@pytest.mark.parametrize("page", ["docs/experiments.md"])
def test_the_experiment_of_a_package_of_ones_own(page, capsys):
    (command,) = (c for c in _commands(page) if "M4Mine" in c and "inspect_model" in c)
    assert trainer.main(shlex.split(command)[3:]) == 0
    assert re.search(r"experts\.wi +1x16x", capsys.readouterr().out)


def test_the_flag_file_of_the_page_on_training(tmp_path):
    ((name, body),) = _flag_files("docs/training.md").items()
    assert any(f"--flagfile={name}" in command for command in _commands("docs/training.md"))
    (tmp_path / name).write_text(body, encoding="utf-8")
    args = trainer_flags.parse_flags([f"--flagfile={tmp_path / name}", "--num_devices=4"])
    assert (args.model, args.num_devices) == ("mt.M4Demo", 4)
    params = _params(args)
    assert (params.task.dropout, params.train.save_interval_steps) == (0.2, 100)


_OVERRIDE = re.compile(r"--model_params_override='([^']*)'")


def _model_of(page: str) -> str:
    """The experiment whose parameters a page names."""
    others = {"docs/images.md": "image.ResNet50", "docs/language_models.md": "lm.Tiny"}
    return others.get(page, "mt.M4Demo")


@pytest.mark.parametrize("page", PAGES)
def test_overrides_are_of_parameters_that_exist(page):
    text = _text(page).replace("\\\n", " ")
    for match in _OVERRIDE.finditer(text):
        command = text[text.rfind("\n", 0, match.start()) : match.start()]
        model = re.search(r"--model=([\w.]+)", command)
        registry.GetParams(model[1] if model else _model_of(page), match[1])


# --- links, files, names


def _anchors(page: str) -> set[str]:
    prose = _BLOCK.sub("", _text(page))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = _text(page)
    for target in _LINK.findall(_BLOCK.sub("", text)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in _anchors(linked.resolve().relative_to(ROOT).as_posix()), target


def test_every_page_is_linked_from_the_readme():
    linked = set(_LINK.findall(_text("README.md")))
    assert set(PAGES) - {"README.md"} <= linked


@functools.cache
def _tree() -> frozenset[str]:
    """All files and directories (with a slash) of the source tree."""
    found = set()
    tops = (*PACKAGES, "tests", "docs", "launch", "bazel_deps", ".ci")
    for top in (*(p for p in ROOT.iterdir() if p.is_file()), *(ROOT / name for name in tops)):
        for path in (top, *(top.rglob("*") if top.is_dir() else ())):
            name = path.relative_to(ROOT).as_posix()
            found.add(f"{name}/" if path.is_dir() else name)
    return frozenset(found)


# Files that commands write, and files of the reader.
_MADE = re.compile(
    r"(demo|run|saved_model|cache|RUN|CORPUS|DATA|TEXTS|records|BILINGUAL|MODEL|DIR|corpus|dev|vocab|texts|comet|eval|checkpoints|compiled|train|assets\.extra|typings)/"
    r"|(report|experiment|evaluations|program|plan|corpus|translator|manifest|metrics|comet|prepared|results|tokenizer|tokenizer_config|adapter_config)\.json|(train_)?params\.txt|lines\.txt"
)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    missing = []
    for name in _CODE.findall(_BLOCK.sub("", _text(page))):
        if not _FILE.match(name) or _MADE.match(name):
            continue
        # A page about one package names files relative to it.
        if not any(path == name or path.endswith(f"/{name}") for path in _tree()):
            missing.append(name)
    assert not missing, f"{page}: {missing}"


_EXPERIMENT = re.compile(r"\bmt\.M4\w+|\b(?:image|lm)\.[A-Z]\w+")
_PARAM = re.compile(r"`((?:task|input|train)\.[a-z_0-9.]+)`")


@pytest.mark.parametrize("page", PAGES)
def test_experiments_and_parameters_that_are_named_exist(page):
    text = _text(page)
    for name in set(_EXPERIMENT.findall(text)) - {"mt.M4Mine"}:
        registry.GetExperiment(name)
    params = registry.GetParams(_model_of(page))
    for path in set(_PARAM.findall(text)):
        params.Get(path)


# --- figures and lists


def test_the_readmes_layer_has_two_all_to_alls_and_nothing_else():
    import numpy as np
    import tensorflow as tf

    from lingvo_moe.core.engine.eager.testing import run_sharded, run_single

    block = next(b for b in _blocks("README.md", "python") if "def moe_layer" in b)
    names: dict = {}
    exec(block, names)
    groups, tokens, experts, slots = 8, 16, 8, 16

    def first_choice(gates_GSE: tf.Tensor) -> tuple:
        """Top-1 with capacity for all tokens; this test is not about the choice."""
        hot_GSE = tf.one_hot(tf.argmax(gates_GSE, -1, output_type=tf.int32), experts)
        place_GS = tf.reduce_sum(tf.cumsum(hot_GSE, 1, exclusive=True) * hot_GSE, -1)
        hot_GSC = tf.one_hot(tf.cast(place_GS, tf.int32), slots)
        dispatch_GSEC = tf.einsum("GSE,GSC->GSEC", hot_GSE, hot_GSC)
        return dispatch_GSEC * tf.reduce_max(gates_GSE, -1)[..., None, None], dispatch_GSEC

    def layer(x: tf.Tensor, wg: tf.Tensor, wi: tf.Tensor, wo: tf.Tensor) -> tf.Tensor:
        return names["moe_layer"](x, wg, wi, wo, first_choice, 8)

    rng = np.random.RandomState(0)
    shapes = [(groups, tokens, 16), (16, experts), (experts, 16, 32), (experts, 32, 16)]
    args = [rng.randn(*shape).astype(np.float32) for shape in shapes]
    cut = ("expert", None, None)
    mesh = Mesh.parse("expert:8")
    y, collectives = run_sharded(layer, args, mesh, splits=[cut, None, cut, cut])
    assert dict(collectives) == {"all-to-all": 2}
    np.testing.assert_allclose(y, run_single(layer, args, mesh), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page", ["docs/experiments.md"])
def test_sizes_in_tables_are_those_of_the_specs(page):
    rows = re.findall(r"^\| `((?:mt|lm|image)\.\w+)` \| (.*) \|$", _text(page), re.MULTILINE)
    names = [name for task in ("mt", "lm", "image") for name in registry.AllNames(task)]
    assert sorted(name for name, _ in rows) == sorted(names)
    for name, rest in rows:
        params = registry.GetParams(name)
        task = params.task.Instantiate()
        theta, state = (specs.Flatten() for specs in (task.VariableSpecs(), task.StateSpecs()))
        cells = rest.split(" | ")
        if name.startswith("image."):
            trained = inspect.count_parameters(spec for spec in theta if spec.trainable)
            assert cells[:2] == [f"{trained:,}", f"`{params.train.mesh}`"], name
            continue
        assert f"{inspect.count_parameters(theta):,}" in cells, name
        if len(cells) == 7:
            assert cells[2] == f"`{params.train.mesh}`", name
            mesh = Mesh.parse(params.train.mesh)
            held = [
                sum(inspect.bytes_per_device(s, mesh) for s in specs) for specs in (theta, state)
            ]
            assert cells[4:6] == [units.size(n, 1) for n in held], name


def test_lines_of_inspect_model_are_what_it_prints():
    shown = [
        line
        for page in PAGES
        for block in _blocks(page, "text")
        for line in block.splitlines()
        if line.startswith(("m4.", "total:"))
    ]
    assert len(shown) > 2
    task = registry.GetParams("mt.M4MoE2048E36L").task.Instantiate()
    out = io.StringIO()
    console = Console(file=out, width=140)
    inspect.print_variables(task.VariableSpecs().Flatten(), Mesh.parse("expert:2048"), console)
    printed = {" ".join(line.split()) for line in out.getvalue().splitlines()}
    assert {" ".join(line.split()) for line in shown} <= printed


def test_lines_of_plans_are_those_of_the_recorded_one():
    blocks = _blocks("docs/planning.md", "text")
    blocks += [block for block in _blocks("README.md", "text") if "step on v3:32x32" in block]
    assert len(blocks) > 6
    recorded = (ROOT / "docs/plans/M4MoE2048E36L-v3_32x32.json").read_text("utf-8")
    out = io.StringIO()
    report.print_plan(json.loads(recorded), Console(file=out, width=100))
    printed = {" ".join(line.split()) for line in out.getvalue().splitlines()}
    shown = {" ".join(line.split()) for block in blocks for line in block.splitlines()}
    assert not shown - printed, "paste again what report.print_plan prints of it"


def test_the_page_on_machines_has_the_data_sheets_figures():
    rows = re.findall(
        r"^\| `((?:v|tpu)\d\w*)` \| (.*) \|$", _text("docs/machines.md"), re.MULTILINE
    )
    assert [name for name, _ in rows] == list(CHIPS)
    for name, cells in rows:
        chip = CHIPS[name]
        assert cells.split(" | ") == [
            str(chip.devices_per_chip),
            f"`{name}:{'x'.join(map(str, chip.max_dims))}`",
            f"{chip.hbm_bytes / 2**30:.2f}",
            f"{chip.peak_flops / 1e12:g}",
            f"{chip.hbm_bandwidth / 1e9:g}",
            f"{chip.link_bandwidth / 1e9:g}",
            f"{chip.dcn_bandwidth / 1e9:g}" if chip.dcn_bandwidth else "–",
        ]


def test_the_pages_on_planning_list_every_flag():
    text = _text("docs/planning.md") + _text("docs/machines.md")
    flags = plan.define_flags().Names()
    assert not {flag for flag in flags if not re.search(rf"--{flag}[=`]", text)}


def test_the_page_on_training_lists_every_flag_and_train_parameter():
    text = _text("docs/training.md")
    flags = {f"--{name}" for name in trainer_flags.define_flags().Names()}
    flags |= {f"train.{name}" for name, _ in registry.TrainParams().IterParams()}
    assert not {flag for flag in flags if f"`{flag}`" not in text}


@pytest.mark.parametrize("absent, modules", [
    ("tensorflow jax", "core.sharding.mesh core.sharding.letters core.engine.lowering.specs "
     "core.engine.lowering.signature analysis.plans.work.costs analysis.plans.memory.breakdown "
     "analysis.plans.report analysis.plans.golden analysis.plans.network.interconnect "
     "analysis.plans.machines.topology analysis.programs.hlo.module analysis.programs.hlo.parts "
     "analysis.programs.partitioner.known_faults"),
    ("tensorflow", "core.engine.lowering.program core.engine.pjrt core.engine.checkpoints.checkpoints "
     "analysis.programs.hlo.collective_list core.engine.devices"),
])  # fmt: skip
def test_modules_are_as_light_as_the_page_on_architecture_says(absent, modules):
    text = _text("docs/architecture.md")
    for module in modules.split():
        room, _, name = module.rpartition(".")
        assert f"{name}.py`" in text or f"`{room.replace('.', '/')}/`" in text, module
    code = f"""
import importlib, sys
for name in {modules.split()}:
    importlib.import_module(f"lingvo_moe.{{name}}")
    if {set(absent.split())!r} & sys.modules.keys():
        sys.exit(name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_on_architecture_names_every_directory():
    named = set(re.findall(r"`([^`\n]*)/`", _text("docs/architecture.md")))
    found = {str(Path(name).parent) for name in _tree() if name.endswith(".py")}
    # Those of tests mirror the others; two hold nothing but directories.
    found = {name for name in found if not name.startswith("tests")} - {
        ".",
        "params",
        "lingvo_moe/tasks",
    }
    assert len(found) > 25
    assert not {name for name in found if not {name, name.removeprefix("lingvo_moe/")} & named}


def test_every_tool_is_named_in_the_readme():
    text = _text("README.md") + _text("docs/architecture.md")
    tools = [p.name for p in (ROOT / "tools").glob("*.py") if not p.name.startswith("_")]
    assert not [name for name in tools if name not in text and name[:-3] not in text]
