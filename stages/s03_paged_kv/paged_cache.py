"""Which blocks hold which tokens of which sequence: the books of the paged cache. Counts and ids, no tensors."""

from __future__ import annotations

from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s02_kv_cache.sequence import Sequence
from stages.s03_paged_kv.block_pool import BlockPool


class PagedCache:
    """A sequence gets blocks of `block_size` tokens as it grows (PagedAttention, Kwon et al. 2023).

    Token i of a sequence lies in slot i % block_size of block `block_table[i // block_size]`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool, self.block_size = BlockPool(num_blocks), block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def match(self, sequence: Sequence) -> int:
        """Nothing is looked for: each sequence computes its own K/V, unless it was forked."""
        return 0

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Room for the first `num_tokens` tokens; see `KVCache.reserve`.

        The tokens from `num_kv` on are about to be written. The block where that begins may be half full and shared
        since a fork: then the sequence gets its own copy (copy-on-write). Blocks after it are always its own.
        """
        table = sequence.block_table
        first = sequence.num_kv // self.block_size  # the block that is written first
        copies = first < len(table) and num_tokens > sequence.num_kv and self.pool.is_shared(table[first])
        missing = max(0, self.blocks_for(num_tokens) - len(table)) + copies
        if missing == 0:  # of `block_size` decode steps only one begins a block
            return []
        new = self.pool.allocate(missing)
        if new is None:
            return None
        pairs = []
        if copies:
            pairs.append((table[first], new[0]))
            self.pool.give_back([table[first]])
            table[first] = new.pop(0)
        table.extend(new)
        return pairs

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """The K/V of the first `num_tokens` tokens has been written; more may be planned already (stage 07)."""
        if num_tokens > sequence.num_kv:  # `max` is a call more, for every row of every step
            sequence.num_kv = num_tokens

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks behind the one that the next token goes to; what was written there is not wanted."""
        needed = self.blocks_for(sequence.num_kv + 1)
        unwanted, sequence.block_table[needed:] = sequence.block_table[needed:], []
        self.pool.give_back(unwanted)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens that shares all K/V until one of the two writes to a shared block."""
        twin = Sequence(list(sequence.token_ids), extra_key=sequence.extra_key)
        self.fork_prefix(sequence, twin, sequence.num_kv)
        return twin

    def fork_prefix(self, source: Sequence, sequence: Sequence, num_tokens: int) -> None:
        """Let a sequence that holds nothing yet share the first `num_tokens` tokens of another."""
        shared = source.block_table[: self.blocks_for(num_tokens)]
        self.pool.share(shared)
        sequence.block_table, sequence.num_kv = shared, num_tokens

    def release(self, sequence: Sequence) -> None:
        """The sequence owns nothing any more; blocks that a fork still uses stay."""
        blocks, sequence.block_table = sequence.block_table, []
        sequence.num_kv = 0
        self.pool.give_back(blocks)
