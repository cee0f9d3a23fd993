"""Who owns which page: one page per sequence, as long as a sequence can get. Only counts and ids, no tensors."""

from __future__ import annotations

from typing import Protocol

from stages.s02_kv_cache.sequence import Sequence

BlockCopy = tuple[int, int]  # copy the K/V of this block to that one


class KVCache(Protocol):
    """What a step needs of a cache's books. Stage 03 brings blocks, stage 06 finds blocks that are already filled."""

    def match(self, sequence: Sequence) -> int:
        """Take over K/V that is already there; returns how many tokens need not be computed."""

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Give the sequence room for its first `num_tokens` tokens.

        Returns the copies to make before anything is written, or None, with nothing changed, if there is no room.
        """

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """The K/V of the first `num_tokens` tokens has been written."""

    def release(self, sequence: Sequence) -> None:
        """Give everything back. A sequence that holds nothing may be released again."""


class ContiguousCache:
    """A stack of free pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.free_pages = list(range(num_pages))

    def match(self, sequence: Sequence) -> int:
        """Nothing is ever there before it is computed."""
        return 0

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """A page at first, nothing later: it is as long as the sequence can get, used or not."""
        if num_tokens > self.page_size:
            raise ValueError(f"a sequence of {num_tokens} tokens does not fit a page of {self.page_size}")
        if not sequence.block_table:
            if not self.free_pages:
                return None
            sequence.block_table.append(self.free_pages.pop())
        return []

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Only the sequence's own count changes."""
        sequence.num_kv = num_tokens

    def release(self, sequence: Sequence) -> None:
        """The page is free for anyone; what it holds is stale."""
        self.free_pages.extend(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_kv = 0
