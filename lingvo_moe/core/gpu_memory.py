"""The memory of GPUs, and the share of it that XLA's allocator gets: the same for running and for planning a program.

The memory of a card is what the driver leaves to programs, from the device descriptions in XLA's repository
(xla/backends/gpu/target_config/specs); that of the L40S and the L4, which XLA lacks, is from PyTorch's messages.
"""

_GIB = 2**30

# Bytes that the driver leaves to programs, by card.
MEMORY_BYTES = {
    "a100-40": 42_331_013_120,
    "a100": 85_100_068_864,
    "h100": 84_942_979_072,
    "h200": 151_397_597_184,
    "h800": 84_942_979_072,  # as the H100
    "b200": 191_514_411_008,
    "gb200": 191_514_411_008,  # as the B200
    "l40s": int(44.39 * _GIB),
    "l4": int(22.03 * _GIB),
}

# JAX's default is 0.75. What is left (8 GiB of 80) is for the CUDA context, kernels, NCCL's buffers and libraries'
# workspaces, which are allocated outside of XLA's pool.
XLA_SHARE = 0.9


def usable_bytes(memory_bytes: int) -> int:
    """Bytes that XLA's allocator has for programs on a GPU with `memory_bytes` of memory after the driver's own."""
    return int(memory_bytes * XLA_SHARE)
