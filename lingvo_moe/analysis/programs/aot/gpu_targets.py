"""Describes GPUs to XLA's GPU compiler, which then needs none: XLA's GpuTargetConfigProto as text.

Sources of the figures:

* Limits of threads, registers and shared memory by compute capability: NVIDIA, CUDA C++ Programming Guide, "Technical
  Specifications per Compute Capability". The shared memory of a block is the multiprocessor's less 1 KiB, which CUDA
  keeps.
* Multiprocessors and L2 caches: NVIDIA's architecture white papers of Ampere, Hopper and Ada; the B200's from XLA's
  b200.txtpb.
* Clocks (the highest) and the bandwidth of memory: what the driver reports, as in XLA's repository
  (xla/backends/gpu/target_config/specs). The L40S and the L4 are not there: these are from their data sheets.
* Memory: `core/gpu_memory.py`.

Without a device there is no autotuning, so matrix products get default tile sizes. This changes how fast kernels are,
not what they compute, store or send.
"""

from dataclasses import dataclass

from lingvo_moe.core.gpu_memory import MEMORY_BYTES

_KIB = 2**10
_MIB = 2**20


@dataclass(frozen=True)
class GpuTarget:
    """A GPU as the compiler sees it."""

    label: str  # the name that CUDA gives the device
    memory_bandwidth: int  # bytes/s
    capability: tuple[int, int]  # CUDA's compute capability, (major, minor)
    multiprocessors: int  # their number
    lanes: int  # float32 units of a multiprocessor
    threads: int  # threads that a multiprocessor holds
    shared_memory: int  # bytes of shared memory of a multiprocessor
    l2_cache: int  # bytes
    clock_ghz: float  # the highest clock rate
    memory_bytes: int  # memory that the driver leaves to programs

    def Text(self) -> str:
        """The description as text of XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {self.threads}
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_block_optin: {self.shared_memory - _KIB}
  shared_memory_per_core: {self.shared_memory}
  core_count: {self.multiprocessors}
  fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bandwidth}
  l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{self.label}"
"""


# By a card's architecture: GpuTarget's fields from `capability` to `clock_ghz`.
_AMPERE = (8, 0), 108, 64, 2048, 164 * _KIB, 40 * _MIB, 1.41
_HOPPER = (9, 0), 132, 128, 2048, 228 * _KIB, 50 * _MIB, 1.98
_BLACKWELL = (10, 0), 148, 128, 2048, 228 * _KIB, 132_644_864, 1.965
_ADA = (8, 9), 142, 128, 1536, 100 * _KIB, 96 * _MIB, 2.52
_SMALL_ADA = (8, 9), 58, 128, 1536, 100 * _KIB, 48 * _MIB, 2.04

TARGETS = {
    card: GpuTarget(label, bandwidth, *architecture, MEMORY_BYTES[card])
    for card, label, bandwidth, architecture in (
        ("a100-40", "NVIDIA A100-SXM4-40GB", 1_555_200_000_000, _AMPERE),
        ("a100", "NVIDIA A100-SXM4-80GB", 2_039_040_000_000, _AMPERE),
        ("h100", "NVIDIA H100 80GB HBM3", 3_352_320_000_000, _HOPPER),
        ("h200", "NVIDIA H200", 4_800_000_000_000, _HOPPER),
        ("h800", "NVIDIA H800", 3_352_320_000_000, _HOPPER),
        ("b200", "NVIDIA B200", 7_672_320_000_000, _BLACKWELL),
        ("gb200", "NVIDIA GB200", 8_000_000_000_000, _BLACKWELL),
        ("l40s", "NVIDIA L40S", 864_000_000_000, _ADA),
        ("l4", "NVIDIA L4", 300_000_000_000, _SMALL_ADA),
    )
}
