"""Programs compiled by XLA's GPU compiler for GPUs that this machine does not have."""

from importlib import metadata

import pytest
from gpu_compiler import needs_gpu_compiler
from gram import gram
from processes import run_python

from lingvo_moe.analysis.plans.tables import number_formats
from lingvo_moe.analysis.plans.work.costs import costs
from lingvo_moe.analysis.programs.aot import aot
from lingvo_moe.analysis.programs.aot.gpu_targets import TARGETS
from lingvo_moe.analysis.programs.aot.partition_dump import dump_options
from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.core.engine import cuda_plugin
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.gpu_memory import usable_bytes


@needs_gpu_compiler
@pytest.mark.parametrize("card", TARGETS)
def test_every_card_can_be_described(card, capfd):
    devices = aot.devices_of(f"{card}:2x4")
    assert [d.id for d in devices] == list(range(8))  # those of a node follow each other
    assert {d.device_kind for d in devices} == {TARGETS[card].label}
    assert capfd.readouterr().err == ""


@needs_gpu_compiler
@pytest.mark.parametrize("dtype, size, kind", [("float32", 4, "tf32"), ("bfloat16", 2, "bfloat16")])
def test_compiling(dtype, size, kind):
    result = aot.compile_for_topology(gram(1024, dtype), "h100:1x8")
    assert "is_scheduled=true" in result.hlo_text
    assert "sharding=" in result.partitioner_input
    assert [c.kind for c in parse_collectives(result.hlo_text)] == ["all-gather"]
    memory = result.memory
    # A device holds 1/8 of the argument and the whole result.
    assert memory["arguments"] == 1024 // 8 * 512 * size
    assert memory["outputs"] == 1024 * 1024 * size
    assert memory["needed"] == (
        memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]
    )
    assert memory["peak"] <= memory["needed"]
    formats = number_formats(costs(parse_module(result.hlo_text)))
    assert set(formats) == {kind}
    assert formats[kind] in (2 * 1024 * 128 * 512, 2 * 1024 * 1024 * 512)


@needs_gpu_compiler
@pytest.mark.parametrize("card", ["a100", "h100"])
def test_the_machine_code_multiplies_float32_in_tf32(card, tmp_path):
    lowered = aot.lower_for_topology(gram(1024), f"{card}:1x8")
    lowered.compile(compiler_options=dump_options(tmp_path))
    products = [line for path in tmp_path.glob("*.ptx") for line in path.read_text().splitlines()]
    products = [line for line in products if "mma." in line]
    assert products
    assert all("tf32" in line for line in products)


@needs_gpu_compiler
def test_a_program_that_does_not_fit_misses_by_what_xla_would_allocate():
    with pytest.raises(aot.OutOfMemory, match="'gram' does not fit l4:1x8") as e:
        aot.compile_for_topology(gram(2**17), "l4:1x8")
    assert e.value.needed_bytes > 2**17 * 2**17 * 4
    assert e.value.limit_bytes == usable_bytes(TARGETS["l4"].memory_bytes)
    assert "f32[131072,131072]" in e.value.hlo_text
    assert "\n" not in str(e.value)


@needs_gpu_compiler
def test_the_identity_names_compiler_card_and_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    h100, h200 = aot.compiler_identity("h100:1x8"), aot.compiler_identity("h200:1x8")
    assert h100.startswith(f"jax-cuda12-pjrt-{metadata.version('jax-cuda12-pjrt')}-jax-")
    assert h100 != h200
    assert h100 == aot.compiler_identity(
        "h100:32x8"
    )  # the topology's name is another part of the key
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true")
    assert aot.compiler_identity("h100:1x8") not in (h100, h200)


@pytest.mark.parametrize("name, told", [
    ("h10:1x8", r"no description of a card 'h10' .did you mean 'h100'"),
    ("h100", "a name is a card, the nodes and the GPUs of a node, e.g. 'h100:32x8'"),
    ("h100:8", "a name is a card"),
])  # fmt: skip
def test_a_cluster_that_cannot_be_described(name, told):
    with pytest.raises(EngineError, match=told) as e:
        aot.devices_of(name)
    assert "\n" not in str(e.value)


def test_no_compiler_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cuda_plugin.importlib.metadata, "version", missing)
    with pytest.raises(EngineError, match=r"pip install --no-deps -r requirements-gpu\.txt") as e:
        aot.compiler_versions("h100:1x8")
    assert "\n" not in str(e.value)


_STARTS = """
import lingvo_moe.core.engine, jax
jax.devices()
print(any("xla_cuda" in line for line in open("/proc/self/maps")))
"""


@needs_gpu_compiler
@pytest.mark.skipif(cuda_plugin.can_run(), reason="JAX can use GPUs here")
def test_other_processes_do_not_load_the_compiler():
    done = run_python("-c", _STARTS, timeout=300)
    assert done.stdout.strip() == "False"
    assert "cuda" not in done.stderr.lower(), done.stderr
