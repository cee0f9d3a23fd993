"""`ctx` with a cache: write the new keys and values into the page, then attend over all that the page holds."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.s02_kv_cache.attention import cached_attention
from stages.s02_kv_cache.batch import Batch
from stages.s02_kv_cache.kv_store import KVStore


@dataclass(frozen=True)
class CachedContext:
    """One step's view of the cache; `pages[r]` is the page of row r."""

    store: KVStore
    batch: Batch
    pages: Rows[int]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of the new tokens -> o [T, Hq, D]."""
        keys, values = self.store.layer(layer)  # [pages, page_size, Hkv, D]
        outputs = []
        for row, page in enumerate(self.pages):
            first, last, end = self.batch.cu_q[row], self.batch.cu_q[row + 1], self.batch.seq_lens[row]
            start = end - (last - first)  # the position of the first new token
            keys[page, start:end] = k[first:last]
            values[page, start:end] = v[first:last]
            new = q[first:last]  # [T of this row, Hq, D]
            outputs.append(cached_attention(new, keys[page, :end], values[page, :end], q.shape[-1] ** -0.5))
        return torch.cat(outputs)
