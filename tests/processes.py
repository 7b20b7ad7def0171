"""Other Python processes, which import what this one can; what they say is text."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def _options(env: Mapping[str, str | None], more: dict[str, Any]) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return {"text": True, "env": {k: v for k, v in env.items() if v is not None}, **more}


def run_python(
    *args: str, env: Mapping[str, str | None] = {}, **options: Any
) -> subprocess.CompletedProcess:
    """Runs Python to its end; `env` has variables besides those of this process, and None for those to leave out."""
    options = {"capture_output": True, **_options(env, options)}
    return subprocess.run([sys.executable, *args], **options)


def start_python(
    *args: str, env: Mapping[str, str | None] = {}, **options: Any
) -> subprocess.Popen:
    """Starts Python; its output goes to pipes where the options say nothing else."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *args], **{**pipes, **_options(env, options)})


def free_address() -> str:
    """A port of this machine that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"
