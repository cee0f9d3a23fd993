"""A pool whose free blocks keep what they hold until they are needed, the least recently used first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stages.s03_paged_kv.block_pool import BlockPool


class LruPool(BlockPool):
    """`evict(block)` is called just before a free block is handed out to be overwritten."""

    def __init__(self, num_blocks: int, evict: Callable[[int], None]) -> None:
        super().__init__(num_blocks)
        self.evict = evict

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one owner each, those that were free for longest; None if there are not so many."""
        blocks = super().allocate(count)
        for block in blocks or ():
            self.evict(block)
        return blocks

    def revive(self, blocks: Iterable[int]) -> None:
        """One more owner for each block, free or held: its content is what the new owner wants."""
        for block in blocks:
            if not self.ref_counts[block]:
                del self.free[block]
            self.ref_counts[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """As in stage 03. A sequence's last blocks are freed first, so that prefixes outlive what hangs on them."""
        super().give_back(list(blocks)[::-1])
