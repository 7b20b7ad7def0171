"""PyTorch's contenders of benchmarks/moe_layer.py, in the peers' own interpreter.

    PEERS/bin/python benchmarks/peers/moe_layer_torch.py torch_batched '{"num_experts": 8, ...}'

Each makes one step of a layer: output, and gradients of inputs, router and experts.

Letters: N tokens, E expert, C capacity slot, M model, H hidden.
"""

import json
import math
import os
import sys

import nllb_moe
import torch
from stepping import arrays, keep_memory, serve
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Top-2 router with its loss; subclasses hold the experts."""

    def __init__(self, size):
        super().__init__()
        _, _, wg, wi, wo = arrays(size)
        self.num = size["num_experts"]
        self.capacity = math.ceil(2 * size["groups"] * size["group_size"] / self.num)
        self.wg = nn.Parameter(torch.from_numpy(wg))
        self.wi = nn.Parameter(torch.from_numpy(wi))
        self.wo = nn.Parameter(torch.from_numpy(wo))

    def forward(self, x):
        probs = (x @ self.wg).softmax(-1)
        gate, index = probs.topk(2, -1)
        gate = gate / gate.sum(-1, keepdim=True)
        share = F.one_hot(index[:, 0], self.num).float().mean(0)
        return self.experts(x, gate, index), self.num * (share * probs.mean(0)).sum()


class Batched(Layer):
    """Two batched products over [E,C,M]; tokens move by index, overflow is dropped."""

    def experts(self, x, gate, index):
        count, num, capacity = x.shape[0], self.num, self.capacity
        flat = index.t().flatten()
        chosen = F.one_hot(flat, num)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        kept = place < capacity
        slot = torch.where(kept, flat * capacity + place, num * capacity)
        slots = x.new_zeros(num * capacity + 1, x.shape[1])
        slots = slots.index_copy(0, slot, x.repeat(2, 1))[:-1].unflatten(0, (num, capacity))
        out = torch.bmm(F.relu(torch.bmm(slots, self.wi)), self.wo).flatten(0, 1)
        weight = (gate.t().flatten() * kept)[:, None]
        rows = out.index_select(0, slot.clamp(max=num * capacity - 1)) * weight
        return rows.unflatten(0, (2, count)).sum(0)


class Looped(Layer):
    """A product for each expert's own rows, without capacity."""

    def experts(self, x, gate, index):
        y = torch.zeros_like(x)
        # One gradient for all of the weights, instead of E sparse ones to be added up.
        for number, (wi, wo) in enumerate(zip(self.wi.unbind(), self.wo.unbind())):
            rows, rank = torch.where(index == number)
            if rows.numel():
                out = F.relu(x[rows] @ wi) @ wo
                y = y.index_add(0, rows, out * gate[rows, rank, None])
        return y


class Grouped(Layer):
    """PyTorch's grouped product over rows sorted by expert, without capacity."""

    def experts(self, x, gate, index):
        flat = index.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=self.num).cumsum(0).int()
        h = F.relu(F.grouped_mm(x[order // 2], self.wi, offs=ends))
        out = F.grouped_mm(h, self.wo, offs=ends) * gate.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, out)


def hf_grouped_mm(size):
    """Hugging Face's grouped-matmul experts behind its Mixtral router; without the gate's third matrix,
    which would be half as many FLOPs again."""
    from types import SimpleNamespace

    from transformers.integrations.moe import use_experts_implementation
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    @use_experts_implementation(has_gate=False)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = config.num_local_experts
            _, _, _, wi, wo = arrays(size)
            self.up_proj = nn.Parameter(torch.from_numpy(wi).transpose(1, 2).contiguous())
            self.down_proj = nn.Parameter(torch.from_numpy(wo).transpose(1, 2).contiguous())
            self.act_fn = F.relu

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise NotImplementedError("the grouped form takes its place")

    config = SimpleNamespace(
        num_local_experts=size["num_experts"],
        num_experts_per_tok=2,
        hidden_size=size["model_dim"],
        _experts_implementation="grouped_mm",
    )
    router, experts = MixtralTopKRouter(config), Experts(config)
    router.weight = nn.Parameter(torch.from_numpy(arrays(size)[2].T.copy()))
    module = nn.ModuleList([router, experts])

    def forward(x):
        _, weights, index = router(x)
        return experts(x, index, weights)

    return module, forward


def hf_nllb(size):
    """Hugging Face's NLLB-MoE layer, its experts mended (nllb_moe.py)."""
    from transformers import NllbMoeConfig
    from transformers.models.nllb_moe import modeling_nllb_moe

    nllb_moe.mend()
    tokens = size["groups"] * size["group_size"]
    config = NllbMoeConfig(
        d_model=size["model_dim"],
        num_experts=size["num_experts"],
        # By default each expert takes 64 tokens, whatever the batch.
        expert_capacity=math.ceil(2 * tokens / size["num_experts"]),
        activation_dropout=0.0,
        moe_token_dropout=0.0,
        second_expert_policy="all",
        normalize_router_prob_before_dropping=True,
    )
    module = modeling_nllb_moe.NllbMoeSparseMLP(config, size["hidden_dim"])
    module.train()
    _, _, wg, wi, wo = arrays(size)
    with torch.no_grad():
        module.router.classifier.weight.copy_(torch.from_numpy(wg.T.copy()))
        for number in range(size["num_experts"]):
            expert = module.experts[f"expert_{number}"]
            expert.fc1.weight.copy_(torch.from_numpy(wi[number].T.copy()))
            expert.fc2.weight.copy_(torch.from_numpy(wo[number].T.copy()))
    return module, lambda x: module(x.view(size["groups"], size["group_size"], -1)).view(x.shape)


def tutel(size):
    """Tutel's layer: its own dispatch and batched experts, on the CPU."""
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 40000))
    from tutel import moe, system

    system.init_data_model_parallel(group_count=1, backend="gloo")
    module = moe.moe_layer(
        gate_type={"type": "top", "k": 2, "fp32_gate": True, "capacity_factor": 1.0},
        experts={
            "type": "ffn",
            "num_experts_per_device": size["num_experts"],
            "hidden_size_per_expert": size["hidden_dim"],
            "activation_fn": F.relu,
        },
        model_dim=size["model_dim"],
    )
    return module, module


def dense(size):
    """A feed-forward layer of twice the width."""
    m, h = size["model_dim"], 2 * size["hidden_dim"]
    module = nn.Sequential(nn.Linear(m, h, bias=False), nn.ReLU(), nn.Linear(h, m, bias=False))
    return module, module


def matmul(size):
    """One product of two rows a token, six times."""
    x, _, _, wi, _ = arrays({**size, "groups": 2 * size["groups"], "num_experts": 1})
    x, w = torch.from_numpy(x), torch.from_numpy(wi[0])

    def step():
        for _ in range(6):
            torch.mm(x, w)

    return step


OTHERS = {"hf_grouped_mm": hf_grouped_mm, "hf_nllb": hf_nllb, "tutel": tutel, "torch_dense": dense}
OWN = {"torch_batched": Batched, "torch_looped": Looped, "torch_grouped": Grouped}


def main():
    kind, size = sys.argv[1], json.loads(sys.argv[2])
    keep_memory()
    torch.set_num_threads(size["threads"])
    if kind == "torch_matmul":
        return serve(matmul(size), version=torch.__version__)
    if kind in OWN:
        module = forward = OWN[kind](size)
    else:
        module, forward = OTHERS[kind](size)
    x, dy, *_ = arrays({**size, "num_experts": 1})
    x, dy = torch.from_numpy(x).requires_grad_(), torch.from_numpy(dy)

    def step():
        x.grad = None
        module.zero_grad(set_to_none=True)
        y = forward(x)
        y, loss = y if isinstance(y, tuple) else (y, None)
        if loss is None:
            y.backward(dy)
        else:
            torch.autograd.backward([y, loss], [dy, torch.ones(())])

    return serve(step, version=torch.__version__)


if __name__ == "__main__":
    main()
