"""Guessing by looking back: what followed the same few tokens the last time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s04_continuous_batching.request import Request
from stages.s08_speculative.proposer import Draft


@dataclass
class NgramIndex:
    """Where each n-gram of a growing list was last followed by something. One entry per token and length at most."""

    sizes: Sequence[int]  # the longest first
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> place of the token that followed
    seen: int = 0

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in what is new since the last call; a later place replaces an earlier one."""
        for place in range(max(self.seen, 1), len(tokens)):
            for size in self.sizes:
                if size <= place:
                    self.ends[tuple(tokens[place - size : place])] = place
        self.seen = max(self.seen, len(tokens))

    def following(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` tokens that followed the longest n-gram with which the list ends; none if it is new.

        Where fewer did, the list goes round in a circle, and so does the guess: 1 2 1 2 is followed by 1 2 1 2.
        """
        for size in self.sizes:
            if size < len(tokens) and (place := self.ends.get(tuple(tokens[-size:]))) is not None:
                return tuple(islice(cycle(tokens[place : place + count]), count))
        return ()


class NgramProposer:
    """Prompt lookup (Saxena 2023) over prompt and output: summaries, edits and code repeat what is already there."""

    def __init__(self, largest: int = 5, smallest: int = 3) -> None:
        if not 1 <= smallest <= largest:
            raise ValueError(f"n-grams of {smallest} to {largest} tokens; it must be 1 <= smallest <= largest")
        self.sizes = range(largest, smallest - 1, -1)
        self.indexes: dict[Request, NgramIndex] = {}

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        """See `Proposer.propose`."""
        drafts = {}
        for request, count in wanted.items():
            tokens = request.sequence.token_ids
            index = self.indexes.setdefault(request, NgramIndex(self.sizes))
            index.grow(tokens)
            if found := index.following(tokens, count):
                drafts[request] = Draft(found)
        return drafts

    def copy_blocks(self, pairs: Sequence[BlockCopy]) -> None:
        """It keeps no K/V."""

    def forget(self, request: Request) -> None:
        """Drop the request's index."""
        self.indexes.pop(request, None)
