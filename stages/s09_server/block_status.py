"""For the status page: whose each block of the KV cache is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from stages.s03_paged_kv.block_pool import DUMMY
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.request import Request
from stages.s06_prefix_cache.hash_chain import HashChain
from stages.s06_prefix_cache.prefix_cache import PrefixCache
from stages.s06_prefix_cache.radix_tree import RadixTree

FREE, FINDABLE, SHARED = 0, -1, -2  # a block's owner, if it is not one request
MOST_CELLS = 16_384  # blocks that are told


class BlockStatus(TypedDict):
    """Every block is used, cached (free, and holds a prefix that can be found) or free.

    `owners` has an entry for every `every`-th block: all, unless there are very many. Then `cached` is an estimate.
    """

    total: int
    used: int
    cached: int
    free: int
    every: int
    owners: list[int]


def number_of(request: Request) -> int:
    """What a request is called on the page: from 1 on, since 0 is a free block."""
    return request.id + 1


def block_status(cache: PagedCache, running: Iterable[Request]) -> BlockStatus:
    """Who has which block, the dummy left out. Of a large pool every second, third, ... block is looked at."""
    pool, total = cache.pool, cache.pool.num_blocks - 1
    every = -(-total // MOST_CELLS)
    owners = [FREE if count == 0 else SHARED for count in pool.ref_counts[DUMMY + 1 :: every]]
    for request in running:
        number = number_of(request)
        for block in request.sequence.block_table:
            place, between = divmod(block - DUMMY - 1, every)
            if not between and pool.ref_counts[block] == 1:
                owners[place] = number
    unowned = [DUMMY + 1 + place * every for place, owner in enumerate(owners) if owner == FREE]
    for block in findable(cache, unowned):
        owners[(block - DUMMY - 1) // every] = FINDABLE
    unused = pool.num_free
    cached = min(unused, every * owners.count(FINDABLE))
    return {
        "total": total,
        "used": total - unused,
        "cached": cached,
        "free": unused - cached,
        "every": every,
        "owners": owners,
    }


def findable(cache: PagedCache, blocks: Iterable[int]) -> list[int]:
    """Those that a look-up can come to (stage 06), by what the index knows of each and of the block before it."""
    if not isinstance(cache, PrefixCache):
        return []
    index = cache.index
    if isinstance(index, RadixTree):
        slots = index.by_block
        return [block for block in blocks if (slot := slots.get(block)) and slot.node]
    assert isinstance(index, HashChain)
    entries, is_lost = index.by_block, index.is_lost
    return [block for block in blocks if (entry := entries.get(block)) and not is_lost(entry.parent)]
