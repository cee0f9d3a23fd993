"""Random paged batches and an attention in float64 that shares no idea with the two it checks. For checks only."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.s03_paged_kv.tile_sizes import AttentionShape

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A batch in a paged cache whose blocks are scattered, with NaN in block 0 and behind the end of every row."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_q: torch.Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    shape: AttentionShape
    scale: float

    @property
    def inputs(self) -> Inputs:
        """In the order of `paged_attention`."""
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens, self.cu_q


def make_case(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layout: str = "layers",
    seed: int = 0,
    shuffle: int = 0,
) -> Case:
    """`layout`: "layers" is a view of [2, 2, NB, BS, Hkv, D] (the usual cache), "blocks" one of [NB, 2, BS, Hkv, D].

    `seed` decides the contents of keys and values in logical order, `shuffle` only where their blocks lie.
    """
    rng = torch.Generator(device).manual_seed(seed)
    needed = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(needed) + 2
    order = torch.tensor([0, *random.Random(shuffle).sample(range(1, num_blocks), num_blocks - 1)], device=device)
    free = iter(order.tolist()[1:])
    table = [[next(free) for _ in range(n)] for n in needed]
    width = max(max(needed), 1) + 1  # one column more than anybody needs
    block_table = torch.tensor([row + [0] * (width - len(row)) for row in table], dtype=torch.int32, device=device)
    shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
    content = torch.randn(shape, device=device, generator=rng).to(dtype)
    content[:, 0] = float("nan")
    if layout == "layers":
        cache = torch.zeros(2, *shape, dtype=dtype, device=device)[1]
    else:
        cache = torch.zeros(num_blocks, 2, *shape[2:], dtype=dtype, device=device).transpose(0, 1)
    cache[:, order] = content
    for blocks, n in zip(table, kv_lens, strict=True):
        if n % block_size:
            cache[:, blocks[-1], n % block_size :] = float("nan")
    num_heads = num_kv_heads * group
    wide = torch.randn(sum(q_lens), num_heads + 2, head_dim, device=device, generator=rng).to(dtype)
    cu_q = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return Case(
        wide[:, :num_heads],  # q is a slice of the packed QKV projection: its tokens are not contiguous
        cache[0], cache[1], block_table, torch.tensor(kv_lens, dtype=torch.int32, device=device), cu_q,
        tuple(q_lens), tuple(kv_lens),
        AttentionShape(num_heads, num_kv_heads, head_dim, block_size, cache.element_size()), head_dim**-0.5,
    )  # fmt: skip


def exact_attention(case: Case) -> torch.Tensor:
    """float64 [T, Hq, D]: key by key through the block table, then the textbook formula."""
    block_size, start, outs = case.shape.block_size, 0, []
    for row, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        q = case.q[start : start + q_len].double()  # [q_len, Hq, D]
        start += q_len
        if kv_len == 0:
            outs.append(torch.zeros_like(q))
            continue
        blocks = case.block_table[row, : -(-kv_len // block_size)].long()
        k = case.k_cache[blocks].flatten(0, 1)[:kv_len].double().repeat_interleave(case.shape.group, 1)  # [S, Hq, D]
        v = case.v_cache[blocks].flatten(0, 1)[:kv_len].double().repeat_interleave(case.shape.group, 1)
        score = torch.einsum("qhd,khd->hqk", q, k) * case.scale
        position = torch.arange(kv_len - q_len, kv_len, device=q.device)
        future = torch.arange(kv_len, device=q.device)[None, :] > position[:, None]
        outs.append(torch.einsum("hqk,khd->qhd", score.masked_fill(future, float("-inf")).softmax(-1), v))
    return torch.cat(outs)
