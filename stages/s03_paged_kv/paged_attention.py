"""Paged attention and the K/V write in plain torch: the path of every CPU, and what the kernel is checked against.

The idea in two lines: gather the keys of a row from its blocks, then attend as if they had never been scattered.
Rows with one query (decode) go together, those of about one length in one masked call; rows with more go one by one,
without padding.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stages.s02_kv_cache.attention import cached_attention
from stages.s03_paged_kv.attention_plan import AttentionShape, check_lengths

BUCKET = 128  # rows whose numbers of keys, divided by this, round up to the same go together


@dataclass(frozen=True)
class Singles:
    """Rows with one query and about as many keys: R1 of them, S keys in the longest.

    `tokens` int64 [R1]: their tokens. `keys` int64 [R1, Hkv, S]: where their keys lie, head by head; key h of slot s is
    vector s * Hkv + h of a cache. `mask` bool [R1, 1, 1, S]: which of them exist; None if all do.
    """

    tokens: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class GatherPlan:
    """Where the keys of each row lie, found once per step for all layers.

    `chunks`: for each row with several queries its first token, its query count and its slots, int64 [seq_len].
    """

    singles: tuple[Singles, ...]
    chunks: tuple[tuple[int, int, torch.Tensor], ...]


def make_plan(
    q_lens: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor, shape: AttentionShape
) -> GatherPlan:
    """Plans one step: block_table is int32 [R, MB]. Raises ValueError for lengths that cannot be."""
    check_lengths(q_lens, seq_lens)
    device = block_table.device
    starts = list(itertools.accumulate(q_lens, initial=0))
    chunks = tuple(
        (starts[row], q_len, _slots(block_table[row], torch.arange(seq_lens[row], device=device), shape.block_size))
        for row, q_len in enumerate(q_lens)
        if q_len > 1
    )
    buckets: dict[int, list[int]] = {}
    for row, q_len in enumerate(q_lens):
        if q_len == 1 and seq_lens[row] > 0:
            buckets.setdefault(-(-seq_lens[row] // BUCKET), []).append(row)
    return GatherPlan(tuple(_singles(rows, starts, seq_lens, block_table, shape) for rows in buckets.values()), chunks)


def _singles(
    rows: Sequence[int],
    starts: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    shape: AttentionShape,
) -> Singles:
    """The plan of rows that go together; `starts`: the first token of every row."""
    device, longest = block_table.device, max(seq_lens[row] for row in rows)
    lens = torch.tensor([seq_lens[row] for row in rows], device=device)[:, None]
    key = torch.arange(longest, device=device).expand(len(rows), -1)
    # A padding position repeats the row's last key instead of reading block 0: no mask can undo a NaN in V.
    slots = _slots(block_table[rows], torch.minimum(key, lens - 1), shape.block_size)
    keys = slots[:, None] * shape.num_kv_heads + torch.arange(shape.num_kv_heads, device=device)[:, None]
    mask = (key < lens)[:, None, None] if any(seq_lens[row] != longest for row in rows) else None
    return Singles(torch.tensor([starts[row] for row in rows], device=device), keys, mask)


def _slots(table: torch.Tensor, key: torch.Tensor, block_size: int) -> torch.Tensor:
    """The slot of each logical key: its block times the block size, plus its offset in the block."""
    return table.long().gather(-1, key // block_size) * block_size + key % block_size


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes k, v [T, Hkv, D] into the caches [NB, BS, Hkv, D] at slot_mapping [T] int64 (block * BS + offset).

    Padding tokens take slot 0 of block 0. Raises IndexError for a slot outside the cache: torch would let -1 pass, and
    write to the last slot of somebody's block.
    """
    check_store(k, v, k_cache, v_cache, slot_mapping)
    num_slots, block_size = k_cache.shape[0] * k_cache.shape[1], k_cache.shape[1]
    low, high = (int(bound) for bound in slot_mapping.aminmax()) if slot_mapping.numel() else (0, 0)
    if low < 0 or high >= num_slots:
        raise IndexError(f"slots {low} to {high} asked for; the cache has slots 0 to {num_slots - 1}")
    for new, cache in ((k, k_cache), (v, v_cache)):
        if _is_flat(cache):
            cache.view(num_slots, *cache.shape[2:]).index_copy_(0, slot_mapping, new.to(cache.dtype))
        else:
            cache[slot_mapping // block_size, slot_mapping % block_size] = new.to(cache.dtype)


def _is_flat(cache: torch.Tensor) -> bool:
    """Whether slot s lies at s * stride(1): then one index finds it, 4 to 7 times faster in torch than two."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor,
    plan: GatherPlan,
    scale: float,
) -> torch.Tensor:
    """Causal attention of new tokens over the cached keys of their rows, the new ones included.

    q [T, Hq, D]; k_cache, v_cache [NB, BS, Hkv, D], strides free but for the last; block_table int32 [R, MB];
    seq_lens int32 [R], the keys of each row; cu_q int32 [R + 1], where each row's queries start; `plan` of the same
    lengths; `scale` usually D ** -0.5. Query i of row r stands at position seq_len - q_len + i. Returns [T, Hq, D].
    A padding row (one query, no key) yields zeros. Raises ValueError for tensors that do not fit each other.
    """
    check_attention(q, k_cache, v_cache, block_table, seq_lens, cu_q)
    if len(plan.singles) == 1 and len(plan.singles[0].tokens) == len(q):  # nothing to pick out and to put back
        return _attend_singles(q, k_cache, v_cache, plan.singles[0], scale)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for rows in plan.singles:
        o = _attend_singles(q.index_select(0, rows.tokens), k_cache, v_cache, rows, scale)
        out.index_copy_(0, rows.tokens, o)
    for start, q_len, slots in plan.chunks:
        chunk = slice(start, start + q_len)
        out[chunk] = cached_attention(q[chunk], _gather(k_cache, slots), _gather(v_cache, slots), scale)
    return out


def _attend_singles(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: Singles, scale: float
) -> torch.Tensor:
    """Rows with one query: q [R1, Hq, D] -> [R1, Hq, D]."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    # The heads of a group become query rows of their KV head: each key is read once, and nothing is repeated.
    packed = q.reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k, v = _gather_heads(k_cache, rows.keys), _gather_heads(v_cache, rows.keys)  # [R1, Hkv, S, D]
    o = F.scaled_dot_product_attention(packed, k, v, attn_mask=rows.mask, scale=scale)
    return o.reshape(-1, num_heads, head_dim)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The cache's entries [..., Hkv, D] at slots [...]."""
    if not _is_flat(cache):
        return cache[slots // cache.shape[1], slots % cache.shape[1]]
    flat = cache.view(-1, *cache.shape[2:])
    return flat.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[2:])


def _gather_heads(cache: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The cache's vectors [R1, Hkv, S, D] at `keys`, side by side as the product with the queries wants them."""
    _, block_size, num_kv_heads, head_dim = cache.shape
    if not cache.is_contiguous():
        slots = keys // num_kv_heads
        return cache[slots // block_size, slots % block_size, keys % num_kv_heads]
    return cache.view(-1, head_dim).index_select(0, keys.flatten()).view(*keys.shape, head_dim)


def check_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor,
) -> None:
    """Shapes, dtypes and strides that both versions rely on; ValueError says which is wrong. Reads no data."""
    _check_caches(k_cache, v_cache)
    if q.ndim != 3 or q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2] or q.dtype != k_cache.dtype:
        raise ValueError(f"q {list(q.shape)} {q.dtype} does not fit a cache {list(k_cache.shape)} {k_cache.dtype}")
    rows = seq_lens.shape[0]
    if block_table.ndim != 2 or block_table.shape[0] != rows or cu_q.shape != (rows + 1,):
        shapes = f"block_table {list(block_table.shape)}, seq_lens [{rows}], cu_q {list(cu_q.shape)}"
        raise ValueError(f"{shapes}: row counts differ")
    if q.stride(2) != 1 or block_table.stride(1) != 1:
        raise ValueError(f"last strides must be 1: q {q.stride(2)}, block_table {block_table.stride(1)}")


def check_store(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """The same for `store_kv`."""
    _check_caches(k_cache, v_cache)
    if k.shape != v.shape or k.ndim != 3 or k.shape[1:] != k_cache.shape[2:] or slot_mapping.shape != k.shape[:1]:
        shapes = f"k {list(k.shape)}, v {list(v.shape)}, slots {list(slot_mapping.shape)}"
        raise ValueError(f"{shapes} do not fit a cache {list(k_cache.shape)}")
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError(f"last strides must be 1: k {k.stride(2)}, v {v.stride(2)}")


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"k_cache {list(k_cache.shape)} {k_cache.stride()} and v_cache {list(v_cache.shape)} {v_cache.stride()}: "
            "both must be [NB, BS, Hkv, D] with the same strides"
        )
    if k_cache.stride(3) != 1:
        raise ValueError(f"a cache's last stride must be 1, not {k_cache.stride(3)}")
