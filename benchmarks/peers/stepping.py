"""The work of every contender's process beside its own step; free of any framework.

Copies of the weights and inputs are the same for all contenders: drawn from one seed, by NumPy.

Letters: N tokens, E expert, M model, H hidden.
"""

import ctypes
import json
import sys
import time

import numpy as np


def keep_memory():
    """Has the allocator keep what was freed, in large pieces: fresh pages are slow.

    With GLIBC_TUNABLES=glibc.malloc.hugetlb=1, which has to be there when the process starts, the pieces
    are huge pages too.
    """
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_top_pad, m_mmap_threshold, m_arena_max = -1, -2, -3, -8  # of malloc.h
    # One pool for all threads: those of the others hold 64 MB, and what is larger gets fresh pages each time.
    libc.mallopt(m_arena_max, 1)
    libc.mallopt(m_mmap_threshold, 1 << 30)
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_top_pad, 1 << 28)


def arrays(size):
    """x [N,M], dy [N,M], wg [M,E], wi [E,M,H], wo [E,H,M], float32."""
    tokens, m = size["groups"] * size["group_size"], size["model_dim"]
    e, h = size["num_experts"], size["hidden_dim"]
    draw = np.random.default_rng(0).standard_normal
    shapes = ((tokens, m), (tokens, m), (m, e), (e, m, h), (e, h, m))
    scales = (1.0, 1.0, m**-0.5, m**-0.5, h**-0.5)
    result = []
    for shape, scale in zip(shapes, scales):
        array = draw(shape, np.float32)
        array *= np.float32(scale)
        result.append(array)
    return result


def prompts(size):
    """Token ids [batch, prompt], int32, drawn at random; the first one begins a text."""
    ids = np.random.default_rng(1).integers(100, 49000, (size["batch"], size["prompt"]))
    ids[:, 0] = 1
    return ids.astype(np.int32)


def serve(step, **about):
    """Answers each line of standard input with one step's times.

    Args:
        step: takes one step and returns when it is done; where it returns a dict, that goes into the
            answer.
        about: printed when the contender is ready.
    """
    # What NumPy's arrays held before the framework copied them is no memory of the layer's.
    ctypes.CDLL(None).malloc_trim(0)
    for _ in range(2):
        step()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak of memory
    print("ready", json.dumps(about), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        more = step()
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        with open("/proc/self/status") as file:
            peak = next(line for line in file if line.startswith("VmHWM")).split()[1]
        answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": 1024 * int(peak)}
        answer.update(more or {})
        print(json.dumps(answer), flush=True)
