"""Programs compiled by the real TPU compiler for TPUs that this machine does not have."""

import importlib.util

import pytest
from gram import gram
from processes import run_python

from lingvo_moe.analysis.programs.aot import aot, aot_tpu
from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.core.engine.base import EngineError

# As libtpu words it once it has placed all buffers.
PLACED = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. \
Used 18.71G of 15.48G hbm. Exceeded hbm capacity by 3.24G.

Total hbm usage >= 19.24G:
    reserved        530.00M
    program          18.71G
    arguments            0B

  Largest program allocations in hbm:

  1. Size: 512.0K
     Shape: f32[128,1024]{1,0:T(8,128)}
     Unpadded size: 512.0K
     XLA label: copy.1 = f32[128,1024]{1,0:T(8,128)} copy(%p)
     Allocation type: HLO temp
     ==========================

  2. Size: 9.35G
     Operator: op_name="jit(step)/m4/encoder/ffn/router/Softmax" source_file="x.py"
     Shape: bf16[9,128,1024]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 4.00G
     Extra memory due to padding: 5.35G (2.3x expansion)
     XLA label: fusion.3 = bf16[9,128,1024]{2,1,0:T(8,128)(2,1)} fusion(%a), kind=kLoop
     Allocation type: HLO temp
     ==========================
"""


@pytest.mark.parametrize("name", ["v9:2x2", "v9:2x2*2", "v3:3x3", "v3:7", "v3:axb", "v3"])
def test_a_topology_that_the_compiler_does_not_know(name, capfd):
    with pytest.raises(EngineError, match=r"the TPU compiler knows no such slice .*v3:32x32") as e:
        aot.devices_of(name)
    assert f"topology {name!r}" in str(e.value)
    assert "\n" not in str(e.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["", "v5p:2x2x1*", "v5p:2x2x1*0"])
def test_no_topology_or_no_number_of_slices(name):
    with pytest.raises(EngineError, match=r"a name is a generation"):
        aot.devices_of(name)


def test_compiling(capfd):
    result = aot.compile_for_topology(gram(1024), "v3:2x2")
    assert "is_scheduled=true" in result.hlo_text
    assert [c.kind for c in parse_collectives(result.hlo_text)] == ["all-gather"]
    # A device holds 1/8 of the argument and the whole result.
    assert result.memory["arguments"] == 1024 // 8 * 512 * 4
    assert result.memory["outputs"] == 1024 * 1024 * 4
    memory = result.memory
    assert memory["peak"] >= memory["arguments"] + memory["outputs"] - memory["aliased"]
    assert memory["code"] > 0
    assert result.cost["flops"] > 2 * 1024 * 128 * 512
    assert 0 < result.compile_seconds < 120
    assert result.host_peak_bytes > 2**26
    assert capfd.readouterr().err == ""


def test_a_program_that_does_not_fit():
    with pytest.raises(aot.OutOfMemory, match="'gram' does not fit v3:2x2") as e:
        aot.compile_for_topology(gram(2**18), "v3:2x2")
    assert e.value.needed_bytes > 2**18 * 2**18 * 4
    assert e.value.limit_bytes == pytest.approx(15.48 * 2**30, rel=1e-3)
    assert "\n" not in str(e.value)
    assert "RESOURCE_EXHAUSTED" in e.value.compiler_message
    # The refused program can be inspected.
    assert "is_scheduled=true" in e.value.hlo_text
    assert "f32[262144,262144]" in e.value.hlo_text


def test_what_the_compiler_says_of_large_buffers():
    error = aot_tpu.out_of_memory("step", "v3:2x2", PLACED)
    assert error.needed_bytes == round(18.71 * 2**30)
    assert error.limit_bytes == round(15.48 * 2**30)
    large, small = error.holders
    assert large == (
        round(9.35 * 2**30),
        "jit(step)/m4/encoder/ffn/router/Softmax",
        "bf16[9,128,1024]{2,1,0:T(8,128)(2,1)}",
    )
    assert small == (2**19, "", "f32[128,1024]{1,0:T(8,128)}")


def test_no_compiler_installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "libtpu" else find(name, *a)
    )
    with pytest.raises(EngineError, match=r"pip install 'jax\[tpu\]'"):
        aot.compiler_versions("v3:2x2")


def test_sigterm_prints_no_crash_where_libtpu_is_loaded():
    """Also where another thread loads it."""
    pytest.importorskip("libtpu")
    code = """
import os, signal, threading
from lingvo_moe.analysis.programs.aot import aot
thread = threading.Thread(target=aot.devices_of, args=["v3:2x2"])
thread.start(), thread.join()
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = run_python("-c", code)
    assert (done.returncode, "SIGTERM" in done.stderr) == (-15, False), done.stderr
