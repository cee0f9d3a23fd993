"""Attention of few rows, straight from the QKV product, in Triton: q/k norm, RoPE, the KV write and the keys in one.

A launch that waits for the product may ask for keys meanwhile: all but the newest were written in steps before. The new
ones do not go through memory: each program makes them anew in registers, and the one with the first keys counts and
writes them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.kernel import NO_KEY


@triton.jit
def _load_old(
    cache_ptr, table_ptr, first, last, stride_block, stride_slot, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys or values of one head [BLOCK_N, DIM_PAD], from place `first` on; zeros from `last` on, which stay unread."""
    key = first + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, DIM_PAD)[None, :]
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < last, other=0).to(tl.int64)
    offset = block * stride_block + key % BLOCK_SIZE * stride_slot
    return tl.load(cache_ptr + offset[:, None] + dim, mask=(key < last)[:, None] & (dim < HEAD_DIM), other=0.0)


@triton.jit
def _load_turn(gain_ptr, cos_ptr, sin_ptr, position, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, NORM: tl.constexpr):
    """What norms and turns heads at `position` [M or 1]: factors of each element, and of the other one of its pair."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, DIM_PAD)[None, :]
    inside = dim < HEAD_DIM
    angle = position[:, None] * HALF + dim % HALF
    own = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    other = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    other = tl.where(dim < HALF, -other, other)
    if NORM:
        own *= tl.load(gain_ptr + dim, mask=inside, other=0.0).to(tl.float32)
        other *= tl.load(gain_ptr + (dim + HALF) % HEAD_DIM, mask=inside, other=0.0).to(tl.float32)
    return own, other


@triton.jit
def _load_turned(
    heads_ptr, wanted, turn, eps, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads [M, DIM_PAD] of the product, normed and turned, in its dtype."""
    own, other = turn
    dim = tl.arange(0, DIM_PAD)[None, :]
    mask = wanted[:, None] & (dim < HEAD_DIM)
    pointers = heads_ptr[:, None] + (dim + HEAD_DIM // 2) % HEAD_DIM
    x = tl.load(heads_ptr[:, None] + dim, mask=mask, other=0.0, cache_modifier=".cg")
    pair = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    y = x.to(tl.float32)
    scale = tl.full([1], 1.0, tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(y * y, 1) / HEAD_DIM + eps)
    return ((y * own + pair * other) * scale[:, None]).to(x.dtype)


@triton.jit
def _fold(state, q, k, v, seen, scale, PRECISION: tl.constexpr):
    """A tile of keys into the running softmax, base 2."""
    acc, row_max, row_sum = state
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
    score = tl.where(seen, score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, 1))
    weight = tl.exp2(score - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum * rescale + tl.sum(weight, 1)


@triton.jit(do_not_specialize=["stride_table"])
def few_attention_kernel(
    qkv_ptr, q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, cu_q_ptr, k_ptr, v_ptr, table_ptr,
    out_ptr, lse_ptr, eps, scale, stride_block, stride_slot, stride_head, stride_table,
    QUERIES: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NEW: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of one KV head of one row, over one split of its old keys."""
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    packed = tl.arange(0, BLOCK_M)
    key = tl.arange(0, NEW)
    if QUERIES == 1:
        first_token = row
        count = 1
        query = tl.zeros([BLOCK_M], tl.int32)
        old = tl.load(position_ptr + row).to(tl.int32)  # so many keys lie in the cache
        q_position = old + tl.arange(0, 1)
        k_position = q_position
    else:
        first_token = tl.load(cu_q_ptr + row)
        count = tl.minimum(tl.load(cu_q_ptr + row + 1) - first_token, QUERIES)
        query = packed // GROUP
        old = tl.load(position_ptr + first_token, mask=count > 0, other=0).to(tl.int32)
        q_position = tl.minimum(old + query, old + tl.maximum(count - 1, 0))
        k_position = tl.minimum(old + key, old + tl.maximum(count - 1, 0))
    is_new = key < count
    slot = tl.load(slot_ptr + first_token + key, mask=is_new, other=-1)
    tiles = tl.cdiv(tl.cdiv(old, BLOCK_N), SPLITS)  # of each split
    first = split * tiles * BLOCK_N
    last = tl.minimum(first + tiles * BLOCK_N, old)
    k_ptr += kv_head * stride_head
    v_ptr += kv_head * stride_head
    table_ptr += row.to(tl.int64) * stride_table
    k = _load_old(k_ptr, table_ptr, first, last, stride_block, stride_slot, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
    v = _load_old(v_ptr, table_ptr, first, last, stride_block, stride_slot, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
    q_turn = _load_turn(q_gain_ptr, cos_ptr, sin_ptr, q_position, HEAD_DIM, DIM_PAD, NORM)
    k_turn = _load_turn(k_gain_ptr, cos_ptr, sin_ptr, k_position, HEAD_DIM, DIM_PAD, NORM)

    if PDL:
        gdc_wait()
    dim = tl.arange(0, DIM_PAD)[None, :]
    wanted = (packed < QUERIES * GROUP) & (query < count)
    head = kv_head * GROUP + packed % GROUP
    stride_token: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    q_heads = qkv_ptr + (first_token + query).to(tl.int64) * stride_token + head * HEAD_DIM
    k_heads = qkv_ptr + (first_token + key).to(tl.int64) * stride_token + (Q_HEADS + kv_head) * HEAD_DIM
    stored = is_new[:, None] & (dim < HEAD_DIM)
    q = _load_turned(q_heads, wanted, q_turn, eps, HEAD_DIM, DIM_PAD, NORM)
    k_new = _load_turned(k_heads, is_new, k_turn, eps, HEAD_DIM, DIM_PAD, NORM)
    v_new = tl.load(k_heads[:, None] + KV_HEADS * HEAD_DIM + dim, mask=stored, other=0.0, cache_modifier=".cg")
    if split == 0:
        target = (slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot)[:, None] + dim
        stored &= (slot >= 0)[:, None]  # a negative slot would lie before the cache
        tl.store(k_ptr + target, k_new, mask=stored)
        tl.store(v_ptr + target, v_new, mask=stored)

    state = (
        tl.zeros([BLOCK_M, DIM_PAD], tl.float32),  # weighted sum of V
        tl.full([BLOCK_M], NO_KEY, tl.float32),  # largest score
        tl.zeros([BLOCK_M], tl.float32),  # sum of weights
    )
    place = tl.arange(0, BLOCK_N)[None, :]
    state = _fold(state, q, k, v, first + place < last, scale, PRECISION)
    for start in range(first + BLOCK_N, last, BLOCK_N):
        k = _load_old(k_ptr, table_ptr, start, last, stride_block, stride_slot, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
        v = _load_old(v_ptr, table_ptr, start, last, stride_block, stride_slot, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
        state = _fold(state, q, k, v, start + place < last, scale, PRECISION)
    if split == 0:  # the row's new keys, each for the queries that do not stand before it
        state = _fold(state, q, k_new, v_new, is_new[None, :] & (key[None, :] <= query[:, None]), scale, PRECISION)
    acc, row_max, row_sum = state
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # a split without a key weighs nothing in the merge
    acc = acc / row_sum[:, None]
    out = (first_token + query).to(tl.int64) * Q_HEADS + head  # [BLOCK_M]
    if SPLITS > 1:
        out = out * SPLITS + split
        tl.store(lse_ptr + out, row_max + tl.log2(row_sum), mask=wanted)
    answered = wanted[:, None] & (dim < HEAD_DIM)
    tl.store(out_ptr + out[:, None] * HEAD_DIM + dim, acc.to(out_ptr.dtype.element_ty), mask=answered)
