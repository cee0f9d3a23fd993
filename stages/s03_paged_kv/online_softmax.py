"""Attention block by block, without ever holding all scores: what the Triton kernel does, as a loop in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def online_softmax_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Sequence[int], seq_len: int, scale: float
) -> Tensor:
    """Causal attention of one sequence's newest T tokens, one visit to each of its blocks.

    q [T, Hq, D]; k_cache and v_cache [NB, BS, Hkv, D]; `seq_len` keys lie in the blocks of `block_table`, in order.
    Returns [T, Hq, D]. A softmax over keys that arrive in parts (Milakov & Gimelshein 2018; FlashAttention, Dao et al.
    2022) keeps three things per query: the largest score so far, the sum of the weights exp(score - largest), and the
    sum of the values times these weights. When a larger score comes, both sums shrink by exp(old - new largest).
    """
    T, Hq, D = q.shape
    block_size, Hkv = k_cache.shape[1:3]
    position = torch.arange(seq_len - T, seq_len, device=q.device)[:, None]  # [T, 1]
    largest = torch.full((Hq, T, 1), float("-inf"), device=q.device)
    weight_sum = torch.zeros(Hq, T, 1, device=q.device)
    value_sum = torch.zeros(Hq, T, D, device=q.device)
    for first in range(0, seq_len, block_size):
        block, count = block_table[first // block_size], min(block_size, seq_len - first)
        k = k_cache[block, :count].float().repeat_interleave(Hq // Hkv, dim=1)  # [count, Hq, D]
        v = v_cache[block, :count].float().repeat_interleave(Hq // Hkv, dim=1)
        scores = torch.einsum("thd,shd->hts", q.float(), k) * scale  # [Hq, T, count]
        key = torch.arange(first, first + count, device=q.device)
        scores = scores.masked_fill(key > position, float("-inf"))
        # Every query sees key 0, so `new_largest` is finite from the first block on.
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - new_largest).exp(), (largest - new_largest).exp()
        weight_sum = weight_sum * shrink + weights.sum(-1, keepdim=True)
        value_sum = value_sum * shrink + torch.einsum("hts,shd->htd", weights, v)
        largest = new_largest
    return (value_sum / weight_sum).transpose(0, 1).to(q.dtype)
