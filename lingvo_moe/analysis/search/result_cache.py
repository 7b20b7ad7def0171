"""Results on disk that take minutes to make and that a search asks for again: plans, and steps that were verified.

The name of an entry is a hash of all that a result depends on, of which the sources of this package are a part.
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lingvo_moe.analysis.explain.verifying import shrunk, verify_model
from lingvo_moe.analysis.plans import step_plan
from lingvo_moe.analysis.plans.step_plan import Say
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.files.sealed import read_sealed, write_sealed
from lingvo_moe.core.sharding import Mesh

_CLASS = re.compile(r"\btype/([\w.]+)/")


def cached_plan(request: step_plan.Request, cache_dir: Path | None, say: Say) -> dict[str, Any]:
    """The plan of a request, from the cache if nothing that it depends on has changed. Raises as make_plan.

    Args:
        cache_dir: of results and compiled programs; None to cache nothing.
    """
    if cache_dir is None:
        return step_plan.make_plan(request, None, say)
    params = registry.GetParams(request.model, request.override)
    key = _key(params, (repr(request), aot.compiler_identity(request.topology)))
    path = cache_dir / f"{key}.plan"
    plan = _read(path, say)
    if plan is None:
        plan = step_plan.make_plan(request, cache_dir, say)
        _write(path, plan)
    return dict(plan)


def cached_verification(
    model: str, mesh: Mesh, override: str, cache_dir: Path | None, say: Say
) -> None:
    """Verifies an experiment's shrunk step, unless the cache says that this step is right. Raises as verify_model.

    Experiments that differ in their numbers of layers alone have the same shrunk step.

    Arguments are those of verify_model and of cached_plan.
    """
    if cache_dir is None:
        verify_model(model, mesh, override)
        return
    params = shrunk(model, mesh, override)
    path = cache_dir / f"{_key(params, (str(mesh), version('jax'), version('jaxlib')))}.verified"
    if _read(path, say) is None:
        verify_model(model, mesh, override)
        _write(path, {"mesh": str(mesh)})


def _read(path: Path, say: Say) -> Any:
    """The result in a file; None if there is none, or a damaged one."""
    body = read_sealed(path, lambda why: say(f"{why}; it is made again"))
    return None if body is None else json.loads(body)


def _write(path: Path, result: dict[str, Any]) -> None:
    write_sealed(path, json.dumps(result).encode())


def _key(params: Params, more: Sequence[str]) -> str:
    """A hash of parameters, TensorFlow, this package, classes of the user's, and more."""
    text = params.ToText()
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for part in (*more, text, version("tensorflow")):
        digest.update(part.encode() + b"\0")
    for source in sorted([*package.rglob("*.py"), *package.rglob("*.json")]):
        digest.update(str(source.relative_to(package)).encode() + b"\0" + source.read_bytes())
    for module in sorted(set(_CLASS.findall(text))):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin and not Path(spec.origin).is_relative_to(package):
            digest.update(module.encode() + b"\0" + Path(spec.origin).read_bytes())
    return digest.hexdigest()[:40]
