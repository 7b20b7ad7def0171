"""The core of the suite over two processes of four devices.

Every case of the `cases_*` modules that says `several_processes`, and whose mesh has the eight devices
of both processes, runs in both. A case that fails is named; the others run on.
"""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from processes import free_address, start_python

HERE = Path(__file__).parent

# Importable by the workers, so nothing here touches TensorFlow or JAX before they have joined the job.
_WORKER = """
import json, sys
from lingvo_moe.core.console.tensorflow_import import import_tensorflow
from lingvo_moe.core.engine.devices import initialize_distributed, request_cpu_devices
address, number, names = sys.argv[1], int(sys.argv[2]), sys.argv[3]
request_cpu_devices(4)
initialize_distributed(address, 2, number)
import_tensorflow()
import test_several_processes
test_several_processes.work(json.loads(names))
"""


def work(names: list[str]) -> None:
    """Checks the named cases and prints a JSON line for each, and one about the process."""
    import jax
    from spmd_case import check

    print(json.dumps({"processes": jax.process_count(), "devices": jax.local_device_count()}))
    found = chosen()
    cases = [found[name] for name in names]
    for name, case in zip(names, cases, strict=True):
        problem = ""
        try:
            check(case, cases)
        except Exception as e:  # reported by name, so that the other cases run too
            problem = f"{type(e).__name__}: {str(e)[:500]}"
        print(json.dumps({"case": name, "problem": problem}), flush=True)


def chosen() -> dict:
    """All cases that run in several processes, by 'module::name'.

    Their results are replicated: JAX cannot fetch from other processes what no axis of a mesh names, such as a sharding
    over devices in another order.
    """
    from lingvo_moe.core.sharding import Mesh

    found = {}
    for path in sorted(HERE.glob("cases_*.py")):
        for case in importlib.import_module(path.stem).CASES:
            if case.several_processes and Mesh.parse(case.mesh).size == 8:
                found[f"{path.stem}::{case.name}"] = replace(case, whole=True)
    return found


def _run(names: list[str]) -> list[list[dict]]:
    """Returns the lines that each process printed."""
    address = free_address()
    workers = [start_python("-c", _WORKER, address, str(i), json.dumps(names)) for i in range(2)]
    try:
        printed = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, error) in zip(workers, printed, strict=True):
        assert worker.returncode == 0, error[-3000:]
    return [
        [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        for out, _ in printed
    ]


@pytest.mark.slow
def test_cases():
    names = list(chosen())
    assert len(names) >= 16
    for about, *cases in _run(names):
        assert about == {"processes": 2, "devices": 4}
        assert [case["case"] for case in cases] == names
        problems = [f"{case['case']}: {case['problem']}" for case in cases if case["problem"]]
        assert not problems, "\n".join(problems)


def test_a_failing_case_is_named(monkeypatch, capsys):
    import numpy as np
    from spmd_case import Case

    from lingvo_moe.core.sharding import split

    x = np.ones((8,), np.float32)
    wrong = Case("wrong", lambda x: split(x, 0, 8), [x], reference=lambda x: x + 1.0)
    fine = Case("fine", lambda x: split(x, 0, 8), [x])
    monkeypatch.setattr(sys.modules[__name__], "chosen", lambda: {"wrong": wrong, "fine": fine})
    work(["wrong", "fine"])
    _, first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["case"] == "wrong" and "wrong: value[0]: off by 1.0" in first["problem"]
    assert second == {"case": "fine", "problem": ""}
