"""Algorithm 1 and the MoE layer in plain NumPy loops, one token at a time: the reference of the tests.

Letters: G group, S token in group, k choice rank, E expert, M model, H hidden.
"""

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def top_2(gates: np.ndarray) -> tuple[int, int]:
    """The lower index wins a tie."""
    order = sorted(range(len(gates)), key=lambda e: (-gates[e], e))
    return order[0], order[1]


def route(
    gates_GSE: np.ndarray,
    real_GS: np.ndarray,
    capacity: int | None,
    rnd_GS: np.ndarray | None,
    reading: str = "paper",
    threshold: float = 0.5,
) -> dict[str, np.ndarray]:
    """Sequential top-2 gating. With `rnd_GS` None every second choice is sent."""
    G, S, E = gates_GSE.shape
    limit = S + 1 if capacity is None else capacity
    index = np.zeros((G, S, 2), np.int32)
    gate = np.zeros((G, S, 2), np.float32)
    position = np.full((G, S, 2), -1, np.int32)
    wanted = np.zeros((G, S, 2), np.float32)
    aux = []
    for g in range(G):
        taken = np.zeros(E, int)
        for s in range(S):
            index[g, s] = top_2(gates_GSE[g, s])
            if not real_GS[g, s]:
                continue
            e1, e2 = index[g, s]
            g1, g2 = gates_GSE[g, s, e1], gates_GSE[g, s, e2]
            wanted[g, s, 0] = 1
            if taken[e1] < limit:
                gate[g, s, 0], position[g, s, 0] = g1 / (g1 + g2), taken[e1]
            taken[e1] += 1
        tokens = real_GS[g].sum()
        if tokens:
            mean_gates = (gates_GSE[g] * real_GS[g][:, None]).sum(0) / tokens
            aux.append((taken / tokens * mean_gates).sum() / E)
        for s in range(S):
            if not real_GS[g, s]:
                continue
            e1, e2 = index[g, s]
            g1, g2 = gates_GSE[g, s, e1], gates_GSE[g, s, e2]
            g2 = g2 / (g1 + g2)
            sampled = rnd_GS is None or g2 / threshold > rnd_GS[g, s]
            wanted[g, s, 1] = sampled
            if taken[e2] < limit and sampled:
                gate[g, s, 1], position[g, s, 1] = g2, taken[e2]
            if reading == "paper" or sampled:
                taken[e2] += 1
    scale = 1 if reading == "paper" else E * E
    aux_loss = np.mean(aux) * scale if aux else 0.0
    return {
        "index": index,
        "gate": gate,
        "position": position,
        "kept": (position >= 0).astype(np.float32),
        "wanted": wanted,
        "aux_loss": np.float32(aux_loss),
    }


def moe(x_GSM: np.ndarray, routed: dict, wi: np.ndarray, wo: np.ndarray) -> np.ndarray:
    """Computes each token's experts, one after another."""
    y = np.zeros_like(x_GSM)
    for g, s, k in np.ndindex(*routed["gate"].shape):
        if routed["kept"][g, s, k]:
            e = routed["index"][g, s, k]
            hidden = np.maximum(x_GSM[g, s] @ wi[e], 0)
            y[g, s] += routed["gate"][g, s, k] * (hidden @ wo[e])
    return y
