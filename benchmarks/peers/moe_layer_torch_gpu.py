"""PyTorch's contenders of benchmarks/gpu/layer.py, in an interpreter that has PyTorch for the GPU.

    PEERS/bin/python benchmarks/peers/moe_layer_torch_gpu.py torch_grouped '{"num_experts": 8, ...}'

Prints one line of JSON, the seconds of a step in each round. In bfloat16 weights and activations both are bfloat16.
Not run on a GPU.
"""

import json
import sys
import time

import torch
from moe_layer_torch import OWN
from stepping import arrays

_WARM_UP = 3


def layer(kind, size, device, dtype):
    """One step of a layer: output, and gradients of inputs, router and experts."""
    module = OWN[kind](size).to(device, dtype)
    x, dy, *_ = (torch.from_numpy(a).to(device, dtype) for a in arrays({**size, "num_experts": 1}))
    x.requires_grad_()

    def step():
        x.grad = None
        module.zero_grad(set_to_none=True)
        y, loss = module(x)
        torch.autograd.backward([y, loss], [dy, torch.ones_like(loss)])

    return step


def product(size, device, dtype):
    """One large product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: torch.mm(a, b)


def main():
    kind, job = sys.argv[1], json.loads(sys.argv[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    dtype = getattr(torch, job["format"])
    if kind == "torch_matmul":
        step = product(job["ceiling"], device, dtype)
    else:
        step = layer(kind, job, device, dtype)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(_WARM_UP):
        step()
    wait()
    seconds = []
    for _ in range(job["rounds"]):
        began = time.perf_counter()
        for _ in range(job["steps"]):
            step()
        wait()
        seconds.append((time.perf_counter() - began) / job["steps"])
    print(json.dumps({"seconds": seconds, "device": device, "version": torch.__version__}))


if __name__ == "__main__":
    main()
