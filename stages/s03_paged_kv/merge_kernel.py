"""The second half of flash decoding in Triton: the splits of one row become its output (Dao et al. 2023)."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.attention_plan import Launch
from stages.s03_paged_kv.store_kv import launch_options
from stages.s03_paged_kv.tile_sizes import next_power_of_2


@triton.jit(do_not_specialize=["num_splits", "num_tiles"])
def _merge_kernel(
    out_ptr, partial_ptr, lse_ptr, cu_q_ptr, tile_map_ptr, num_splits, num_tiles, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr, HAS_TILE_MAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: the splits of one (token, head), each weighted by its share of the softmax's denominator."""
    head, tile, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    row = tile
    if HAS_TILE_MAP:
        row = tl.load(tile_map_ptr + tile)
        query += tl.load(tile_map_ptr + num_tiles + tile)
    q_start = tl.load(cu_q_ptr + tl.maximum(row, 0))
    q_stop = tl.load(cu_q_ptr + tl.maximum(row, 0) + 1)
    if PDL:  # the lengths were there before the attention kernel, which waited for them; its results need this wait
        gdc_wait()
    if (row < 0) | (q_start + query >= q_stop):
        return
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, DIM_PAD)
    out_row = (q_start + query).to(tl.int64) * NUM_HEADS + head
    exists = split < num_splits
    lse = tl.load(lse_ptr + out_row * num_splits + split, mask=exists, other=float("-inf"))
    offset = (out_row * num_splits + split)[:, None] * HEAD_DIM + dim[None, :]
    partial = tl.load(partial_ptr + offset, mask=exists[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    weight = tl.exp2(lse - tl.max(lse, 0))
    merged = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + out_row * HEAD_DIM + dim, merged.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def merge_splits(
    out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor, cu_q: torch.Tensor, launch: Launch
) -> None:
    """Fills out [T, Hq, D] for the rows of `launch` from float32 partial [T, Hq, S, D] and lse [T, Hq, S].

    `lse` is the base-2 logarithm of each split's sum of weights, so 2 ** lse is its share of the whole row.
    """
    num_heads, head_dim = out.shape[1:]
    dim_pad, splits_pad = max(16, next_power_of_2(head_dim)), next_power_of_2(launch.num_splits)
    has_map = launch.tile_map is not None
    _merge_kernel[(num_heads, launch.num_tiles, launch.queries_per_tile)](
        out, partial, lse, cu_q, launch.tile_map if has_map else cu_q, launch.num_splits, launch.num_tiles,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, DIM_PAD=dim_pad, SPLITS_PAD=splits_pad, HAS_TILE_MAP=has_map,
        num_warps=max(1, min(4, splits_pad * dim_pad // 2048)), **launch_options(out.device),
    )  # fmt: skip
