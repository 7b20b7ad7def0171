"""Keeps lowered programs beside compiled ones, so that a run that resumes neither traces nor lowers its step again.

An entry is used only where all that determines the program is what it was: the parameters that the step names, the
specs of its arguments and results, the mesh, the source code of this package, the installed packages, Python, and the
variables of the environment that TensorFlow, XLA and JAX read. Steps with classes of other packages, whose code may
read anything, are not kept, nor are those of programs that call the trainer, which may have changed its code in memory.
Imports no TensorFlow.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import psutil

from lingvo_moe.core.console.command import is_command, say
from lingvo_moe.core.engine.compiled_cache import kept
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec
from lingvo_moe.core.nested_map import flatten_items
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.core.task.step import Step

_FORMAT = 1
_DIGITS = 64  # of a program's hash
_ROOT = Path(__file__).parents[3]
_CLASS = re.compile(r"\btype/([\w.]+)/")
_OWN = re.compile(r"lingvo_moe\.(core|tasks)\.")
_VARIABLES = ("TF_", "XLA_", "JAX_", "LIBTPU_")
_MARGIN = 2.0  # seconds: the system's time of a process's start is that far off at most


def key_of(step: Step, mesh: Mesh, fused: bool = False) -> str:
    """The name under which the program of a step is kept; '' where it is not."""
    if not step.text or step.results is AUTO:
        return ""
    trees = {f"arg{number}": tree for number, tree in enumerate(step.arg_specs)}
    if step.results is not None:
        trees["result"] = step.results
    specs = [
        TensorSpec.Of(spec, path).OnMesh(mesh).ToJson()
        for name, tree in trees.items()
        for path, spec in flatten_items(tree, name)
    ]
    parts = (step.name, specs, list(step.donate), fused, mesh.axis_names, mesh.shape)
    return name_of("lowered", step.text, *parts)


def name_of(kind: str, text: str, *parts: Any) -> str:
    """The name under which a program is kept that a text with classes, the parts (JSON) and the code determine; ''
    where it is not."""
    if kept() is None or not is_command():
        return ""
    code = code_digest(_ROOT, psutil.Process().create_time() - _MARGIN)
    if not code or not all(map(_OWN.match, _CLASS.findall(text))):
        return ""
    environment = {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
    determined_by = [
        _FORMAT,
        text,
        parts,
        code,
        packages(),
        sys.version,
        sorted(environment.items()),
    ]
    return f"{kind}-{hashlib.sha256(json.dumps(determined_by).encode()).hexdigest()}"


def text_of(layer: Any) -> str:
    """The class and the Params of a layer, or of an input, which determine its programs: for Step.text."""
    return f"type/{type(layer).__module__}/{type(layer).__qualname__}\n{layer.p.ToText()}"


def find_bytes(key: str) -> bytes | None:
    """The bytes that were kept under a key; None if there are none, or, with a warning, if they are damaged."""
    cache = kept()
    return cache.get(key) if key and cache else None


def keep_bytes(key: str, content: bytes) -> None:
    """Keeps bytes, unless the key is ''. Says what cannot be written."""
    cache = kept()
    if key and cache:
        try:
            cache.put(key, content)
        except OSError as e:
            say(f"lowered programs: not kept: {e}")


def find(key: str) -> Program | None:
    """The program that was kept under a key; None as find_bytes."""
    content = find_bytes(key)
    if content is None:
        return None
    program = Program.FromBytes(content[_DIGITS:], key)
    # The value of the cached property, which takes as long to compute as the compiled program to load.
    vars(program)["hash"] = content[:_DIGITS].decode()
    return program


def keep(key: str, program: Program) -> None:
    """Keeps a program, as keep_bytes."""
    if key:
        keep_bytes(key, program.hash.encode() + program.ToBytes())


def code_digest(root: Path, before: float) -> str:
    """SHA-256 of the source code below a directory.

    '' where a file has changed since `before`, seconds since 1970: what this process imported may be older.
    """
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        if not file.exists():  # an editor's link that locks a file
            continue
        if not before > file.stat().st_ctime:
            return ""
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def packages() -> list[str]:
    """The installed packages, with their versions."""
    names = set[str]()
    for place in filter(None, sys.path):
        with contextlib.suppress(OSError):  # an archive, or a directory that cannot be read
            entries = os.listdir(place)
            names |= {name for name in entries if name.endswith((".dist-info", ".egg-info"))}
    return sorted(names)
