"""`ctx` over blocks: each new token knows its slot, each row its block table."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.s02_kv_cache.batch import Batch
from stages.s02_kv_cache.kv_store import KVStore
from stages.s02_kv_cache.sequence import NewTokens
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.block_pool import DUMMY
from stages.s03_paged_kv.ops import PagedOps


def slot_mapping(sequences: Rows[NewTokens], block_size: int) -> list[int]:
    """The slot of every new token: its block's number times the block size, plus its place in the block."""
    return [
        seq.block_table[position // block_size] * block_size + position % block_size
        for seq in sequences
        for position in range(seq.num_kv, seq.num_tokens)
    ]


def block_tables(sequences: Rows[NewTokens]) -> Tensor:
    """Every row's blocks, int32 [R, MB] on the host, short rows padded with the dummy block.

    Through one flat buffer: a tensor made of nested lists takes more than twice as long.
    """
    width = max(len(seq.block_table) for seq in sequences)
    flat: list[int] = []
    for seq in sequences:
        flat += seq.block_table
        flat += [DUMMY] * (width - len(seq.block_table))
    return torch.frombuffer(array("i", flat), dtype=torch.int32).view(-1, width)


@dataclass(frozen=True)
class PagedContext:
    """One step's view of the cache, the same for all layers."""

    store: KVStore
    ops: PagedOps
    slots: Tensor  # [T] int64
    block_table: Tensor  # [R, MB] int32, short rows padded with the dummy block
    seq_lens: Tensor  # [R] int32
    cu_q: Tensor  # [R + 1] int32
    plan: Any  # of `ops.make_plan`
    scale: float

    @classmethod
    def of(
        cls, sequences: Rows[NewTokens], batch: Batch, store: KVStore, ops: PagedOps, shape: AttentionShape
    ) -> PagedContext:
        """Send each row's table and lengths to the device, once per step."""
        device = store.data.device
        block_table = block_tables(sequences).to(device)
        q_lens = [seq.num_new for seq in sequences]
        return cls(
            store=store,
            ops=ops,
            slots=torch.tensor(slot_mapping(sequences, shape.block_size), device=device),
            block_table=block_table,
            seq_lens=torch.tensor(batch.seq_lens, dtype=torch.int32, device=device),
            cu_q=torch.tensor(batch.cu_q, dtype=torch.int32, device=device),
            plan=ops.make_plan(q_lens, batch.seq_lens, block_table, shape),
            scale=shape.head_dim**-0.5,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of the new tokens -> o [T, Hq, D]."""
        keys, values = self.store.layer(layer)  # [NB, BS, Hkv, D]
        self.ops.store_kv(k, v, keys, values, self.slots)
        return self.ops.paged_attention(
            q, keys, values, self.block_table, self.seq_lens, self.cu_q, self.plan, self.scale
        )
