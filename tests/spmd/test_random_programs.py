"""Random annotated programs and chains: the detector names XLA's partitioner where it computes wrongly, and only there.

Continuous builds run the same few every time; `make fuzz` runs as many others as requested, half of them chains.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from jax.errors import JaxRuntimeError
from random_chains import OPERATIONS, RandomChain, random_chain
from random_programs import KINDS, RandomProgram, random_program

from lingvo_moe import xla_sharding as xs
from lingvo_moe.analysis.programs.aot.partition_dump import dump_options, read_before
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.analysis.programs.partitioner import known_faults as kf
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.sharding import Mesh, ShardingError

TOLERANCE = 2e-4
CASES = int(os.environ.get("FUZZ_PROGRAMS", "16"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
# Each program runs once, so short compile times matter more than speed.
_SOON = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def examine(program: RandomProgram | RandomChain) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Compiles and runs a program over its mesh, and by TensorFlow in float64 on one device.

    Returns:
        The results that differ, with the error relative to the largest magnitude; and the faults that the
        detector names, as (kind, operation).
    """
    args = program.Args()
    is_searched = isinstance(program, RandomChain) and program.is_searched
    results, faults = (_searched if is_searched else _annotated)(program, args)
    double = [tf.constant(a, tf.float64 if a.dtype == np.float32 else a.dtype) for a in args]
    differing = {}
    wanted = program(*double, annotated=False)
    for name, got, want in zip(program.ResultNames(), results, wanted, strict=True):
        error = np.max(np.abs(np.asarray(got) - want)) / max(np.max(np.abs(want)), 1e-2)
        if not error <= TOLERANCE:
            differing[name] = float(error)
    return differing, faults


def _annotated(program, args):
    engine = PjrtEngine(Mesh.parse(program.mesh), known_faults="off")
    specs = [TensorSpec(a.shape, a.dtype.name) for a in args]
    lowered = lower(program, specs, engine.mesh, name="program")
    with tempfile.TemporaryDirectory() as directory:
        compiled = engine.Compile(lowered, _SOON | dump_options(directory))
        faults = kf.known_faults(parse_module(read_before(Path(directory))))
    return compiled(*args), [(fault.kind, fault.op.rpartition("/")[2]) for fault in faults]


def _searched(program, args):
    """Runs a program in eager code under `xs.auto_shard`, whose refusal stands for the faults."""
    tensors, mesh = [tf.constant(a) for a in args], Mesh.parse(program.mesh)
    try:
        return program.Differentiated(xs.auto_shard(program.Value, mesh), tensors), []
    except ShardingError as e:
        fn = xs.auto_shard(program.Value, mesh, known_faults="off")
        return program.Differentiated(fn, tensors), [("refused", str(e))]


def _examine_one(program: RandomProgram | RandomChain) -> None:
    try:
        differing, faults = examine(program)
    except JaxRuntimeError as e:
        pytest.skip(f"XLA does not compile it: {e}")
    # Of the scatters that are named, a few come to no harm.
    harmless = {kf.SCATTER, "refused"} if isinstance(program, RandomChain) else set()
    right = not differing and {kind for kind, _ in faults} <= harmless
    assert right or (differing and faults), f"{differing} differ, {faults} named in\n{program!r}"


@pytest.mark.slow  # in all
@pytest.mark.parametrize("number", range(CASES // 2))
def test_what_is_wrong_is_named_and_nothing_else(number):
    _examine_one(random_program(SEED + number))


@pytest.mark.slow  # in all
@pytest.mark.filterwarnings("ignore:auto_shard")
@pytest.mark.parametrize("number", range(CASES // 2))
def test_what_is_wrong_is_named_in_chains(number):
    _examine_one(random_chain(SEED + number))


def test_programs_and_chains_cover_what_they_are_drawn_from():
    drawn = [random_program(number) for number in range(200)]
    assert {p.kind for p in drawn} == set(KINDS)
    assert sum(any(any(cut) for _, cut in p.cuts) for p in drawn) >= 160
    chains = [random_chain(number) for number in range(100)]
    assert {step.op for p in chains for step in p.steps} == set(OPERATIONS)
    assert 5 <= sum(p.is_searched for p in chains) <= 20


# Programs that this test found, each with the faults that the detector must name.
WRONG = {
    "attention whose heads and scores are sharded differently": (
        RandomProgram(
            "attention",
            "a:4,b:2",
            (("B", 8), ("H", 8), ("M", 16), ("N", 8), ("T", 16)),
            (("wv", (None, "a", "b")), ("wo", ("a", "b", None)), ("probs", ("a", "b", None, None))),
            (("causal", "no"), ("residual", "no")),
        ),
        (kf.BATCH, "Einsum"),
    ),
    "a perceptron whose rows are sharded in another order of axes after a sum": (
        RandomProgram(
            "perceptron",
            "a:2,b:2,c:2",
            (("B", 16), ("H", 24), ("M", 8), ("T", 24)),
            (*(("x", ("b", "c", "a")), ("wi", ("a", "b"))), ("act", (("c", "b"), None, "a"))),
            (("norm", "no"), ("act", "tanh")),
        ),
        (kf.EXCHANGED, "Einsum"),
    ),
    "an image's gradient sharded along rows, of a result sharded along features": (
        RandomProgram(
            "convolution",
            "a:4,b:2",
            tuple(zip("BFIKOPXY", (8, 1, 24, 5, 8, 16, 8, 12))),
            (
                *(("x", ("a", "b", None, None)), ("kernel", (None, None, "b", None))),
                ("conv", (None, None, None, "b")),
            ),
            (("stride", "1"), ("padding", "SAME"), ("pool", "no")),
        ),
        (kf.COPIES, "Conv2DBackpropInput_1"),
    ),
    "a depthwise kernel gradient grouped by channels": (
        RandomProgram(
            "depthwise",
            "a:2,b:2,c:2",
            tuple(zip("BIKOXY", (8, 24, 5, 8, 12, 8))),
            (("x", (None, None, "b", "a")), ("y", (None, None, "b", None))),
            (("stride", "2"), ("padding", "SAME")),
        ),
        (kf.COPIES, "DepthwiseConv2dNativeBackpropFilter"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="XLA's partitioner")
def test_wrong_numbers(name):
    program, fault = WRONG[name]
    differing, faults = examine(program)
    if faults != [fault]:
        pytest.fail(f"named {faults}, not {fault}")  # no AssertionError: never the expected failure
    assert not differing
