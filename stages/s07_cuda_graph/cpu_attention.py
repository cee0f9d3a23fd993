"""Attention of decode rows on a CPU: keys and values gathered into memory that all layers share, and two products.

It is stage 03's, whose plan it extends. For one query to a head PyTorch's fused attention is slower than its parts,
and memory that is taken anew for every layer is memory that no cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stages.s03_paged_kv import paged_attention as in_torch
from stages.s03_paged_kv.attention_plan import AttentionShape


@dataclass(frozen=True)
class Rows:
    """How `Singles` are attended: B = R1 * Hkv heads with S keys each.

    keys [B * S] int64: where they lie, of a cache seen as vectors. bias fp32 [B, 1, S]: -inf for those that do not
    exist. room fp32 [B * S, D]: for the keys, and then for the values.
    """

    tokens: Tensor
    keys: Tensor
    bias: Tensor
    room: Tensor


@dataclass(frozen=True)
class CpuPlan(in_torch.GatherPlan):
    """Stage 03's plan, and how its rows with one query are attended; nothing of that in another dtype than fp32."""

    rows: tuple[Rows, ...]


def make_plan(
    q_lens: Sequence[int], seq_lens: Sequence[int], block_table: Tensor, shape: AttentionShape
) -> in_torch.GatherPlan:
    """Plans one step, as stage 03's does."""
    plan = in_torch.make_plan(q_lens, seq_lens, block_table, shape)
    if shape.element_size != torch.float32.itemsize:
        return plan
    return CpuPlan(plan.singles, plan.chunks, tuple(map(plan_rows, plan.singles, [shape.head_dim] * len(plan.singles))))


def plan_rows(singles: in_torch.Singles, head_dim: int) -> Rows:
    R1, Hkv, S = singles.keys.shape
    bias = torch.zeros(R1, 1, S)
    if singles.mask is not None:
        bias.masked_fill_(~singles.mask[:, 0], float("-inf"))
    keys = singles.keys.flatten()
    return Rows(singles.tokens, keys, bias.repeat_interleave(Hkv, 0), torch.empty(len(keys), head_dim))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    plan: in_torch.GatherPlan,
    scale: float,
) -> Tensor:
    """Stage 03's `paged_attention`: q [T, Hq, D], k_cache and v_cache [NB, BS, Hkv, D] -> [T, Hq, D]."""
    if not isinstance(plan, CpuPlan) or not k_cache.is_contiguous():
        return in_torch.paged_attention(q, k_cache, v_cache, block_table, seq_lens, cu_q, plan, scale)
    if len(plan.rows) == 1 and len(plan.rows[0].tokens) == len(q):  # nothing to pick out and to put back
        return attend(q, k_cache, v_cache, plan.rows[0], scale)
    chunks = replace(plan, singles=())
    out = in_torch.paged_attention(q, k_cache, v_cache, block_table, seq_lens, cu_q, chunks, scale)
    for rows in plan.rows:
        out.index_copy_(0, rows.tokens, attend(q.index_select(0, rows.tokens), k_cache, v_cache, rows, scale))
    return out


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float) -> Tensor:
    """Rows with one query: q [R1, Hq, D] -> [R1, Hq, D]."""
    B, _, S = rows.bias.shape
    k_cache, v_cache = k_cache.view(-1, k_cache.shape[-1]), v_cache.view(-1, v_cache.shape[-1])  # [NB * BS * Hkv, D]
    # The heads of a group become query rows of their KV head: each key is read once, and nothing is repeated.
    queries = q.reshape(B, -1, q.shape[-1])  # [B, group, D]
    keys = torch.index_select(k_cache, 0, rows.keys, out=rows.room).view(B, S, -1)
    weights = torch.baddbmm(rows.bias, queries, keys.transpose(1, 2), alpha=scale).softmax(-1)  # [B, group, S]
    values = torch.index_select(v_cache, 0, rows.keys, out=rows.room).view(B, S, -1)
    return torch.bmm(weights, values).view(q.shape)
