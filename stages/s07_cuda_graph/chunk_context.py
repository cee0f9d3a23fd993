"""`ctx` of a step with chunks of prompts: their keys are at hand, so they need not be looked up in the cache again."""

from __future__ import annotations

from torch import Tensor

from stages.s03_paged_kv.context import PagedContext
from stages.s07_cuda_graph.chunk_tiles import chunk_attention


class ChunkContext(PagedContext):
    """As stage 03's, with a `ChunkPlan`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of the new tokens -> o [T, Hq, D]."""
        keys, values = self.store.layer(layer)  # [NB, BS, Hkv, D]
        where = self.block_table, self.seq_lens, self.cu_q
        self.ops.store_kv(k, v, keys, values, self.slots)
        out = self.ops.paged_attention(q, keys, values, *where, self.plan, self.scale)  # rows of one token
        chunks = self.plan.chunks
        chunk_attention(chunks.sizes)(q, k, v, keys, values, *where, chunks, self.scale, out)
        return out
