"""Attention over cached keys: fewer queries than keys, aligned at the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cached_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the newest T of S tokens: q [T, Hq, D], k and v [S, Hkv, D] -> [T, Hq, D].

    The mathematics of stage 01's `attention`, through PyTorch's fused kernel, which never holds all scores at once.
    """
    T, Hq, D = q.shape
    S, Hkv, _ = k.shape
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, Hkv, S, D]
    if T == 1:
        # The newest token sees every key, so nothing is masked, and the heads of a group can stand as queries
        # of their KV head: [1, Hkv, group, D]. No key is repeated.
        packed = q.view(1, Hkv, Hq // Hkv, D)
        return F.scaled_dot_product_attention(packed, keys, values, scale=scale).reshape(1, Hq, D)
    # `is_causal` aligns the first query with the first key: right only if all keys are new.
    mask = None if T == S else causal_mask(T, S, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """Which of S keys each of the newest T tokens sees, bool [T, S]: query t stands at position S - T + t."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
