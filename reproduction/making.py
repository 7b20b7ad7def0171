"""Makes the plans of requests.py, each in a process of its own: a compiler keeps memory and its warnings."""

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .requests import Wanted

Say = Callable[[str], None]


class MakingFailed(ValueError):
    """The process that made a plan ended without one."""


def in_own_process(name: str, make: Callable[..., Any], *args: Any) -> Any:
    """Calls `make(path, *args)` in a fresh process and returns the JSON that it writes to `path`.

    Raises MakingFailed: it ended with an error, which is on standard error.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "out.json"
        process = multiprocessing.get_context("spawn").Process(
            target=_guarded, args=(make, path, *args)
        )
        process.start()
        try:
            process.join()
        except BaseException:
            process.kill()
            process.join()
            raise
        if not path.exists():
            raise MakingFailed(f"{name}: ended with status {process.exitcode}; see above")
        return json.loads(path.read_text("utf-8"))


def _guarded(make: Callable[..., Any], path: Path, *args: Any) -> None:
    try:
        make(path, *args)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as e:
        print(f"\n{e}", file=sys.stderr)
        sys.exit(1)


def make_plan(wanted: Wanted, cache_dir: Path | None, say: Say) -> dict[str, Any]:
    """Makes a plan. Raises ValueError: as step_plan.make_plan, and where no machine of a kind holds the model."""
    from lingvo_moe.analysis.plans import step_plan
    from lingvo_moe.analysis.search import best_plan

    make = step_plan.make_plan if ":" in wanted.topology else best_plan.smallest_slice
    return make(step_plan.Request(**asdict(wanted)), cache_dir, say)
