"""What lies between the QKV product and attention, in one launch: q/k norm, RoPE and the KV write."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.store_kv import launch_options
from stages.s03_paged_kv.tile_sizes import next_power_of_2

HEADS = 8  # of one token in one program: with one alone, 256 tokens would be thousands of programs of one warp


@triton.jit
def _rope_store_kernel(
    qkv_ptr, q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, k_cache_ptr, v_cache_ptr, eps,
    stride_block, stride_slot, stride_head, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: HEADS heads of one token, each as its two halves, whose elements are rotated in pairs."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_query, is_value = head < Q_HEADS, head >= Q_HEADS + KV_HEADS
    if PDL:
        gdc_launch_dependents()
    i = tl.arange(0, HALF_PAD)[None, :]
    position = tl.load(position_ptr + token)
    slot = tl.load(slot_ptr + token)
    cos = tl.load(cos_ptr + position * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + i, mask=i < HALF, other=0.0)
    if NORM:
        gain_ptr = tl.where(is_query, q_gain_ptr, k_gain_ptr) + i
        gain_first = tl.load(gain_ptr, mask=i < HALF, other=0.0).to(tl.float32)
        gain_second = tl.load(gain_ptr + HALF, mask=i < HALF, other=0.0).to(tl.float32)

    if PDL:
        gdc_wait()
    exists = (head < Q_HEADS + 2 * KV_HEADS) & (i < HALF)
    x_ptr = qkv_ptr + (token * (Q_HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + i
    first = tl.load(x_ptr, mask=exists, other=0.0, cache_modifier=".cg")
    second = tl.load(x_ptr + HALF, mask=exists, other=0.0, cache_modifier=".cg")
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1, keep_dims=True) / (2 * HALF) + eps)
        a = a * scale * gain_first
        b = b * scale * gain_second
    first = tl.where(is_value, first, (a * cos - b * sin).to(first.dtype))  # a value is stored as it is
    second = tl.where(is_value, second, (b * cos + a * sin).to(second.dtype))
    tl.store(x_ptr, first, mask=exists & is_query)
    tl.store(x_ptr + HALF, second, mask=exists & is_query)
    kv_head = tl.where(is_value, head - KV_HEADS, head) - Q_HEADS
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + kv_head * stride_head + i
    stored = exists & (slot >= 0) & (head >= Q_HEADS)  # a negative slot would lie before the cache
    cache_ptr = tl.where(is_value, v_cache_ptr, k_cache_ptr) + target
    tl.store(cache_ptr, first, mask=stored)
    tl.store(cache_ptr + HALF, second, mask=stored)


def rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Norms and rotates q and k of qkv [R, Hq + 2 Hkv, D], writes k and v to their slots; returns q [R, Hq, D].

    q is a view of `qkv`, which is overwritten. q_weight, k_weight: [D], or both None (no norm). cos_table, sin_table:
    fp32 [L, D/2]. positions, slots: int64 [R], block * BS + offset; a negative slot is written nowhere. k_cache,
    v_cache: [NB, BS, Hkv, D] in the dtype of qkv. In fp32 inside, rounded once. Raises ValueError for what does not
    fit. positions and slots are read before the kernel in front has ended, so at least one ordinary launch must lie
    between what writes them and this; in `forward_many` that is the embedding.
    """
    rows, heads, head_dim = qkv.shape
    block_size, kv_heads = k_cache.shape[1:3]
    fits = positions.shape == slots.shape == (rows,) and cos_table.shape == sin_table.shape
    if not fits or k_cache.shape[3] != head_dim or 2 * cos_table.shape[1] != head_dim or heads <= 2 * kv_heads:
        tables = f"tables {list(cos_table.shape)} {list(sin_table.shape)}, cache {list(k_cache.shape)}"
        raise ValueError(f"qkv {list(qkv.shape)}, {len(positions)} positions, {len(slots)} slots, {tables}")
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(f"k_cache {k_cache.stride()}, v_cache {v_cache.stride()}: need equal shapes, last stride 1")
    if not qkv.is_contiguous() or qkv.dtype != k_cache.dtype or (q_weight is None) != (k_weight is None):
        raise ValueError(f"qkv {qkv.dtype} {qkv.stride()} must be contiguous, {k_cache.dtype}, both norms or none")
    norm = q_weight is not None
    half_pad = next_power_of_2(head_dim // 2)
    _rope_store_kernel[(rows, -(-heads // HEADS))](
        qkv, q_weight if norm else qkv, k_weight if norm else qkv, cos_table, sin_table, positions, slots, k_cache,
        v_cache, eps, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), Q_HEADS=heads - 2 * kv_heads,
        KV_HEADS=kv_heads, HALF=head_dim // 2, HALF_PAD=half_pad, BLOCK_SIZE=block_size, HEADS=HEADS, NORM=norm,
        num_warps=min(max(HEADS * half_pad // 128, 1), 4), **launch_options(qkv.device),
    )  # fmt: skip
    return qkv[:, : heads - 2 * kv_heads]
