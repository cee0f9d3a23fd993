"""The paged cache with a memory: full blocks stay findable after their sequence has gone, until they are needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakSet

from stages.s02_kv_cache.sequence import Sequence
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s06_prefix_cache.hash_chain import ExtraKey, HashChain, TokenBlock
from stages.s06_prefix_cache.lru_pool import LruPool

log = logging.getLogger(__name__)


class PrefixIndex(Protocol):
    """How blocks are found; places are the index's own affair. `HashChain` and `RadixTree` are two."""

    def root(self, extra: ExtraKey) -> Any:
        """The place before the first block."""

    def find(self, parent: Any, tokens: TokenBlock) -> Any | None:
        """The place of the block that follows with these tokens; its `.block` is the block."""

    def prefix(self, root: Any, token_ids: Tokens, block_size: int, most: int) -> list[Any]:
        """The places of the longest known prefix, at most so many: what `find` finds block after block."""

    def put(self, parent: Any, tokens: TokenBlock, block: int) -> tuple[Any | None, bool]:
        """The place of the block with these tokens, and whether it is new: this one, made findable.

        Somebody may have computed the same before, or it is shared. A place of None ends the sequence's publishing.
        """

    def remove(self, block: int) -> Any | None:
        """Forget a block; None if it was not known."""


class KVEvent(NamedTuple):
    """What a router in front of several engines wants to know: who replays all of these knows what can be found.

    A block that is stored again has moved. What follows a block that has moved or was evicted is out of reach.
    """

    kind: Literal["stored", "evicted"]
    block: int
    tokens: TokenBlock
    parent: int | None = None  # stored: the block before it; None: it begins a sequence
    extra: ExtraKey = ()  # stored: of which sequences


class PrefixCache(PagedCache):
    """Only full blocks are found, and never all of a sequence: one token is always left to compute its logits.

    hit_tokens of queried_tokens were found, over all look-ups of new sequences that a step followed. One that comes
    back after a preemption finds what it left behind itself, which says nothing of what sequences share.
    """

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex | None = None) -> None:
        super().__init__(num_blocks, block_size)
        self.pool: LruPool = LruPool(num_blocks, self.evict)
        self.index: PrefixIndex = index or HashChain()
        self.published: dict[Sequence, tuple[int, Any]] = {}  # blocks, and the place; until it is released
        self.looked_up: dict[Sequence, tuple[int, int]] = {}  # tokens asked for, found; until the step after
        self.seen = WeakSet[Sequence]()  # those that had blocks of K/V and gave them back: no more new, if they return
        self.queried_tokens = self.hit_tokens = 0
        self.subscribers: list[Callable[[KVEvent], None]] = []

    def tokens_of(self, sequence: Sequence, number: int) -> TokenBlock:
        """The token ids of a sequence's block."""
        return tuple(sequence.token_ids[number * self.block_size : (number + 1) * self.block_size])

    def match(self, sequence: Sequence) -> int:
        """Take over the blocks that hold the longest known prefix; returns its length in tokens."""
        root, most = self.index.root(sequence.extra_key), (sequence.num_tokens - 1) // self.block_size
        places = self.index.prefix(root, sequence.token_ids, self.block_size, most)
        blocks = [place.block for place in places]
        self.pool.revive(blocks)
        self.published[sequence] = len(blocks), places[-1] if places else root
        sequence.block_table, sequence.num_kv = blocks, len(blocks) * self.block_size
        self.looked_up[sequence] = sequence.num_tokens, sequence.num_kv
        return sequence.num_kv

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """The K/V of the first `num_tokens` tokens has been written: blocks that are now full can be found."""
        super().commit(sequence, num_tokens)
        if sequence in self.looked_up:
            self.count_look_up(sequence)
        count, place = self.published.get(sequence) or (0, self.index.root(sequence.extra_key))
        full = num_tokens // self.block_size
        if full <= count:  # of `block_size` decode steps only one fills a block
            return
        for number in range(count, full):
            if place is None:
                break
            parent, tokens, block = place, self.tokens_of(sequence, number), sequence.block_table[number]
            place, is_new = self.index.put(parent, tokens, block)
            if is_new and self.subscribers:
                self.tell(KVEvent("stored", block, tokens, parent.block, sequence.extra_key))
        self.published[sequence] = full, place

    def count_look_up(self, sequence: Sequence) -> None:
        """A step followed it: a request that has to wait looks again, and counts once."""
        queried, hit = self.looked_up.pop(sequence, (0, 0))
        if sequence not in self.seen:
            self.queried_tokens += queried
            self.hit_tokens += hit

    def release(self, sequence: Sequence) -> None:
        """The blocks are free, and what is in them can still be found."""
        waits = self.looked_up.pop(sequence, None) is not None  # no step followed: it will look again
        if self.published.pop(sequence, None) and not waits:
            self.seen.add(sequence)
        super().release(sequence)

    def evict(self, block: int) -> None:
        """A free block is about to be overwritten."""
        if (lost := self.index.remove(block)) is not None:
            self.tell(KVEvent("evicted", block, lost.tokens))

    def tell(self, event: KVEvent) -> None:
        """Every subscriber hears of it, at once and in order. One that fails hears no more: no answer hangs on it."""
        for subscriber in list(self.subscribers):
            try:
                subscriber(event)
            except Exception:
                log.exception("a subscriber to KV events failed; it is told no more")
                self.subscribers.remove(subscriber)
