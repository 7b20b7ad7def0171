"""The share of a GPU's memory that XLA's allocator gets: the same number for running a program and for planning one."""

# JAX's default is 0.75. What is left (8 GiB of 80) is for the CUDA context, kernels, NCCL's buffers and libraries'
# workspaces, which are allocated outside of XLA's pool.
XLA_SHARE = 0.9


def usable_bytes(memory_bytes: int) -> int:
    """Bytes that XLA's allocator has for programs on a GPU with `memory_bytes` of memory after the driver's own."""
    return int(memory_bytes * XLA_SHARE)
