"""Attention of a step of few rows, from the QKV product to the heads' answers: one launch, and one to merge splits.

Keys are split over programs, and a second kernel makes one of their answers (flash decoding, Dao et al. 2023).
"""

import functools
from typing import Any

import torch
from torch import Tensor

from stages.s03_paged_kv.attention_plan import Launch
from stages.s03_paged_kv.tile_sizes import MAX_SPLITS, PROCESSORS, TileSizes, next_power_of_2

KEYS, TILE_BYTES = 64, 16 << 10  # of a tile, at most; more would not be under way before the wait
FEW = 16  # (row, KV head) pairs up to which one program for each processor is faster, but with long contexts


def few_attention(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    caches: tuple[Tensor, Tensor],
    ctx: Any,
    queries: int = 1,
) -> Tensor:
    """Norms and turns q and k of qkv [T, Hq + 2 Hkv, D], writes k and v to their slots, attends; returns [T, Hq, D].

    norms: weights [D] of q's and k's, with `eps`. angles: cos and sin, fp32 [L, D/2]. positions: int64 [T]; a row's
    first one says how many keys it has in the caches, K and V, [NB, BS, Hkv, D] in the dtype of qkv. ctx: `slots` int64
    [T] (block * BS + offset; a negative one is written nowhere), `block_table` int32 [R, MB], `cu_q` int32 [R + 1] and
    `scale`, as of a PagedContext. No row has more than `queries` new tokens (of padding, the first ones are answered).
    In fp32 inside; q, k and the answer are rounded once.

    All but qkv is read before the kernel in front has ended, so an ordinary launch must lie between what writes it and
    this: in `forward_few` the embedding. Raises ValueError for what does not fit.
    """
    from stages.s03_paged_kv.kernel import LOG2_E, precision, split_results
    from stages.s03_paged_kv.merge_kernel import merge_splits
    from stages.s03_paged_kv.store_kv import launch_options
    from stages.s07_cuda_graph.few_attention_kernel import few_attention_kernel

    keys, values = caches
    _check(qkv, norms, angles, positions, keys, values, ctx)
    (tokens, heads, head_dim), (block_size, kv_heads) = qkv.shape, keys.shape[1:3]
    rows, q_heads, options = len(ctx.block_table), heads - 2 * kv_heads, launch_options(qkv.device)
    dim_pad, longest = max(16, next_power_of_2(head_dim)), ctx.block_table.shape[1] * block_size
    launch = pick_launch(rows, queries, q_heads, kv_heads, dim_pad * keys.element_size(), longest)
    sizes, splits = launch.sizes, launch.num_splits
    out = torch.empty(tokens, q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    partial, lse = split_results(out, splits) if splits > 1 else (out, out)
    q_gain, k_gain = norms or (qkv, qkv)
    few_attention_kernel[(kv_heads, rows, splits)](
        qkv, q_gain, k_gain, *angles, positions, ctx.slots, ctx.cu_q, keys, values, ctx.block_table, partial, lse,
        eps, ctx.scale * LOG2_E, *keys.stride()[:3], ctx.block_table.stride(0),
        QUERIES=queries, Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        DIM_PAD=dim_pad, BLOCK_SIZE=block_size, BLOCK_M=sizes.block_m,
        BLOCK_N=sizes.block_n, NEW=max(16, next_power_of_2(queries)), SPLITS=splits, NORM=norms is not None,
        PRECISION=precision(qkv.dtype), num_warps=sizes.num_warps, num_stages=sizes.num_stages, **options,
    )  # fmt: skip
    if splits > 1:
        merge_splits(out, partial, lse, ctx.cu_q, launch)
    return out


@functools.cache
def pick_launch(rows: int, queries: int, q_heads: int, kv_heads: int, key_bytes: int, longest: int) -> Launch:
    """The splits follow from sizes alone, so they are the same for a row whatever stands beside it."""
    keys, pairs = max(16, min(KEYS, TILE_BYTES // key_bytes)), rows * kv_heads
    wanted = round((1 if pairs <= FEW else 2) * PROCESSORS / pairs)
    rows_of_q = max(16, next_power_of_2(queries * q_heads // kv_heads))
    # A product of 64 rows is one group of 4 warps' work: a second group would only do the same, and ptxas 12.8 makes
    # a mistake of that (lesson 07b, "A wrong register"). Of more rows it would be too much for 4 warps' registers.
    sizes = TileSizes(rows_of_q, keys, 4 if rows_of_q == 64 else 8, 3, False)
    return Launch(sizes, rows, queries, None, keys, max(1, min(wanted, MAX_SPLITS, -(-longest // keys))))


def _check(
    qkv: Tensor, norms: Any, angles: tuple[Tensor, Tensor], positions: Tensor, keys: Tensor, values: Tensor, ctx: Any
) -> None:
    (tokens, heads, head_dim), kv_heads = qkv.shape, keys.shape[2]
    shapes = {tuple(tensor.shape) for tensor in angles}
    if positions.shape != (tokens,) or ctx.slots.shape != (tokens,) or len(ctx.cu_q) != len(ctx.block_table) + 1:
        sizes = f"{len(ctx.slots)} slots, {len(ctx.block_table)} rows of blocks, {len(ctx.cu_q)} bounds of rows"
        raise ValueError(f"qkv of {tokens} tokens, {len(positions)} positions, {sizes}")
    if keys.shape[3] != head_dim or {shape[1] * 2 for shape in shapes} != {head_dim} or heads <= 2 * kv_heads:
        raise ValueError(f"qkv {list(qkv.shape)}, cos and sin {shapes}, keys {list(keys.shape)}: heads do not fit")
    if keys.shape != values.shape or keys.stride() != values.stride() or keys.stride(3) != 1:
        raise ValueError(f"keys {keys.stride()}, values {values.stride()}: need equal shapes, and a last stride of 1")
    if not qkv.is_contiguous() or qkv.dtype != keys.dtype:
        raise ValueError(f"qkv {qkv.dtype} {qkv.stride()} must be contiguous and of the keys' dtype, {keys.dtype}")
