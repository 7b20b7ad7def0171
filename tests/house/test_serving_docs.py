"""docs/serving.md is true for tools.serve: every flag with its default, every path, every curl."""

import re
import shlex
import shutil
import subprocess

import pytest
from local_server import Capitals, Echo, running

from lingvo_moe.core.console.flags import Flags
from lingvo_moe.tasks.text.serving.handlers import make_app
from tools import _cli, _mesh, serve
from tools.import_graph import ROOT

_PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
_CURLS = re.findall(r"^curl (?:-N )?(http://127\.0\.0\.1:8080.*)$", _PAGE, re.MULTILINE)


def test_the_page_lists_every_flag_and_its_default():
    row = re.compile(r"^\| (`--.*?) \| (.*?) \|", re.MULTILINE)
    listed = {
        flag: value
        for flags, values in row.findall(_PAGE)
        for flag, value in zip(re.findall(r"--(\w+)", flags), values.split(", "))
    }
    elsewhere = Flags("", "")
    _cli.define_model_flags(elsewhere)
    _cli.define_search_flags(elsewhere)
    _mesh.define_flags(elsewhere)
    flags = serve.define_flags()
    mine = set(flags.Names()) - set(elsewhere.Names())
    assert mine == listed.keys()
    for name in mine - {"max_batch_lines", "quiet", "server_names"}:
        default = flags[name].default
        assert listed[name] == (f"{default:g}" if isinstance(default, float) else str(default)), (
            name
        )


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: apt-get install curl")
def test_its_curls_are_answered():
    assert len(_CURLS) > 5
    with running(Capitals()) as translator, running(Echo()) as generator:
        for curl in _CURLS:
            address, *flags = shlex.split(curl)
            server = generator if "/generate" in address else translator
            address = address.replace("8080", str(server.port))
            done = subprocess.run(
                ["curl", "--silent", "--fail-with-body", address, *flags],
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert done.returncode == 0, f"{curl}: {done.stdout}"
            assert done.stdout.strip(), curl


def test_its_paths_are_there():
    paths = re.findall(r"^\| `(GET|POST) (/\S*)` \|", _PAGE, re.MULTILINE)
    with running(Capitals()) as server:
        listed = {path.replace("NAME", "translator") for _, path in paths}
        assert listed == set(make_app(server.service, "translator").settings["paths"])
        for method, path in paths:
            body = b"{}" if method == "POST" else None
            status = server.Ask(method, path.replace("NAME", "translator"), body).status
            assert status == (400 if body else 200), path
