"""A decode step on a CPU in as few calls of PyTorch as its formulas allow.

With few tokens a call costs some microseconds whatever it computes, and stage 01's readable layer makes a hundred.
Here a layer makes half of them: the residual stream is added to in place, queries and keys are rotated together, and
keys and values go straight to their places in the cache.

From nine tokens on, all that is between two products lies column by column, as W x leaves it, so that nothing is turned
round in between; padded to a power of two, since MKL takes longer for 15 columns than for 16.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from stages.s01_forward.model import MLP, Attention, Model
from stages.s03_paged_kv.context import PagedContext
from stages.s07_cuda_graph.cpu_linear import FEW, power_of_two

COLUMNS = 9  # tokens from which on they lie column by column, up to `FEW`; for fewer MKL is slower with such operands


def forward(model: Model, input_ids: Tensor, positions: Tensor, ctx: PagedContext, queries: int = 1) -> Tensor:
    """`Model.forward`, equal up to rounding: input_ids, positions [T] int64 -> hidden [T, H]; for any `queries`."""
    T, layers = len(input_ids), list[Any](model.layers)
    residual = model.embed_tokens(input_ids)  # [T, H]; the layers add to it in place
    cos, sin = model.cos[positions], model.sin[positions]  # [T, D/2]
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]  # [T, 1, D], for all layers
    turned = COLUMNS <= T <= FEW and residual.dtype == torch.float32 and isinstance(layers[0].mlp, MLP)
    if turned:
        residual = columns(residual)
    for layer in layers:
        x = rms_norm(residual, layer.input_layernorm.weight, layer.eps)
        o = attend(layer.self_attn, x, cos, sin, ctx)
        o = layer.self_attn.o_proj(columns(o) if turned else o)
        x, residual = add_rms_norm(o, residual, layer.post_attention_layernorm.weight, layer.eps)
        residual.add_(layer.mlp(x))
    return rms_norm(residual[:T].contiguous(), model.norm.weight, model.config.rms_norm_eps)


def columns(x: Tensor) -> Tensor:
    """x [T, N] as [a power of two, N] with zeros below, laid out column by column."""
    out = x.new_zeros(x.shape[1], power_of_two(len(x)))
    out[:, : len(x)] = x.t()
    return out.t()


def attend(attn: Attention, x: Tensor, cos: Tensor, sin: Tensor, ctx: PagedContext) -> Tensor:
    """`Attention.forward` up to the output projection: x [T or more, H], cos and sin [T, 1, D] -> [T, Hq D]."""
    heads, kv_heads = attn.heads, attn.kv_heads
    qkv = attn.qkv_proj(x).view(len(x), heads + 2 * kv_heads, attn.head_dim)[: len(cos)]
    qk = qkv[:, : heads + kv_heads]
    if attn.q_norm and attn.k_norm:
        weights = attn.q_norm.weight.expand(heads, -1), attn.k_norm.weight.expand(kv_heads, -1)
        qk = rms_norm(qk, torch.cat(weights), attn.eps)
    qk = rotate(qk, cos, sin)
    return store_and_attend(attn.layer, qk[:, :heads].contiguous(), qk[:, heads:], qkv[:, heads + kv_heads :], ctx)


def store_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: PagedContext) -> Tensor:
    """`ctx.attend` without a look at the slots: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq D].

    They are the engine's own; one outside the cache is an IndexError here, too.
    """
    keys, values = ctx.store.layer(layer)  # [NB, BS, Hkv, D]
    keys.flatten(0, 1).index_copy_(0, ctx.slots, k)
    values.flatten(0, 1).index_copy_(0, ctx.slots, v)
    o = ctx.ops.paged_attention(q, keys, values, ctx.block_table, ctx.seq_lens, ctx.cu_q, ctx.plan, ctx.scale)
    return o.flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rope`: x [T, N, D]. cos [T, 1, D] is that of each element, and sin has a minus in its first half."""
    swapped = x.roll(x.shape[-1] // 2, -1)  # each element's partner
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)  # in fp32, as cos and sin are


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.rms_norm` in half of its calls: x [..., H], weight [H] or anything that can be multiplied."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # [..., 1]
    mean_square = torch.addcmul(constant(eps), length, length, value=1 / x.shape[-1])
    return (x * mean_square.rsqrt_()).to(x.dtype).mul_(weight)


@cache
def constant(value: float) -> Tensor:
    """A number as a tensor, made once."""
    return torch.tensor(value)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`layers.add_rms_norm`; the sum is written over `residual` [T, H]."""
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps), residual
