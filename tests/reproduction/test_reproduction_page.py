"""The reproduction page: one from invented plans, the committed one from the recorded plans; plans made."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from made_up_plans import collective, make_plan, work

from lingvo_moe.reproduction import goldens, making, page, requests
from lingvo_moe.reproduction.requests import REQUESTS
from tools import reproduce
from tools.import_graph import ROOT

_GIB = 2**30
# A few words of the reasons that the page states.
_REASONS = {
    "dispatch": "as its share of communication by AllToAll",
    "faster": "estimates without any waiting",
    "slower": "overlaps no communication with arithmetic",
    "dense": "The paper trained it with GPipe",
    "compile_time": "the growth is inside the compiler",
}


def _work(part: str, phase: str, seconds: float) -> dict[str, Any]:
    return work(part, phase, seconds / 2, seconds / 4, seconds)


def _talk(kind: str, part: str, seconds: float, phase: str = "forward") -> dict[str, Any]:
    return collective(kind, "encoder.moe", part, phase, 18, 2**24, seconds)


def _topology(text: str) -> dict[str, Any]:
    """A slice, of 4x4x4 chips if the text does not say, or a cluster of 16 nodes."""
    kind, _, size = text.partition(":")
    of_gpus = kind in requests.CARDS
    dims = [int(n) for n in (size or ("16x8" if of_gpus else "4x4x4")).split("x")]
    chips = math.prod(dims)
    common = {
        "name": f"{kind}:{'x'.join(map(str, dims))}",
        "devices": chips * (2 if kind == "v3" else 1),
        "chips": chips,
    }
    if of_gpus:
        return common | {"card": kind, "nodes": dims[0], "gpus_per_node": dims[1]}
    return make_plan()["topology"] | common | {"generation": kind, "torus": dims, "clock_hz": 940e6}


def _plan(wanted, step=1.0, talk=0.1, held=10.0, fits=True):
    """An invented plan with 0.4 s of experts, 0.2 s of attention and `talk` s of forward all-to-all."""
    plan, topology = make_plan(), _topology(wanted.topology)
    plan |= {"model": wanted.model, "override": wanted.override, "what": wanted.what}
    plan |= {"mesh": f"expert:{topology['devices']}", "topology": topology}
    plan["compile"] |= {"lower_seconds": 20.0, "compile_seconds": 60.0, "host_peak_bytes": None}
    plan["memory"] |= {
        "needed": int(held * _GIB),
        "fits": fits,
        "misses_by": 0 if fits else int((held - 16) * _GIB),
        "kept_for_backward": 3 * _GIB,
        "holders": [{"layer": "", "part": "experts", "bytes": n} for n in range(20)],
    }
    if not fits:
        return plan | {"work": [], "collectives": [], "time": None}
    plan["work"] = [
        _work("experts", "forward", 0.4),
        _work("attention", "forward", 0.2),
        _work("dispatch_combine", "forward", 0.1),
        _work("experts", "backward", 1 / 3),
    ]
    plan["collectives"] = [
        _talk("all-to-all", "dispatch_combine", talk),
        _talk("all-reduce", "softmax", 0.1, "backward"),
    ]
    if "nodes" in topology:
        plan["compile"]["host_peak_bytes"] = 2 * _GIB
        for row in plan["collectives"]:
            row["nodes"] = topology["nodes"]
    plan["time"] |= {
        "step_seconds": step,
        "steps_per_second": 1 / step,
        "tokens_per_second": 2**22 / step,
        "days": 2.76 * step,
        "device_years": 15.5 * step,
        "chip_days": 2826.0 * step,
    }
    return plan


@pytest.fixture
def plans() -> dict[str, dict[str, Any]]:
    """All plans. With 2048 experts all-to-all takes 0.5 s instead of 0.1 s; 60 layers need bfloat16."""
    made = {name: _plan(wanted) for name, wanted in REQUESTS.items()}
    made[requests.weak(2048, 36)] = _plan(
        REQUESTS[requests.weak(2048, 36)], step=1.6, talk=0.5, held=10.5
    )
    for experts in requests.CORES:
        name = requests.weak(experts, 60)
        made[name] = _plan(REQUESTS[name], held=18.0, fits=False)
    one = {"stages": 8, "schedule": "1f1b", "micro_batches": 64, "bubble": 0.1}
    made[requests.PIPELINED_NAME]["pipelines"] = [one]
    return made


@pytest.fixture
def compiling() -> dict[str, Any]:
    return {
        "rounds": 2,
        "host": "2 CPU cores",
        "entries": [
            {
                "devices": devices,
                "lower_seconds": 20.0,
                "compile_seconds": 40.0 + i,
                "program_bytes": 10**6,
            }
            for i, devices in enumerate(requests.COMPILED)
        ],
    }


def _words(markdown: str) -> str:
    """The text without line breaks and quotation marks."""
    return " ".join(markdown.replace("\n> ", "\n").split())


def test_every_figure_reads_plans_that_are_requested():
    used = {name for names in requests.GROUPS.values() for name in names}
    assert used == set(REQUESTS)
    assert all(re.fullmatch(r"[\w-]+", name) for name in REQUESTS)


def test_the_plans_of_weak_scaling_have_2048_tokens_and_an_expert_on_each_core():
    from lingvo_moe.core.config import registry

    for experts in requests.CORES:
        for layers in requests.LAYERS:
            wanted = REQUESTS[requests.weak(experts, layers)]
            p = registry.GetParams(wanted.model, wanted.override)
            assert p.input.batch_size * p.input.target_length == 2048 * experts
            assert p.task.num_experts == p.task.num_groups == experts
    for devices, name in requests.COMPILED.items():
        wanted = REQUESTS[name]
        p = registry.GetParams(wanted.model, wanted.override)
        assert p.task.num_experts == p.task.num_groups == devices
        assert p.input.batch_size == requests.ROWS_A_CORE * devices
        assert p.task.num_encoder_layers == p.task.num_decoder_layers == 18


def test_the_page_holds_the_ratios_of_the_plans(plans, compiling):
    text = _words(page.write(plans, compiling))
    assert "compiling takes 1.10 times as long" in text  # 44 / 40
    assert (
        "16 times the experts take 1.50 times as long forward, and 1.60 times" in text
    )  # 1.2 / 0.8
    # (0.1 + 0.1) / 0.8 and (0.1 + 0.5) / 1.2; of the all-to-all alone 0.1 / 0.8 and 0.5 / 1.2
    assert "Dispatch and combine go from 25% to 50%, their all-to-all alone from 12% to 42%" in text
    assert "The roofline is 44% and 29% of the time" in text  # 0.35 / 0.8, 0.35 / 1.2
    assert "memory differs by 1.00 to 1.05 times" in text
    told = "| MoE(2048E, 36L) | 2048 | 4M | 0.72 | 0.625 | 22.4 | 24.8 | 4.0 | 4.42 | 10.5 GiB |"
    assert told in text
    assert "float32 activations does not fit: it misses by 2.0 GiB" in text
    assert "has 1 all-to-alls forward for each of the 18 MoE layers, and no all-gathers" in text
    told = "| lowering and compiling MoE(2048E, 36L), and the host's memory | – | 80 s | timed |"
    assert told in text


def test_differences_beyond_a_threshold_are_told_with_a_reason(plans, compiling):
    text = _words(page.write(plans, compiling))
    assert "**Differs:** 25% here, and in the paper dispatch and combine take 16%" in text
    assert _REASONS["dispatch"] in text
    assert "**Differs:** slower here than in the paper: MoE(2048E, 12L) 2.15 times, " in text
    assert _REASONS["slower"] in text
    assert _REASONS["compile_time"] not in text
    compiling["entries"][-1]["compile_seconds"] = 53.0
    assert _REASONS["compile_time"] in _words(page.write(plans, compiling))


def test_missing_plans_are_named(plans, compiling):
    gone = requests.DECODE
    del plans[gone]
    with pytest.raises(goldens.MissingGoldens, match=f"plans are missing in docs/plans: {gone};"):
        page.write(plans, compiling)


def test_a_missing_measurement_is_named(plans):
    with pytest.raises(goldens.MissingGoldens, match="compile_time is missing"):
        page.write(plans, None)


def test_the_pictures_have_the_figures_of_the_page():
    """They are files: new plans whose figures differ need new pictures, or none."""
    text = (ROOT / "docs" / "reproduction.md").read_text("utf-8")
    labels = {
        name: re.findall(r">([^<]*)</text>", (ROOT / "docs" / name).read_text("utf-8"))
        for name in re.findall(r"\((images/[^)]+)\)", text)
    }
    assert len(labels) == 5
    (milliseconds,) = re.findall(r"\| all \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text)
    for each in milliseconds:
        assert f"{round(float(each))} ms" in labels["images/reproduction_forward.svg"]
    sizes = re.findall(r"\| (?:12|36) layers \|(?: ([\d.]+) GiB \|){3}", text)
    assert len(sizes) == 2 and {*sizes} <= {*labels["images/reproduction_memory.svg"]}


def _record(docs: Path, plans: Any, compiling: Any) -> None:
    for name, plan in plans.items():
        goldens.write(docs / "plans", name, plan)
    (docs / "plans" / "compile_time.json").write_text(json.dumps(compiling))


def test_the_tool_writes_page_and_pictures(tmp_path, plans, compiling, capsys):
    assert reproduce.main([f"--docs={tmp_path}"]) == 1
    assert "plans are missing" in capsys.readouterr().err
    _record(tmp_path, plans, compiling)
    assert reproduce.main([f"--docs={tmp_path}"]) == 0
    assert (tmp_path / "reproduction.md").read_text() == page.write(
        goldens.read_all(tmp_path / "plans", REQUESTS), compiling
    )
    assert reproduce.main(["--list", f"--docs={tmp_path}"]) == 0
    assert f"[x] {requests.DECODE}: mt.M4MoE2048E36L on v3:32x32, decode" in capsys.readouterr().out


def test_new_plans_are_compared_and_recorded(tmp_path, plans, monkeypatch, capsys):
    name = requests.DECODE
    made = plans[name]
    monkeypatch.setattr(reproduce.making, "in_own_process", lambda *_: made)
    flags = ["--plans", f"--only={name}", f"--docs={tmp_path}"]
    assert reproduce.main(flags) == 1
    assert "it was not recorded" in capsys.readouterr().out
    assert reproduce.main([*flags, "--update"]) == 0
    assert reproduce.main(flags) == 0
    made["collectives"][0]["count"] = 19
    assert reproduce.main(flags) == 1
    told = "encoder.moe, dispatch_combine, forward: 19 all-to-all a step, were 18"
    assert told in capsys.readouterr().out
    assert reproduce.main([*flags, "--missing"]) == 0
    assert "0 of 0 plans" in capsys.readouterr().out


def test_the_committed_page_is_that_of_the_recorded_plans():
    docs = ROOT / "docs"
    recorded = goldens.read_all(docs / "plans", REQUESTS)
    written = docs / "reproduction.md"
    if not recorded:
        assert not written.exists(), "a page without the plans that it is from"
        return
    compiling = goldens.read(docs / "plans", goldens.COMPILE_TIME)
    text = page.write(recorded, compiling)
    assert written.exists(), "plans without the page: run make reproduction"
    assert written.read_text("utf-8") == text, "stale: run make reproduction"


def test_a_plan_is_made_in_a_process_of_its_own(tmp_path, capfd):
    assert making.in_own_process("three", Path.write_text, "[3]") == [3]
    with pytest.raises(making.MakingFailed, match="three: ended with status 1"):
        making.in_own_process("three", Path.read_text)
    assert "No such file" in capfd.readouterr().err
