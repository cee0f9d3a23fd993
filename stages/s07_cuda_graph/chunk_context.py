"""`ctx` of a step with chunks of prompts: their keys are at hand, so they need not be looked up in the cache again."""

from __future__ import annotations

from torch import Tensor

from stages.s03_paged_kv.context import PagedContext


class ChunkContext(PagedContext):
    """As stage 03's, with a `ChunkPlan`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of the new tokens -> o [T, Hq, D]."""
        from stages.s07_cuda_graph.chunk_kernel import chunk_attention

        keys, values = self.store.layer(layer)  # [NB, BS, Hkv, D]
        where = self.block_table, self.seq_lens, self.cu_q
        self.ops.store_kv(k, v, keys, values, self.slots)
        out = self.ops.paged_attention(q, keys, values, *where, self.plan, self.scale)  # rows of one token
        chunk_attention(q, k, v, keys, values, *where, self.plan.chunks, self.scale, out)
        return out
