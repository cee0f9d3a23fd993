"""A sequence: the tokens that are known, how many of them have their K/V in the cache, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class NewTokens(Protocol):
    """What a step needs to know of a sequence: which tokens are new, and where their K/V goes."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_kv(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_new(self) -> int: ...
    @property
    def block_table(self) -> list[int]: ...


@dataclass(eq=False)
class Sequence:
    """All later stages count in the two lengths of this class.

    `num_tokens` are known, the first `num_kv` of them are in the cache, and a step computes positions
    [num_kv, num_tokens). The newest sampled token is known but not yet in the cache.
    """

    token_ids: list[int]
    num_kv: int = 0
    block_table: list[int] = field(default_factory=list)  # the pages or blocks that hold its K/V, in order
    extra_key: tuple[tuple[str, str], ...] = ()  # with whom its K/V may be shared; acts from stage 06 on

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_new(self) -> int:
        """Tokens that the next step computes: the whole prompt at first, then one at a time."""
        return len(self.token_ids) - self.num_kv
