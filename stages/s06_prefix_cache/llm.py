"""`LLM` that remembers: a prompt that begins like an earlier one starts where they part."""

from __future__ import annotations

from typing import Any, Literal

from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s05_chunked_prefill.llm import LLM as ChunkedLLM
from stages.s06_prefix_cache.hash_chain import HashChain
from stages.s06_prefix_cache.prefix_cache import PrefixCache
from stages.s06_prefix_cache.radix_tree import RadixTree


class LLM(ChunkedLLM):
    """prefix_cache: "radix" (a tree, the default), "chain" (hashes), or "off"."""

    def __init__(self, *args: Any, prefix_cache: Literal["chain", "radix", "off"] = "radix", **options: Any) -> None:
        if prefix_cache not in ("chain", "radix", "off"):
            raise ValueError(f"prefix_cache is {prefix_cache!r}; it must be 'chain', 'radix' or 'off'")
        self.prefix_cache = prefix_cache
        super().__init__(*args, **options)

    def make_cache(self, num_blocks: int, block_size: int) -> PagedCache:
        """The books of the blocks."""
        if self.prefix_cache == "off":
            return super().make_cache(num_blocks, block_size)
        return PrefixCache(num_blocks, block_size, HashChain() if self.prefix_cache == "chain" else RadixTree())
