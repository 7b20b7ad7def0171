"""Reads, writes and compares recorded plans, docs/plans/<name>.json, which are small enough to read in a diff."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lingvo_moe.analysis.plans import golden
from lingvo_moe.core.files import files

COMPILE_TIME = "compile_time"  # benchmarks/compile_time.py's, beside the plans
_HOLDERS = 12


class MissingGoldens(ValueError):
    """Plans that the page needs are not recorded."""


def path_of(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"


def read(directory: Path, name: str) -> dict[str, Any] | None:
    """A recorded plan, None where there is none. Raises ValueError, naming the file, for a damaged one."""
    path = path_of(directory, name)
    try:
        plan = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise ValueError(f"{path}: not JSON: {e}") from None
    if not isinstance(plan, dict) or (name != COMPILE_TIME and plan.get("version") != 1):
        raise ValueError(f"{path}: no plan of version 1; make it again with --plans --update")
    return plan


def read_all(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Reads the recorded plans among `names`, by name; a name without one is left out."""
    plans = {name: read(directory, name) for name in dict.fromkeys(names)}
    return {name: plan for name, plan in plans.items() if plan is not None}


def write(directory: Path, name: str, plan: dict[str, Any]) -> None:
    """Records a compacted plan atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path_of(directory, name), to_text(compact(plan)).encode())


def compact(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with floats of six figures and the largest holders of memory only."""
    out = _rounded(plan)
    memory = out.get("memory")
    if memory and memory.get("holders"):
        rows = sorted(memory["holders"], key=lambda row: -row["bytes"])
        out["memory"] = memory | {"holders": rows[:_HOLDERS]}
    return out


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def to_text(plan: dict[str, Any]) -> str:
    """JSON with a line for each field, and for each row of a table, so that diffs read well."""
    return "{\n" + ",\n".join(_lines(plan)) + "\n}\n"


def _lines(plan: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in plan.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n".join(f" {_dump(row)}" for row in value)
            lines.append(f'"{key}":[\n{rows}]')
        else:
            lines.append(f'"{key}":{_dump(value)}')
    return lines


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One sentence for each difference of `new` from the recorded `old`; see analysis/plans/golden.py."""
    out = []
    old_name, new_name = old["topology"]["name"], new["topology"]["name"]
    if old_name != new_name:
        out.append(f"topology is {new_name}, was {old_name}")
    return out + golden.differences(compact(old), compact(new))
