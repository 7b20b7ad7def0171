"""Settings for GPUs: what they would be in a given environment. No GPU is needed, and none was at hand."""

import jax
import jax.numpy as jnp
import pytest

from lingvo_moe.core.engine import devices, gpu_settings, pjrt
from lingvo_moe.core.gpu_memory import XLA_SHARE

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
