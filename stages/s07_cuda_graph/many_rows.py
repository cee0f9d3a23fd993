"""The forward pass for many rows, one new token each: the model's layer with fewer launches around cuBLAS's products.

    qkv      W x + b                                                  1
    o        q/k norm, RoPE, KV write; attention; merge of splits     2 or 3
    parts    W o, in two halves of its columns                        1
    x        norm(residual += the parts)                              1
    y        silu(gate x) * up x                                      2
    parts    W y, in two halves                                       1
    x        norm(residual += the parts)                              1

A product of few columns has few tiles, 24 of 128 x 128 for 256 rows and a hidden size of 1,536, where a GPU has 132
processors. cuBLAS then divides each sum over several of them and adds these up in a launch of its own; here the norm,
which reads the sum anyway, reads its halves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stages.s01_forward.model import Model

MOST_ROWS = 384  # with more, products have tiles enough
FEW_COLUMNS = 2048  # a weight of so few rows at most is halved; or one with columns so many times as rows:
LONG = 4


def forward_many(model: Model, input_ids: Tensor, positions: Tensor, ctx: Any, queries: int = 1) -> Tensor:
    """`Model.forward`, equal up to rounding: input_ids, positions [T] int64 -> hidden [T, H]; for any `queries`.

    `ctx` is a PagedContext, or anything with its fields. The embedding is an ordinary launch, so that positions and
    slots are there before `rope_store` waits.
    """
    from stages.s07_cuda_graph.norm_kernel import add_rms_norm
    from stages.s07_cuda_graph.rope_store_kernel import rope_store

    residual = model.embed_tokens(input_ids)  # [T, H]
    layers: list[Any] = list(model.layers)
    x = model.ops.rms_norm(residual, layers[0].input_layernorm.weight, layers[0].eps)
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        attn, mlp = layer.self_attn, layer.mlp
        qkv = attn.qkv_proj(x).view(len(x), -1, attn.head_dim)  # [T, Hq + 2 Hkv, D]
        q_norm, k_norm = (attn.q_norm.weight, attn.k_norm.weight) if attn.q_norm and attn.k_norm else (None, None)
        keys, values = ctx.store.layer(attn.layer)  # [NB, BS, Hkv, D]
        q = rope_store(qkv, q_norm, k_norm, model.cos, model.sin, positions, ctx.slots, keys, values, attn.eps)
        o = ctx.ops.paged_attention(q, keys, values, ctx.block_table, ctx.seq_lens, ctx.cu_q, ctx.plan, ctx.scale)
        o = product(o.flatten(1), attn.o_proj)
        x, residual = add_rms_norm(o, residual, layer.post_attention_layernorm.weight, layer.eps)
        y = product(model.ops.silu_mul(mlp.gate_up_proj(x)), mlp.down_proj)
        norm = following.input_layernorm if following else model.norm
        x, residual = add_rms_norm(y, residual, norm.weight, layer.eps)
    return x


def product(x: Tensor, linear: Any) -> Tensor:
    """W x + b of x [T, K]: [T, N], or its two parts [2, T, N] in fp32, as `norm_kernel.add_rms_norm` takes them."""
    (n, k), rows = linear.weight.shape, len(x)
    if linear.bias is not None or k % 2 or n > FEW_COLUMNS and k < LONG * n:
        out: Tensor = linear(x)
        return out
    halves, weights = x.view(rows, 2, k // 2).transpose(0, 1), linear.weight.view(n, 2, k // 2).permute(1, 2, 0)
    if x.dtype == torch.float32:
        return torch.bmm(halves, weights)
    return torch.bmm(halves, weights, out_dtype=torch.float32)
