"""Hugging Face's NLLB-MoE, with its experts mended."""

import torch


def mend():
    """Has every expert get the tokens that have a gate for it.

    As shipped (transformers 5.23) the router hands out the one-hot mask of first choices where the experts
    expect numbers, so that two experts see everything. Here it is first and second choices, and nothing else
    is changed.
    """
    from transformers.models.nllb_moe import modeling_nllb_moe

    def experts(self, hidden_states, router_mask, router_probs):
        out = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            rows = router_probs[:, number].nonzero().squeeze(-1)
            if rows.numel():
                y = self[f"expert_{number}"](hidden_states[rows]) * router_probs[rows, number, None]
                out.index_add_(0, rows, y)
        return out

    modeling_nllb_moe.NllbMoeExperts.forward = experts
