"""Settings for GPUs in a given environment, options of PJRT, and a GPU itself where there is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import sharding
from lingvo_moe.core.engine import devices, gpu_settings, pjrt
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.gpu_memory import XLA_SHARE
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.sharding import Mesh

HIDING = "xla_gpu_enable_latency_hiding_scheduler"


def test_this_version_of_xla_knows_the_options():
    """XLA refuses an option that it does not know, on whatever device."""
    options = gpu_settings.compiler_options({})
    assert options == {HIDING: True}
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    assert lowered.compile(compiler_options=options)(jnp.zeros(3))[0] == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={f"{HIDING}_": True})


@pytest.mark.parametrize(
    "flags", [f"--{HIDING}=false", f"--xla_dump_to=/x --{HIDING}=true", f"--{HIDING}"]
)
def test_what_the_user_sets_in_xla_flags_wins(flags):
    assert gpu_settings.compiler_options({"XLA_FLAGS": flags}) == {}
    others = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    assert gpu_settings.compiler_options(others) == {HIDING: True}


def test_programs_on_gpus_get_these_options_and_others_do_not():
    assert pjrt._default_options("gpu") == gpu_settings.compiler_options()
    assert pjrt._default_options("tpu") == {}
    assert HIDING not in pjrt._default_options("cpu")


def test_programs_get_the_memory_that_plans_count_with():
    assert gpu_settings.environment({}) == {"XLA_CLIENT_MEM_FRACTION": str(XLA_SHARE)}


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_user_s_share_of_memory_wins(name):
    """JAX refuses both names together, so neither may be added to the other."""
    assert gpu_settings.environment({name: "0.5"}) == {}


def test_the_trainer_sets_them_before_jax_looks_for_devices(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")
    found = []
    monkeypatch.setattr(
        "lingvo_moe.core.engine.devices.device_count",
        lambda: found.append(gpu_settings.environment()),
    )
    devices.find_devices()
    assert found == [{}]


def test_a_machine_whose_gpus_jax_does_not_find_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert gpu_settings.unused_gpus(tmp_path) == ""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert "has 2 NVIDIA GPUs, but JAX found none" in gpu_settings.unused_gpus(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpu_settings.unused_gpus(tmp_path) == ""


_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
_SPECS = [TensorSpec((32, 64), "float32"), TensorSpec((64, 128), "float32")]


@pytest.fixture(scope="module")
def product():
    engine = PjrtEngine(Mesh.parse("expert:1"))
    return engine, lower(tf.matmul, _SPECS, engine.mesh)


def test_products_are_not_ynnpacks(product):
    engine, program = product
    compiled = engine.Compile(program)
    assert "ynn_fusion" not in compiled.HloText()
    x, w = (np.full(spec.shape, 0.5, np.float32) for spec in _SPECS)
    np.testing.assert_array_equal(engine.Get(compiled(x, w)), np.full((32, 128), 16, np.float32))


def test_an_option_that_is_given_goes_before(product):
    engine, program = product
    theirs = {_YNNPACK: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    assert "ynn_fusion" in engine.Compile(program, theirs).HloText()


def _devices():
    try:
        found = jax.devices("gpu")
    except RuntimeError:
        pytest.skip("needs an NVIDIA GPU: make install GPU=1, then make test GPU=1")
    # As many as divide four experts.
    return found[: max(n for n in (1, 2, 4) if n <= len(found))]


def test_an_moe_layer_computes_the_same_as_on_a_cpu():
    devices = _devices()
    mesh = Mesh(("expert",), (len(devices),))
    params = MoELayer.Params().Set(name="moe", model_dim=16, hidden_dim=32, num_experts=4)
    splits = {"activation_split": {"E": "expert", "G": "expert"}, "weight_split": {"E": "expert"}}
    moe = params.Set(**splits).Instantiate()

    def step(theta, x):
        y, extras = moe.FProp(theta, x, tf.zeros(x.shape[:2]), seed=tf.constant([1, 2]))
        return sharding.replicate(y), extras.aux_loss

    specs = [moe.VariableSpecs(), TensorSpec((4, 8, 16), "float32", ("expert", None, None))]
    program = lower(step, specs, mesh, name="moe")
    draw = np.random.default_rng(0).standard_normal
    values = [
        specs[0].Transform(lambda s: draw(s.shape, np.float32)),
        draw(specs[1].shape, np.float32),
    ]
    engines = [PjrtEngine(mesh, used) for used in (jax.devices("cpu")[: mesh.size], devices)]
    expected, found = (engine.Get(engine.Compile(program)(*values)) for engine in engines)
    for a, b in zip(expected, found, strict=True):
        # TF32 has ten bits of mantissa, and a few tokens may choose another expert.
        assert np.mean(np.abs(a - b) > 0.02 * np.abs(a).max()) < 0.05
