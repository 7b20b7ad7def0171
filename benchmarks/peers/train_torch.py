"""PyTorch's contenders of benchmarks/train_step.py: an encoder-decoder with and without experts, and
Hugging Face's NLLB-MoE.

    PEERS/bin/python benchmarks/peers/train_torch.py torch_moe '{"dropout": 0.0, ...}'

Runs in the peers' own interpreter and imports nothing of this package.

Letters: T tokens, E expert, C capacity slot, M model, H hidden.
"""

import json
import math
import sys

import torch
from nllb_moe import mend
from stepping import keep_memory, serve
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Packed projections without biases around PyTorch's fused attention."""

    def __init__(self, size, cross=False):
        super().__init__()
        dim = size["model_dim"]
        self.heads, self.cross = size["num_heads"], cross
        self.q = nn.Linear(dim, dim, bias=False) if cross else None
        self.kv = nn.Linear(dim, (2 if cross else 3) * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x, memory=None, causal=False):
        if self.cross:
            parts = [self.q(x), *self.kv(memory).chunk(2, -1)]
        else:
            parts = self.kv(x).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o(y.transpose(1, 2).flatten(2))


class Dense(nn.Module):
    """relu(x wi) wo."""

    def __init__(self, size):
        super().__init__()
        self.wi = nn.Linear(size["model_dim"], size["hidden_dim"], bias=False)
        self.wo = nn.Linear(size["hidden_dim"], size["model_dim"], bias=False)
        self.dropout = size["dropout"]

    def forward(self, x):
        return self.wo(F.dropout(F.relu(self.wi(x)), self.dropout)), x.new_zeros(())


class Experts(nn.Module):
    """Top-2 experts as batched products over [E,C,M]; tokens move by index, overflow is dropped."""

    def __init__(self, size):
        super().__init__()
        m, h, e = size["model_dim"], size["hidden_dim"], size["num_experts"]
        self.num, self.dropout = e, size["dropout"]
        self.wg = nn.Linear(m, e, bias=False)
        self.wi = nn.Parameter(torch.randn(e, m, h) * m**-0.5)
        self.wo = nn.Parameter(torch.randn(e, h, m) * h**-0.5)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        count, num = tokens.shape[0], self.num
        capacity = 2 * math.ceil(count / num)
        probs = self.wg(tokens).softmax(-1)
        gate, index = probs.topk(2, -1)
        gate = gate / gate.sum(-1, keepdim=True)
        # First choices get slots before second ones, each in the order of the tokens.
        flat = index.t().flatten()
        chosen = F.one_hot(flat, num)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        kept = place < capacity
        slot = torch.where(kept, flat * capacity + place, num * capacity)
        slots = tokens.new_zeros(num * capacity + 1, tokens.shape[1])
        slots = slots.index_copy(0, slot, tokens.repeat(2, 1))[:-1].unflatten(0, (num, capacity))
        hidden = F.dropout(F.relu(torch.bmm(slots, self.wi)), self.dropout)
        out = torch.bmm(hidden, self.wo).flatten(0, 1)
        weight = (gate.t().flatten() * kept)[:, None]
        rows = out.index_select(0, slot.clamp(max=num * capacity - 1)) * weight
        share = F.one_hot(index[:, 0], num).float().mean(0)
        return rows.unflatten(0, (2, count)).sum(0).view_as(x), num * (share * probs.mean(0)).sum()


class Layer(nn.Module):
    """Pre-LN: attention, cross-attention in a decoder, feed-forward."""

    def __init__(self, size, decoder, experts):
        super().__init__()
        self.decoder, self.dropout = decoder, size["dropout"]
        self.atten, self.ffn = Attention(size), Experts(size) if experts else Dense(size)
        self.cross = Attention(size, cross=True) if decoder else None
        self.norms = nn.ModuleList(
            nn.LayerNorm(size["model_dim"]) for _ in range(3 if decoder else 2)
        )

    def forward(self, x, memory):
        x = x + F.dropout(self.atten(self.norms[0](x), causal=self.decoder), self.dropout)
        if self.decoder:
            x = x + F.dropout(self.cross(self.norms[2](x), memory), self.dropout)
        y, loss = self.ffn(self.norms[1](x))
        return x + F.dropout(y, self.dropout), loss


class Translator(nn.Module):
    """Two embeddings, the target's shared with the softmax; every second layer has experts."""

    def __init__(self, size, experts):
        super().__init__()
        self.size, dim = size, size["model_dim"]
        self.tables = nn.ModuleList(nn.Embedding(size["vocab_size"], dim) for _ in range(2))
        for table in self.tables:
            nn.init.normal_(table.weight, std=dim**-0.5)
        self.stacks = nn.ModuleList(
            nn.ModuleList(
                Layer(size, decoder, experts and i % 2 == 1) for i in range(size["num_layers"])
            )
            for decoder in (False, True)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.register_buffer("waves", _sinusoids(size["length"], dim))

    def forward(self, source, target, labels):
        memory, aux = None, 0.0
        for i, ids in enumerate((source, target)):
            x = self.tables[i](ids) * self.size["model_dim"] ** 0.5 + self.waves
            x = F.dropout(x, self.size["dropout"])
            for layer in self.stacks[i]:
                x, loss = layer(x, memory)
                aux = aux + loss
            x = self.norms[i](x)
            memory = x if memory is None else memory
        logits = F.linear(x, self.tables[1].weight)
        smoothing = self.size["label_smoothing"]
        xent = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
        return xent + 0.01 * aux


def _sinusoids(length, dim):
    step = math.log(10000) / (dim // 2 - 1)
    angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(dim // 2))
    return torch.cat([angles.sin(), angles.cos()], -1)


def nllb_moe(size):
    """Hugging Face's model of this size, its experts mended (nllb_moe.py), and how its loss is computed."""
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    mend()
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", size["num_layers"]),
            ("ffn_dim", size["hidden_dim"]),
            ("attention_heads", size["num_heads"]),
            ("layerdrop", 0.0),
            ("sparse_step", 2),
        )
    }
    config = NllbMoeConfig(
        vocab_size=size["vocab_size"],
        d_model=size["model_dim"],
        num_experts=size["num_experts"],
        # By default each expert takes 64 tokens, whatever the batch; the others take 2 T / E.
        expert_capacity=2 * math.ceil(size["batch"] * size["length"] / size["num_experts"]),
        dropout=size["dropout"],
        activation_dropout=size["dropout"],
        attention_dropout=0.0,
        moe_token_dropout=0.0,
        normalize_router_prob_before_dropping=True,
        use_cache=False,
        **sides,
    )
    model = NllbMoeForConditionalGeneration(config)
    model.train()

    def loss(source, target, labels):
        logits = model(input_ids=source, decoder_input_ids=target).logits.flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=size["label_smoothing"])

    return model, loss


def main():
    kind, size = sys.argv[1], json.loads(sys.argv[2])
    keep_memory()
    torch.set_num_threads(size["threads"])
    torch.manual_seed(1)
    if kind == "hf_nllb_moe":
        model, loss_of = nllb_moe(size)
    else:
        model = loss_of = Translator(size, experts=kind == "torch_moe")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    shape = (size["batch"], size["length"])
    batch = [torch.randint(4, size["vocab_size"], shape) for _ in range(3)]

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        return {"loss": loss.item()}

    serve(step, parameters=sum(p.numel() for p in model.parameters()), version=torch.__version__)


if __name__ == "__main__":
    main()
