"""Plans on disk: a search asks for the same ones again, and making one takes minutes.

The name of an entry is a hash of all that a plan depends on, of which the sources of this package are a part.
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lingvo_moe import planning
from lingvo_moe.core import registry
from lingvo_moe.core.engine import aot
from lingvo_moe.core.sealed import SealError, read_sealed, write_sealed

_CLASS = re.compile(r"\btype/([\w.]+)/")


def cached_plan(
    request: planning.Request, cache_dir: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """The plan of a request, from the cache if nothing that it depends on has changed. Raises as make_plan.

    Args:
        request: what to plan.
        cache_dir: of plans and compiled programs; None to cache nothing.
        say: called with lines about the progress.
    """
    if cache_dir is None:
        return planning.make_plan(request, None, say)
    path = cache_dir / f"{_key(request)}.plan"
    try:
        body = read_sealed(path)
    except SealError as e:
        say(f"{e}; it is made again")
        body = None
    if body is not None:
        return dict(json.loads(body))
    plan = planning.make_plan(request, cache_dir, say)
    cache_dir.mkdir(parents=True, exist_ok=True)
    write_sealed(path, json.dumps(plan).encode())
    return plan


def _key(request: planning.Request) -> str:
    """A hash of parameters, machine, compiler, TensorFlow, this package, and classes of the user's."""
    params = registry.GetParams(request.model, request.override).ToText()
    package = Path(planning.__file__).parent
    digest = hashlib.sha256()
    for part in (
        repr(request),
        params,
        aot.compiler_identity(request.topology),
        version("tensorflow"),
    ):
        digest.update(part.encode() + b"\0")
    for source in sorted(package.rglob("*.py")):
        digest.update(str(source.relative_to(package)).encode() + b"\0" + source.read_bytes())
    for module in sorted(set(_CLASS.findall(params))):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin and not Path(spec.origin).is_relative_to(package):
            digest.update(module.encode() + b"\0" + Path(spec.origin).read_bytes())
    return digest.hexdigest()[:40]
