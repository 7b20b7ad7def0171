"""The private parts of JAX do what core/private/jax.py says."""

import jax
import jax.numpy as jnp
import tensorflow as tf
from jax.interpreters import mlir
from processes import run_python

from lingvo_moe.core.private import jax as private
from lingvo_moe.core.private.tensorflow import hlo_pb2


def test_a_module_is_read_in_python():
    exported = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((2,), "float32"))
    with mlir.make_ir_context(), private.ir.Location.unknown():
        module = private.ir.Module.parse(exported.mlir_module())
        (main,) = (op for op in module.body.operations if isinstance(op, private.func.FuncOp))
        names = [op.operation.name for op in main.regions[0].blocks[0]]
    assert "stablehlo.sine" in names
    assert callable(private.stablehlo.pad) and callable(private.stablehlo.reshape)


def test_hlo_becomes_stablehlo():
    f = tf.function(lambda x: x + 1.0, jit_compile=True, autograph=False)
    hlo = f.experimental_get_compiler_ir(tf.TensorSpec([2], tf.float32))(
        stage="hlo_serialized", platform_name="CPU"
    )
    assert hlo_pb2.HloModuleProto.FromString(hlo).computations
    with mlir.make_ir_context():
        module = private.ir.Module.parse(private.hlo_to_stablehlo(hlo))
        assert "stablehlo.add" in str(module)


def test_a_process_alone_has_no_job():
    state = private.job_state()
    assert (state.client, state.process_id, state.num_processes) == (None, 0, 1)
    assert state.coordinator_address is None


_CACHE = """
import jax, jax.numpy as jnp
from lingvo_moe.core.private import jax as private

kept, hits, entries = [True], [], {}

class Cache:
    def __init__(self, directory):
        assert directory == "nowhere"
    def get(self, key):
        return entries.get(key)
    def put(self, key, value):
        entries[key] = value

private.use_cache(Cache)
private.watch_cache(lambda: kept[0], lambda: hits.append(1))
jax.config.update("jax_compilation_cache_dir", "nowhere")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
for fn, may_keep in ((jnp.sin, True), (jnp.cos, False)):
    kept[0] = may_keep
    for _ in range(2):
        jax.jit(lambda x: fn(x) + 1.0).lower(jax.ShapeDtypeStruct((2,), "float32")).compile()
print(len(entries), len(hits))
"""


def test_compiled_programs_go_through_our_cache():
    """A program that may be kept comes from the cache the second time, another one does not."""
    done = run_python("-c", _CACHE)
    assert done.stdout.split() == ["1", "1"], done.stderr


_LEAVE = """
import socket
import jax
from lingvo_moe.core.private import jax as private

jax.config.update("jax_enable_preemption_service", False)
for count in (2, 3):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jax.config.update("jax_num_cpu_devices", count)
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0, cluster_detection_method="deactivate")
    assert private.job_state().client is not None and jax.device_count() == count
    jax.jit(lambda x: x + 1)(1).block_until_ready()
    private.forget_devices()
    private.leave_job()
    assert private.job_state().client is None
"""


def test_a_process_leaves_a_job_and_joins_another_with_other_devices():
    run_python("-c", _LEAVE, env={"JAX_PLATFORMS": "cpu"}, check=True)
