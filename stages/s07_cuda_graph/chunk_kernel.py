"""Attention for chunks of prompts, in Triton: the keys of this step are read as they lie, older ones through the pages.

What a step has just computed is one piece of memory, tokens one after the other. Hopper's copy engine (TMA) brings a
whole tile of it with one instruction, while pages of 16 tokens cost an address for each row of the tile: of a fresh
prompt that is a quarter to a third of the time (measured on an H200, see docs/stages/07b-fused-kernels.md).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from stages.s03_paged_kv.attention_plan import Launch
from stages.s03_paged_kv.kernel import LOG2_E, NO_KEY, _attend
from stages.s03_paged_kv.store_kv import launch_options


@triton.jit
def _attend_new(
    state, q, query, k_new, v_new, q_start, q_len, column, scale, first_key, last_key, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Folds the keys [first_key, last_key) of the step's own into the running softmax, as `kernel._attend` does."""
    acc, row_max, row_sum = state
    for start in range(first_key, last_key, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        score = tl.dot(q, tl.trans(k_new.load([q_start + start, column])))
        if MASKED:
            score = tl.where(key[None, :] <= query[:, None], score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        v = v_new.load([q_start + start, column])
        if MASKED:  # what follows is another row's, and may be NaN: 0 * NaN is NaN
            v = tl.where((key < q_len)[:, None], v, 0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["stride_table", "num_tiles", "num_heads", "group"])
def _chunk_kernel(
    q_ptr, k_new, v_new, k_ptr, v_ptr, out_ptr, table_ptr, seq_lens_ptr, cu_q_ptr, tile_map_ptr, scale,
    stride_q_token, stride_q_head, stride_block, stride_slot, stride_kv_head, stride_table, num_tiles, num_heads, group,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head of one sequence, over all keys that they see."""
    head, tile = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(tile_map_ptr + tile)
    first_query = tl.load(tile_map_ptr + num_tiles + tile)
    if row < 0:  # an empty tile, there to pad the grid
        return
    q_start = tl.load(cu_q_ptr + row)
    q_len = tl.load(cu_q_ptr + row + 1) - q_start
    old = tl.load(seq_lens_ptr + row) - q_len  # keys of the steps before
    query = first_query + tl.arange(0, BLOCK_M)
    wanted = (query < q_len)[:, None]
    token = (q_start + query).to(tl.int64)[:, None]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(q_ptr + token * stride_q_token + head * stride_q_head + dim, mask=wanted, other=0.0)
    state = (
        tl.zeros([BLOCK_M, HEAD_DIM], tl.float32),  # weighted sum of V
        tl.full([BLOCK_M], NO_KEY, tl.float32),  # largest score
        tl.zeros([BLOCK_M], tl.float32),  # sum of weights
    )

    kv_head = head // group
    k_ptr += kv_head * stride_kv_head
    v_ptr += kv_head * stride_kv_head
    table_ptr += row.to(tl.int64) * stride_table
    whole = old // BLOCK_N * BLOCK_N  # every query sees all old keys; the last tile of them may be ragged
    state = _attend(
        state, q, old + query, old, k_ptr, v_ptr, table_ptr, stride_block, stride_slot, scale, 0, whole,
        HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N, False, "tf32")  # fmt: skip
    state = _attend(
        state, q, old + query, old, k_ptr, v_ptr, table_ptr, stride_block, stride_slot, scale, whole, old,
        HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, "tf32")  # fmt: skip

    seen_by_all = first_query // BLOCK_N * BLOCK_N
    last_key = tl.minimum(first_query + BLOCK_M, q_len)
    column = kv_head * HEAD_DIM
    state = _attend_new(
        state, q, query, k_new, v_new, q_start, q_len, column, scale, 0, seen_by_all, BLOCK_N, False)  # fmt: skip
    acc, _, row_sum = _attend_new(
        state, q, query, k_new, v_new, q_start, q_len, column, scale, seen_by_all, last_key, BLOCK_N, True)  # fmt: skip
    acc = acc / row_sum[:, None]
    tl.store(out_ptr + (token * num_heads + head) * HEAD_DIM + dim, acc.to(out_ptr.dtype.element_ty), mask=wanted)


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_q: torch.Tensor, launch: Launch, scale: float,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """As `paged_attention` for the rows of `launch`, into `out` [T, Hq, D], given the step's own k, v [T, Hkv, D] too.

    Heads of one token must lie side by side, D be a power of two, and a tile hold whole heads: block_m queries of one.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, sizes = k.shape[1], launch.sizes
    k_new, v_new = (as_tiles(x, sizes.block_n) for x in (k, v))
    assert launch.tile_map is not None
    _chunk_kernel[(num_heads, launch.num_tiles)](
        q, k_new, v_new, k_cache, v_cache, out, block_table, seq_lens, cu_q, launch.tile_map, scale * LOG2_E,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table.stride(0),
        launch.num_tiles, num_heads, num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[1],
        BLOCK_M=launch.queries_per_tile, BLOCK_N=sizes.block_n, num_warps=sizes.num_warps,
        num_stages=sizes.num_stages, **launch_options(q.device),
    )  # fmt: skip


def as_tiles(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x [T, heads, D] as [T, heads * D], of which the copy engine brings [rows, D] at a time; zero past the end."""
    tokens, heads, dim = x.shape
    return TensorDescriptor(x, [tokens, heads * dim], [x.stride(0), 1], [rows, dim])
