"""Paged attention and the K/V write in Triton: one attention kernel for prefill, chunks, decode and all mixtures.

Imports Triton at once, so import this module only where Triton is there; `paged_attention.py` holds the same functions
in plain torch. The softmax is computed block by block with a running maximum (FlashAttention, Dao et al. 2022), the
scattered blocks are found through the block table (PagedAttention, Kwon et al. 2023), and the keys of long rows may be
split over programs and merged afterwards (flash decoding, Dao et al. 2023).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.attention_plan import KernelPlan, Launch, make_plan
from stages.s03_paged_kv.merge_kernel import merge_splits
from stages.s03_paged_kv.paged_attention import check_attention
from stages.s03_paged_kv.store_kv import launch_options, store_kv
from stages.s03_paged_kv.tile_sizes import AttentionShape, next_power_of_2

__all__ = ["make_plan", "paged_attention", "store_kv"]

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E), and exp2 is one instruction
NO_KEY = tl.constexpr(-1.0e30)  # the running maximum before the first key: finite, since (-inf) - (-inf) is NaN


@triton.jit
def _load_keys(ptr, offset, exists, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, MASKED: tl.constexpr):
    """[BLOCK_N, DIM_PAD] of K or V. A slot past the end may hold anything, and 0 * NaN is NaN: it is never loaded."""
    dim = tl.arange(0, DIM_PAD)[None, :]
    pointers = ptr + offset[:, None] + dim
    if MASKED:
        tile = tl.load(pointers, mask=exists[:, None] & (dim < HEAD_DIM), other=0.0)
    elif HEAD_DIM < DIM_PAD:
        tile = tl.load(pointers, mask=dim < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _attend(
    state, q, position, num_keys, k_ptr, v_ptr, table_ptr, stride_block, stride_slot, scale, first_key, last_key,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Folds the keys [first_key, last_key) into the running softmax. Without MASKED all query rows must see them."""
    acc, row_max, row_sum = state
    for start in range(first_key, last_key, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        exists = key < num_keys
        # Logical key -> physical slot. The keys of one block ask for the same entry: after the first, a cache hit.
        # (What of this stays the same could be worked out before the loop. That saves 16 % of the loop's instructions,
        # but holds 40 more registers a thread: fewer programs fit a processor, and decode was up to 21 % slower.)
        if MASKED:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=exists, other=0)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE)
        offset = block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_slot  # [BLOCK_N]
        k = _load_keys(k_ptr, offset, exists, HEAD_DIM, DIM_PAD, MASKED)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            score = tl.where(exists[None, :] & (key[None, :] <= position[:, None]), score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - new_max[:, None])  # one fused multiply-add and one exp2 for each score
        rescale = tl.exp2(row_max - new_max)  # what was summed under the old maximum
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        v = _load_keys(v_ptr, offset, exists, HEAD_DIM, DIM_PAD, MASKED)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


# Triton compiles a kernel again when an integer becomes 1 or a multiple of 16. These change from step to step.
VARYING = ["stride_table", "keys_per_split", "num_splits", "splits_before", "num_tiles"]


@triton.jit(do_not_specialize=VARYING)
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, table_ptr, seq_lens_ptr, cu_q_ptr, tile_map_ptr, skip_ptr,
    scale, stride_q_token, stride_q_head, stride_block, stride_slot, stride_kv_head, stride_table, keys_per_split,
    num_splits, splits_before, num_tiles, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_TILE_MAP: tl.constexpr, SPLIT: tl.constexpr, SKIP: tl.constexpr, UNMASKED_PART: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one sequence and one KV head, over one split of the keys."""
    kv_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:  # wait for the kernel before; from then on the next one may be set up while this one runs
        gdc_wait()
        gdc_launch_dependents()
    row = tile
    first_query = 0
    if HAS_TILE_MAP:
        row = tl.load(tile_map_ptr + tile)
        first_query = tl.load(tile_map_ptr + num_tiles + tile)
        if row < 0:  # an empty tile, there to pad the grid
            return
    q_start = tl.load(cu_q_ptr + row)
    q_len = tl.load(cu_q_ptr + row + 1) - q_start
    seq_len = tl.load(seq_lens_ptr + row)

    # GQA packing: the heads of one group stand side by side as query rows and share every key that is loaded.
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    packed = tl.arange(0, BLOCK_M)
    query = first_query + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    wanted = (packed < QUERIES * GROUP) & (query < q_len)
    token = (q_start + query).to(tl.int64)
    dim = tl.arange(0, DIM_PAD)[None, :]
    wanted_q = wanted[:, None] & (dim < HEAD_DIM)
    q_offset = token * stride_q_token + head * stride_q_head
    q = tl.load(q_ptr + q_offset[:, None] + dim, mask=wanted_q, other=0.0)  # [BLOCK_M, DIM_PAD]

    # Causal, aligned at the end: the last query stands on the last key.
    position = seq_len - q_len + query
    num_keys = tl.minimum(seq_len, seq_len - q_len + first_query + QUERIES)  # seen by the tile's last query
    skipped, before = 0, 0
    if SKIP:  # the keys of the first blocks are another kernel's, and so are the first splits (stage 07)
        skipped, before = tl.load(skip_ptr) * BLOCK_SIZE, splits_before
    # Planned for lengths that a captured graph does not know yet, `keys_per_split` may be too few for this row.
    keys_per_split = tl.maximum(keys_per_split, tl.cdiv(num_keys - skipped, num_splits * BLOCK_N) * BLOCK_N)
    first_key = skipped + split * tl.multiple_of(keys_per_split, BLOCK_N)
    last_key = tl.minimum(first_key + keys_per_split, num_keys)

    state = (
        tl.zeros([BLOCK_M, DIM_PAD], tl.float32),  # weighted sum of V
        tl.full([BLOCK_M], NO_KEY, tl.float32),  # largest score
        tl.zeros([BLOCK_M], tl.float32),  # sum of weights
    )
    k_ptr += kv_head * stride_kv_head
    v_ptr += kv_head * stride_kv_head
    table_ptr += row.to(tl.int64) * stride_table
    if UNMASKED_PART:  # away from the diagonal nothing needs a mask: most of a prefill's work
        seen_by_all = tl.minimum(seq_len - q_len + first_query + 1, last_key)
        seen_by_all = skipped + (seen_by_all - skipped) // BLOCK_N * BLOCK_N
        state = _attend(
            state, q, position, num_keys, k_ptr, v_ptr, table_ptr, stride_block, stride_slot, scale,
            first_key, seen_by_all, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, False, PRECISION)  # fmt: skip
        first_key = tl.maximum(first_key, seen_by_all)
    acc, row_max, row_sum = _attend(
        state, q, position, num_keys, k_ptr, v_ptr, table_ptr, stride_block, stride_slot, scale,
        first_key, last_key, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, True, PRECISION)  # fmt: skip

    # A row without a key (padding, or a split past its end) is zero, and with NO_KEY weighs nothing in the merge.
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    acc = acc / row_sum[:, None]
    out_row = token * NUM_HEADS + head
    if SPLIT:
        out_row = out_row * (before + num_splits) + before + split
        tl.store(lse_ptr + out_row, row_max + tl.log2(row_sum), mask=wanted)
        tl.store(partial_ptr + out_row[:, None] * HEAD_DIM + dim, acc, mask=wanted_q)
    else:
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dim, acc.to(out_ptr.dtype.element_ty), mask=wanted_q)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor,
    plan: KernelPlan,
    scale: float,
) -> torch.Tensor:
    """Causal attention of q [T, Hq, D] over the cached keys of each row; returns [T, Hq, D]. See `paged_attention.py`.

    Nothing here looks at device data, and the launches depend on `plan` alone: a call can be captured in a CUDA graph
    and replayed with other contents of the same tensors, as long as no row has more queries than the plan's.
    """
    check_attention(q, k_cache, v_cache, block_table, seq_lens, cu_q)
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size, k_cache.element_size())
    if plan.num_rows != seq_lens.shape[0] or plan.shape != shape:
        raise ValueError(f"plan for {plan.num_rows} rows of {plan.shape}, called with {seq_lens.shape[0]} of {shape}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for launch in plan.launches:
        partial, lse = split_results(out, launch.num_splits) if launch.num_splits > 1 else (out, out)
        attend_launch(q, k_cache, v_cache, block_table, seq_lens, cu_q, launch, scale, out, partial, lse)
        if launch.num_splits > 1:
            merge_splits(out, partial, lse, cu_q, launch)
    return out


def split_results(out: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what each split says of out [T, Hq, D]: float32 [T, Hq, S, D] and [T, Hq, S], for `merge_splits`."""
    tokens, heads, dim = out.shape
    partial = torch.empty(tokens, heads, splits, dim, dtype=torch.float32, device=out.device)
    return partial, torch.empty(tokens, heads, splits, dtype=torch.float32, device=out.device)


def attend_launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_q: torch.Tensor, launch: Launch, scale: float, out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor,
    skip: torch.Tensor | None = None, splits_before: int = 0,
) -> None:  # fmt: skip
    """One launch of the kernel, without the merge: into `out`, or, if there are several splits, `partial` and `lse`.

    skip: int32 [1], blocks at the beginning of every row that `splits_before` splits of another kernel have.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    sizes, splits, unread = launch.sizes, launch.num_splits, cu_q  # in place of what there is not
    _attention_kernel[(num_kv_heads, launch.num_tiles, splits)](
        q, k_cache, v_cache, out, partial, lse, block_table, seq_lens, cu_q,
        unread if launch.tile_map is None else launch.tile_map, unread if skip is None else skip, scale * LOG2_E,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table.stride(0),
        launch.keys_per_split, splits, splits_before, launch.num_tiles, NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, DIM_PAD=max(16, next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size, BLOCK_M=sizes.block_m, BLOCK_N=sizes.block_n, HAS_TILE_MAP=launch.tile_map is not None,
        SPLIT=splits_before + splits > 1, SKIP=skip is not None, UNMASKED_PART=sizes.unmasked_part,
        PRECISION=precision(q.dtype), num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        **launch_options(q.device),
    )  # fmt: skip


def precision(dtype: torch.dtype) -> str:
    """Of products: float32 as three on tensor cores, error 1e-6. Other dtypes have but one way."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
