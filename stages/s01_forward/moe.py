"""Read later: mixture of experts (Qwen3-MoE). Each token passes through a few of many small MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.s01_forward.families import MoeConfig
from stages.s01_forward.layers import Linear, parameter
from stages.s01_forward.ops import Ops

if TYPE_CHECKING:
    from stages.s01_forward.config import ModelConfig


def route(router_logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> (weights [T, top_k] in fp32, experts [T, top_k]).

    Softmax over *all* experts, then the best are picked; their weights sum to 1 only if `normalise`.
    """
    weights, experts = router_logits.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


class Experts(nn.Module):
    """All experts' weights in two tensors, so that one grouped matrix product serves them all."""

    def __init__(self, moe: MoeConfig, hidden_size: int) -> None:
        super().__init__()
        self.gate_up_proj = parameter(moe.num_experts, 2 * moe.intermediate_size, hidden_size)
        self.down_proj = parameter(moe.num_experts, hidden_size, moe.intermediate_size)


class SparseMLP(nn.Module):
    """The router and its experts."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe, self.ops = config.moe, ops
        self.gate = Linear(config.hidden_size, config.moe.num_experts)
        self.experts = Experts(config.moe, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        weights, experts = route(self.gate(x), self.moe.top_k, self.moe.norm_topk_prob)
        # Sort the P = T * top_k pairs (token, expert) by expert: each expert's tokens lie together.
        order = experts.flatten().argsort(stable=True)  # [P]
        rows = x[order // self.moe.top_k]  # [P, H]
        # Where each expert's rows end, counted by comparing: `bincount` would make a GPU wait for the host.
        counts = (experts.flatten()[:, None] == torch.arange(self.moe.num_experts, device=x.device)).sum(0)
        ends = counts.cumsum(0, dtype=torch.int32)  # [E]
        gate_up = F.grouped_mm(rows, self.experts.gate_up_proj.transpose(1, 2), offs=ends)  # [P, 2I]
        down = F.grouped_mm(self.ops.silu_mul(gate_up), self.experts.down_proj.transpose(1, 2), offs=ends)  # [P, H]
        # Back into the order of tokens; each token's experts are summed in a fixed order, the same at every run.
        by_token = torch.empty_like(down).index_copy_(0, order, down).view(*experts.shape, -1)  # [T, top_k, H]
        return (by_token * weights.to(x.dtype)[:, :, None]).sum(dim=1)
