"""The mathematics of one layer, as plain functions on flat tokens: T tokens, no batch dimension, no padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` [..., H] to a root mean square of 1, then by `weight` [H] (Zhang & Sennrich 2019).

    The mean is taken in fp32; the result is cast back before the weight is applied, as Hugging Face does.
    """
    x32 = x.float()
    mean_square = x32.square().mean(dim=-1, keepdim=True)
    return weight * (x32 * torch.rsqrt(mean_square + eps)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` [T, H] to the residual stream; returns (the sum normed, the sum). One kernel from stage 07 on."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of `x` [T, N, D] by its token's angles, given as `cos` and `sin` [T, D/2] in fp32.

    Element i is paired with element i + D/2: the two halves, not neighbours (Su et al. 2021, in Hugging Face's layout).
    """
    first, second = x.float().chunk(2, dim=-1)  # [T, N, D/2] each
    cos, sin = cos[:, None, :], sin[:, None, :]  # one angle for all heads of a token
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Norm each head of `q` [T, Hq, D] and `k` [T, Hkv, D], if there are weights [D], then rotate it."""
    if q_weight is not None and k_weight is not None:  # Qwen3
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's middle: silu(gate) * up, the two packed side by side [T, 2I] -> [T, I] (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last T of S tokens: q [T, Hq, D], k and v [S, Hkv, D] -> [T, Hq, D].

    Grouped queries (Ainslie et al. 2023): each KV head serves Hq / Hkv query heads. Softmax in fp32.
    """
    T, Hq, _ = q.shape
    S, Hkv, _ = k.shape
    k = k.repeat_interleave(Hq // Hkv, dim=1)  # [S, Hq, D]
    v = v.repeat_interleave(Hq // Hkv, dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) * scale  # [Hq, T, S]
    # Query t stands at position S - T + t and sees the keys up to its own.
    query_position = torch.arange(S - T, S, device=q.device)[:, None]
    hidden = torch.arange(S, device=q.device) > query_position  # [T, S]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1, dtype=torch.float32)
    return torch.einsum("hts,shd->thd", weights.to(v.dtype), v)


def parameter(*shape: int) -> nn.Parameter:
    """A weight with a shape and no memory yet: `Model` decides device and dtype. Nothing is ever trained."""
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b. Every projection is one of these, so that one place decides how weights are stored."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs)
        self.bias = parameter(outputs) if bias else None
        self.product = F.linear  # or what the model's `Ops` say

    def forward(self, x: Tensor) -> Tensor:  # [T, inputs] -> [T, outputs]
        return self.product(x, self.weight, self.bias)


class Norm(nn.Module):
    """The weight of an RMSNorm; the mathematics is in `rms_norm`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = parameter(size)
