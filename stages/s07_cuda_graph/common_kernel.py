"""Attention of rows that begin alike, in Triton: common keys are read once for all rows, the others row by row.

A softmax can be put together from pieces (03b's merge), and it does not matter who computed which. Of the common keys
a tile has queries of *many* rows, so that what was a product of a few queries with each key, bound by reading keys,
fills the tensor cores (Juravsky et al., *Hydragen*, 2024).
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.kernel import LOG2_E, NO_KEY, _attend, attend_launch, precision, split_results
from stages.s03_paged_kv.merge_kernel import merge_splits
from stages.s03_paged_kv.paged_attention import check_attention
from stages.s03_paged_kv.store_kv import launch_options
from stages.s03_paged_kv.tile_sizes import next_power_of_2
from stages.s07_cuda_graph.padded_plan import CommonPlan


@triton.jit(do_not_specialize=["num_rows", "least_keys", "all_splits"])
def _common_attention_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, table_ptr, num_blocks_ptr, scale, stride_q_token, stride_q_head,
    stride_block, stride_slot, stride_kv_head, num_rows, least_keys, all_splits, NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries, all heads of a group row after row, over one split of the common keys."""
    kv_head, tile, split, num_splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    if PDL:
        gdc_launch_dependents()
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    dim = tl.arange(0, DIM_PAD)[None, :]
    wanted = row < num_rows
    wanted_q = wanted[:, None] & (dim < HEAD_DIM)
    q_offset = row.to(tl.int64) * stride_q_token + head * stride_q_head
    q = tl.load(q_ptr + q_offset[:, None] + dim, mask=wanted_q, other=0.0)  # [BLOCK_M, DIM_PAD]

    num_keys = tl.load(num_blocks_ptr) * BLOCK_SIZE
    keys_per_split = tl.maximum(least_keys, tl.cdiv(num_keys, num_splits * BLOCK_N) * BLOCK_N)
    first_key = split * keys_per_split
    last_key = tl.minimum(first_key + keys_per_split, num_keys)
    whole = tl.maximum(last_key, first_key) // BLOCK_N * BLOCK_N  # in whole tiles; what remains is the last split's
    state = (
        tl.zeros([BLOCK_M, DIM_PAD], tl.float32),  # weighted sum of V
        tl.full([BLOCK_M], NO_KEY, tl.float32),  # largest score
        tl.zeros([BLOCK_M], tl.float32),  # sum of weights
    )
    k_ptr += kv_head * stride_kv_head
    v_ptr += kv_head * stride_kv_head
    position = tl.zeros([BLOCK_M], tl.int32) + num_keys  # every query stands behind all of these keys
    state = _attend(
        state, q, position, num_keys, k_ptr, v_ptr, table_ptr, stride_block, stride_slot, scale, first_key, whole,
        HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, False, PRECISION)  # fmt: skip
    acc, row_max, row_sum = _attend(
        state, q, position, num_keys, k_ptr, v_ptr, table_ptr, stride_block, stride_slot, scale, whole, last_key,
        HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, True, PRECISION)  # fmt: skip

    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    out_row = (row.to(tl.int64) * NUM_HEADS + head) * all_splits + split
    tl.store(lse_ptr + out_row, row_max + tl.log2(row_sum), mask=wanted)
    tl.store(partial_ptr + out_row[:, None] * HEAD_DIM + dim, acc / row_sum[:, None], mask=wanted_q)
    if PDL:  # only now: the kernel in front has the rows' own keys, and works at the same time
        gdc_wait()


def common_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_q: torch.Tensor, plan: CommonPlan, scale: float,
) -> torch.Tensor:  # fmt: skip
    """As `paged_attention` for rows of one token: q [R, Hq, D] -> [R, Hq, D]. Common keys are found by the first row.

    Stage 03's kernel is launched first, for the rows' own keys. It waits for what stands before it, and lets the next
    kernel come when it has: so `_common_attention_kernel` may read queries at once. At its end that one waits for stage
    03's, so that whoever waits for it, the merge, finds both results.
    """
    check_attention(q, k_cache, v_cache, block_table, seq_lens, cu_q)
    (own,), common = plan.launches, plan.common
    splits = common.num_splits + own.num_splits
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial, lse = split_results(out, splits)
    attend_launch(
        q, k_cache, v_cache, block_table, seq_lens, cu_q, own, scale, out, partial, lse, plan.num_blocks,
        common.num_splits,
    )  # fmt: skip
    attend_common(q, k_cache, v_cache, block_table, plan, scale, partial, lse)
    merge_splits(out, partial, lse, cu_q, replace(own, num_splits=splits))
    return out


def attend_common(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, plan: CommonPlan,
    scale: float, partial: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    """The common keys alone, into the first splits of partial [R, Hq, S, D] and lse [R, Hq, S]."""
    rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    common, sizes = plan.common, plan.common.sizes
    _common_attention_kernel[(num_kv_heads, common.num_tiles, common.num_splits)](
        q, k_cache, v_cache, partial, lse, block_table, plan.num_blocks, scale * LOG2_E, q.stride(0), q.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), rows, common.keys_per_split, lse.shape[2],
        NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        DIM_PAD=max(16, next_power_of_2(head_dim)), BLOCK_SIZE=block_size, BLOCK_M=sizes.block_m,
        BLOCK_N=sizes.block_n, PRECISION=precision(q.dtype), num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        **launch_options(q.device),
    )  # fmt: skip
