"""Every compile for several devices refuses what XLA's partitioner is known to compute wrongly."""

import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorflow as tf
from processes import run_python

from lingvo_moe import xla_sharding as xs
from lingvo_moe.analysis.programs import checking
from lingvo_moe.analysis.programs.partitioner import known_faults
from lingvo_moe.core.engine import xla
from lingvo_moe.core.engine.base import EngineError
from lingvo_moe.core.engine.compiled_cache import enable_compilation_cache
from lingvo_moe.core.engine.lowering import embedding
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.sharding import ShardingError

MESH = xs.Mesh.parse("data:2,model:4")
SPECS = [TensorSpec((16, 16), "float32")] * 2
ARGS = [np.arange(256, dtype=np.float32).reshape(16, 16)] * 2


def wrong(x, y):
    """The batch is sharded over data in the operands and over model in the result."""
    x, y = (xs.mesh_split(t, MESH, ("data", "model")) for t in (x, y))
    return xs.mesh_split(tf.einsum("fa,fa->f", x, y), MESH, ("model",))  # the line


def right(x, y):
    x, y = (xs.mesh_split(t, MESH, ("data", "model")) for t in (x, y))
    return xs.mesh_split(tf.einsum("fa,fa->f", x, y), MESH, ("data",))


REFUSED = r"(?s)'wrong': XLA's partitioner.*test_checking.py:\d+: .*Einsum: the batch.*Instead: "


def test_a_known_fault_is_an_error_with_line_and_remedy():
    engine = PjrtEngine(MESH)
    with pytest.raises(ShardingError, match=REFUSED) as error:
        engine.Build(wrong, SPECS)
    assert "known_faults=warn runs it" in str(error.value)
    assert engine.Build(right, SPECS)(*ARGS).shape == (16,)


def test_who_imports_the_engine_alone_is_refused_too(tmp_path):
    """The check is in another part of the package, which the engine does not import."""
    lower(wrong, SPECS, MESH).Save(path := str(tmp_path / "wrong"))
    done = run_python(
        "-c",
        "import jax\n"
        "from lingvo_moe.core.engine.lowering.program import Program\n"
        "from lingvo_moe.core.engine.pjrt import PjrtEngine\n"
        "jax.config.update('jax_num_cpu_devices', 8)\n"
        f"PjrtEngine({str(MESH)!r}).Compile(Program.Load({path!r}))",
        env={"XLA_FLAGS": None, "JAX_PLATFORMS": "cpu"},
    )
    assert "ShardingError: program 'wrong': XLA's partitioner would" in done.stderr


def test_a_program_that_xla_itself_then_refuses_is_named_too(monkeypatch):
    """The gradient of a strided slice, as TensorFlow writes it."""

    def strided(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = xs.replicate(xs.split(x, 0, 8)[::2])
        return tape.gradient(z, x, y[:8])

    monkeypatch.setattr(embedding, "without_interior_padding", lambda module: None)
    with pytest.raises(ShardingError, match="StridedSliceGrad: dimension 0 is padded between"):
        PjrtEngine(MESH).Build(strided, SPECS)


def test_a_warning_is_printed_and_off_does_not_look(capfd):
    PjrtEngine(MESH, known_faults="warn").Build(wrong, SPECS)
    assert "warning: program 'wrong': XLA's partitioner would compute" in capfd.readouterr().err
    PjrtEngine(MESH, known_faults="off").Build(wrong, SPECS)
    assert "partitioner would" not in capfd.readouterr().err
    PjrtEngine(MESH, known_faults="warn").Build(right, SPECS)
    assert "partitioner would" not in capfd.readouterr().err


def test_functions_called_from_eager_code_are_checked_and_their_gradients():
    x, y = (tf.constant(a) for a in ARGS)
    with pytest.raises(ShardingError, match=REFUSED):
        xs.shard_function(wrong, mesh=MESH)(x, y)
    xs.shard_function(wrong, mesh=MESH, known_faults="off")(x, y)

    def backward_only(x, y):
        """Its forward program is right; its gradient is computed wrongly."""

        @tf.custom_gradient
        def fn(x, y):
            return tf.einsum("fa,fa->f", x, y), lambda dz: (wrong(x, y)[:, None] * y, x)

        return fn(x, y)

    sharded = xs.shard_function(backward_only, mesh=MESH)
    assert sharded(x, y).shape == (16,)
    with tf.GradientTape() as tape:
        tape.watch(x)
        z = sharded(x, y)
    with pytest.raises(ShardingError, match="the batch"):
        tape.gradient(z, x)


@pytest.fixture
def cache(tmp_path):
    """The directory of a cache that keeps every compiled program."""
    was = jax.config.jax_compilation_cache_dir
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        entries = enable_compilation_cache(str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        yield entries
    finally:
        jax.config.update("jax_compilation_cache_dir", was)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def test_a_cache_of_compiled_programs_keeps_right_ones_alone(cache, monkeypatch):
    def kept():
        return len(os.listdir(cache))

    PjrtEngine(MESH, known_faults="warn").Build(wrong, SPECS)
    assert kept() == 0
    with pytest.raises(ShardingError, match=REFUSED):
        PjrtEngine(MESH).Build(wrong, SPECS)
    PjrtEngine(MESH).Build(right, SPECS)
    assert kept() == 1
    # A program that was compiled without the check does not serve a compile with it.
    PjrtEngine(MESH, known_faults="off").Build(wrong, SPECS)
    with pytest.raises(ShardingError, match=REFUSED):
        PjrtEngine(MESH).Build(wrong, SPECS)
    entries = kept()
    monkeypatch.setattr(checking, "find_faults", lambda *_: pytest.fail("not from the cache"))
    PjrtEngine(MESH).Build(right, SPECS)
    assert kept() == entries


@pytest.mark.filterwarnings("error")
def test_a_compile_that_writes_nothing_down_is_an_error_and_is_not_kept(cache, monkeypatch):
    """An empty dump is an error, also with the cache of compiled programs, which the trainer always has."""
    monkeypatch.setattr(checking, "dump_options", lambda _: {})
    for _ in range(2):
        with pytest.raises(EngineError, match=r"'right' cannot be checked.*known_faults=off"):
            PjrtEngine(MESH).Build(right, SPECS)
    assert os.listdir(cache) == []
    PjrtEngine(MESH, known_faults="off").Build(right, SPECS)


def test_a_module_that_cannot_be_read_is_an_error_with_the_remedy(monkeypatch):
    program = lower(right, SPECS, MESH)
    for text in (
        "ENTRY {",
        "HloModule m, num_partitions=8\n\nENTRY %e () -> f32[] {\n  %a = f32[x\n}\n",
    ):
        message = r"'right' cannot be checked.*read.*--known_faults=off"
        with pytest.raises(EngineError, match=message):
            checking.find_faults(text, program)
    # Nothing is compiled again to find a cause.
    monkeypatch.setattr(checking, "read_before", lambda _: "ENTRY {")
    monkeypatch.setattr(xla, "_unnameable", lambda *_: pytest.fail("compiles again"))
    with pytest.raises(EngineError, match=r"'right' cannot be checked"):
        PjrtEngine(MESH).Compile(program)


def test_code_of_the_check_is_in_the_key_of_the_cache():
    """A program that older code of the check found right is checked again."""
    programs = Path(known_faults.__file__).parents[1]
    code = {os.path.relpath(path, programs) for path in checking._files()}
    waiting = ["aot/partition_dump.py", "partitioner/known_faults.py", "hlo/module.py"]
    read = set()
    while waiting:
        name = waiting.pop()
        read.add(name)
        for module in re.findall(
            r"lingvo_moe\.analysis\.programs\.((?:hlo|partitioner)\.\w+)",
            (programs / name).read_text(),
        ):
            file = module.replace(".", "/") + ".py"
            if file not in read:
                waiting.append(file)
    assert "partitioner/spmd.py" in read and "hlo/sharding.py" in read
    assert read <= code


@pytest.mark.parametrize("name", ["module.py", "spmd.py", "partition_dump.py"])
def test_another_version_of_the_code_has_another_key(name, monkeypatch):
    before, read = checking._version(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b"#" * (p.name == name))
    assert checking._version.__wrapped__() != before


def test_unknown_actions_are_refused():
    for make in (lambda a: PjrtEngine(MESH, known_faults=a), _shard_function):
        with pytest.raises(ShardingError, match=r"known_faults=eror: must be one of.*did you mean"):
            make("eror")


def _shard_function(action):
    return xs.shard_function(right, mesh=MESH, known_faults=action)
