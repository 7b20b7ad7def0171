"""--from: a published checkpoint is imported once, and planned without its weights."""

import concurrent.futures
import importlib.util
import json
import shutil

import pytest

from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.weights.source import WeightsError
from lingvo_moe.tasks.families.importing import open_published
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from tools import _cli, _published, plan
from tools.import_graph import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="needs tokenizers: pip install --no-deps -r requirements-tokenizers.txt",
)
TESTDATA = ROOT / "tests/tasks/families/testdata"


def _parsed(*argv):
    flags = Flags("test", "")
    _cli.define_model_flags(flags)
    _published.define_from_flag(flags)
    return flags.Parse(argv)


def test_a_checkpoint_is_imported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = shutil.copy(TESTDATA / "llama_tied.gguf", tmp_path / "a.gguf")
    args = _parsed(f"--from={gguf}")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # the second waits for the first
        list(pool.map(_published.imported, [args, args]))
    assert "a.gguf into" in capsys.readouterr().err
    assert args.logdir.startswith(str(tmp_path / "cache/lingvo_moe/imported/a.gguf-"))
    assert TextRunDir(args.logdir).steps == [0]
    _published.imported(again := _parsed(f"--from={gguf}"))
    assert (again.logdir, capsys.readouterr().err) == (args.logdir, "")
    (tmp_path / "a.gguf").write_bytes(b"another")
    assert _parsed(f"--from={gguf}").logdir != args.logdir
    with pytest.raises(WeightsError, match=r"a\.gguf"):
        _published.imported(_parsed(f"--from={gguf}"))
    plain = _parsed("--logdir=x")
    _published.imported(plain)
    assert plain.logdir == "x"


@pytest.mark.parametrize(("argv", "message"), [
    (["--from=RUN", "--logdir=x"], "give one of --from and --logdir"),
    (["--logdir=x", "--from=RUN"], "give one of --from and --logdir"),
    (["--saved_model=x", "--from=RUN"], "goes without --saved_model"),
    (["--from=" + "a" * 5000], "File name too long"),
])  # fmt: skip
def test_flags_that_do_not_go_together(argv, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        _parsed(*(one.replace("RUN", str(tmp_path)) for one in argv))
    assert message in capsys.readouterr().err


def test_a_plan_needs_the_config_alone(tmp_path):
    shutil.copy(TESTDATA / "mixtral/config.json", tmp_path)
    args = plan.define_flags().Parse(
        [
            f"--from={tmp_path}",
            "--topology=v3:2x2",
            "--model_params_override=task.fprop_dtype=bfloat16",
        ]
    )
    _published.name_experiment(args)
    name, override = args.model, args.model_params_override
    assert name == "lm.ImportedMixtral" and override.endswith(";task.fprop_dtype=bfloat16")
    hidden = json.loads((tmp_path / "config.json").read_text())["hidden_size"]
    assert f"task.model_dim={hidden};" in override
    gguf = TESTDATA / "llama_tied.gguf"
    args = plan.define_flags().Parse([f"--from={gguf}", "--topology=v3:2x2"])
    _published.name_experiment(args)
    assert args.model_params_override == open_published(gguf).override
