"""For pictures: which block belongs to whom, and how full it is, as `reference.draw.kv_blocks` wants it."""

from __future__ import annotations

from collections.abc import Mapping

from stages.s02_kv_cache.sequence import Sequence
from stages.s03_paged_kv.paged_cache import PagedCache


def block_map(cache: PagedCache, sequences: Mapping[str, Sequence]) -> tuple[list[str | None], list[int]]:
    """Per block of the pool: the names of its owners, such as "A" or "A, B" (None: free), and slots that hold a token.

    `sequences` are all that live in the cache, by name.
    """
    owners: list[list[str]] = [[] for _ in range(cache.pool.num_blocks)]
    used = [0] * cache.pool.num_blocks
    for name, sequence in sequences.items():
        for place, block in enumerate(sequence.block_table):
            owners[block].append(name)
            here = min(cache.block_size, max(0, sequence.num_kv - place * cache.block_size))
            used[block] = max(used[block], here)
    return [", ".join(names) or None for names in owners], used
