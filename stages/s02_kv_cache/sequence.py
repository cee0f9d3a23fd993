"""A sequence: the tokens that are known, how many of them have their K/V in the cache, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Sequence:
    """All later stages count in the two lengths of this class.

    `num_tokens` are known, the first `num_kv` of them are in the cache, and a step computes positions
    [num_kv, num_tokens). The newest sampled token is known but not yet in the cache.
    """

    token_ids: list[int]
    num_kv: int = 0
    block_table: list[int] = field(default_factory=list)  # the pages or blocks that hold its K/V, in order

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_new(self) -> int:
        """Tokens that the next step computes: the whole prompt at first, then one at a time."""
        return self.num_tokens - self.num_kv
