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
    capability: tuple[int, int]  # CUDA's compute capability, (major, minor)
    multiprocessors: int  # their number
    lanes: int  # float32 units of a multiprocessor
    threads: int  # threads that a multiprocessor holds
    shared_memory: int  # bytes of shared memory of a multiprocessor
    l2_cache: int  # bytes
    clock_ghz: float  # the highest clock rate
    memory_bytes: int  # memory that the driver leaves to programs
    memory_bandwidth: int  # bytes/s

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


def _ampere(label: str, memory_bytes: int, memory_bandwidth: int) -> GpuTarget:
    return GpuTarget(
        label,
        capability=(8, 0),
        multiprocessors=108,
        lanes=64,
        threads=2048,
        shared_memory=164 * _KIB,
        l2_cache=40 * _MIB,
        clock_ghz=1.41,
        memory_bytes=memory_bytes,
        memory_bandwidth=memory_bandwidth,
    )


def _hopper(label: str, memory_bytes: int, memory_bandwidth: int) -> GpuTarget:
    return GpuTarget(
        label,
        capability=(9, 0),
        multiprocessors=132,
        lanes=128,
        threads=2048,
        shared_memory=228 * _KIB,
        l2_cache=50 * _MIB,
        clock_ghz=1.98,
        memory_bytes=memory_bytes,
        memory_bandwidth=memory_bandwidth,
    )


TARGETS = {
    "a100-40": _ampere("NVIDIA A100-SXM4-40GB", MEMORY_BYTES["a100-40"], 1_555_200_000_000),
    "a100": _ampere("NVIDIA A100-SXM4-80GB", MEMORY_BYTES["a100"], 2_039_040_000_000),
    "h100": _hopper("NVIDIA H100 80GB HBM3", MEMORY_BYTES["h100"], 3_352_320_000_000),
    "h200": _hopper("NVIDIA H200", MEMORY_BYTES["h200"], 4_800_000_000_000),
    "b200": GpuTarget(
        "NVIDIA B200",
        capability=(10, 0),
        multiprocessors=148,
        lanes=128,
        threads=2048,
        shared_memory=228 * _KIB,
        l2_cache=132_644_864,
        clock_ghz=1.965,
        memory_bytes=MEMORY_BYTES["b200"],
        memory_bandwidth=7_672_320_000_000,
    ),
    "l40s": GpuTarget(
        "NVIDIA L40S",
        capability=(8, 9),
        multiprocessors=142,
        lanes=128,
        threads=1536,
        shared_memory=100 * _KIB,
        l2_cache=96 * _MIB,
        clock_ghz=2.52,
        memory_bytes=MEMORY_BYTES["l40s"],
        memory_bandwidth=864_000_000_000,
    ),
    "l4": GpuTarget(
        "NVIDIA L4",
        capability=(8, 9),
        multiprocessors=58,
        lanes=128,
        threads=1536,
        shared_memory=100 * _KIB,
        l2_cache=48 * _MIB,
        clock_ghz=2.04,
        memory_bytes=MEMORY_BYTES["l4"],
        memory_bandwidth=300_000_000_000,
    ),
}
