"""Plans in made-up figures, for tests of what reports show."""

import copy

_GIB = 2**30


def work(part, phase, compute, memory, compiler):
    """A row of `work`, of these seconds."""
    roofline = max(compute, memory)
    return {
        "part": part,
        "phase": phase,
        "flops": int(compute * 52.5e12),
        "bytes": int(memory * 450e9),
        "compute_seconds": compute,
        "memory_seconds": memory,
        "roofline_seconds": roofline,
        "compiler_seconds": compiler,
        "seconds": max(roofline, compiler),
    }


def collective(kind, layer, part, phase, count, size, seconds):
    """A row of `collectives`; `size` is in bytes."""
    return {
        "kind": kind,
        "layer": layer,
        "part": part,
        "phase": phase,
        "count": count,
        "bytes": size,
        "participants": 2048,
        "seconds": seconds,
    }


def make_plan() -> dict:
    """A plan with the shape and magnitudes of a 600B training step."""
    kinds = {
        "weights": 5_600_000_000,
        "slots": 540_000_000,
        "inputs": 7_168,
        "activations": 3_100_000_000,
        "temporaries": 4_000_000_000,
        "padding": 580_000_000,
        "code": 122_250_240,
    }
    needed = sum(kinds.values())
    return {
        "version": 1,
        "model": "mt.M4MoE2048E36L",
        "override": "",
        "what": "train",
        "program_hash": "0123456789abcdef" * 4,
        "mesh": "expert:2048",
        "topology": {
            "name": "v3:32x32",
            "generation": "v3",
            "devices": 2048,
            "chips": 1024,
            "torus": [32, 32],
            "hbm_bytes": 16 * _GIB,
            "peak_flops": 61.5e12,
            "hbm_bandwidth": 450e9,
            "link_bandwidth": 70e9,
            "model": "A torus of 32x32 chips; <each> link carries 70 GB/s each way.",
        },
        "batch": {"source_tokens": 4_194_304, "target_tokens": 4_194_304},
        "parameters": {
            "count": 619_301_234_567,
            "bytes_total": 2_477_204_938_268,
            "bytes": 5_600_000_000,
            "slot_bytes": 540_000_000,
        },
        "memory": {
            "arguments": 6_143_227_904,
            "outputs": 6_143_723_520,
            "aliased": 6_143_170_560,
            "temporaries": 7_682_734_080,
            "code": 122_250_240,
            "peak": 12_900_000_000,
            "needed": needed,
            "hbm": 16 * _GIB,
            "fits": True,
            "misses_by": 0,
            "kinds": kinds,
            "holders": [
                {
                    "kind": "gradients",
                    "layer": f"encoder.{i}",
                    "part": "experts",
                    "phase": "backward",
                    "bytes": 10**9 >> i,
                }
                for i in range(20)
            ],
            "advice": ["Activations in bfloat16 would take 1.44 GiB less."],
        },
        "work": [
            work("experts", "forward", 0.08, 0.03, 0.09),
            work("experts", "backward", 0.16, 0.06, 0.15),
            work("attention", "forward", 0.05, 0.07, 0.06),
            work("attention", "recompute", 0.05, 0.07, 0.06),
            work("optimizer", "optimizer", 0.0, 0.04, 0.05),
        ],
        "collectives": [
            collective(
                "all-to-all", "encoder.moe", "dispatch_combine", "forward", 18, 16 << 20, 0.1
            ),
            collective("all-reduce", "encoder", "attention", "backward", 36, 8 << 20, 0.02),
        ],
        "time": {
            "step_seconds": 0.57,
            "roofline_seconds": 0.42,
            "work_seconds": 0.45,
            "collective_seconds": 0.12,
            "steps_per_second": 1 / 0.57,
            "tokens_per_second": 4_194_304 / 0.57,
            "utilization": 0.31,
            "budget_tokens": 1e12,
            "days": 1.573,
            "device_years": 8.82,
            "chip_days": 1610.0,
        },
        "compile": {
            "lower_seconds": 21.0,
            "compile_seconds": 48.0,
            "host_peak_bytes": 4 * _GIB,
            "program_bytes": 122_250_240,
        },
        "compiler": {"libtpu": "0.0.1", "jax": "0.10.2"},
    }


def make_plan_of_a_cluster() -> dict:
    """A plan of the step on GPUs, with collectives inside nodes and between them."""
    plan = copy.deepcopy(make_plan())
    plan["topology"] |= {"name": "h100:32x8", "model": "h100:32x8 has 32 nodes of 8 GPUs."}
    for row, nodes in zip(plan["collectives"], (32, 1), strict=True):
        row |= {"nodes": nodes, "in_node": 8}
    moved = {"count": 54, "sent_inside": 3 << 20, "sent_between": 5 << 30, "seconds": 0.12}
    plan["mesh_axes"] = {
        "by_axis": [{"axes": "expert"} | moved, {"axes": ""} | moved],
        "orders": [{"mesh": "expert:32,data:8"} | moved, {"mesh": "data:8,expert:32"} | moved],
        "advice": "--mesh=data:8,expert:32 is faster.",
    }
    return plan


def make_plan_that_misses() -> dict:
    """A plan for a program that the compiler refused."""
    plan = copy.deepcopy(make_plan())
    plan["model"] = "mt.M4MoE2048E60L"
    plan["override"] = "task.<x>: 1"
    plan["memory"] = {
        "peak": 20 * _GIB,
        "hbm": 16 * _GIB,
        "fits": False,
        "misses_by": 4 * _GIB,
        "kinds": {},
        "holders": [],
        "advice": [],
    }
    plan |= {"work": [], "collectives": [], "time": None}
    return plan
