"""The seam of this stage: who guesses what comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s04_continuous_batching.request import Request


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next. `probs` [k, V]: what each was drawn from; None if it was not drawn but looked up."""

    tokens: tuple[int, ...]
    probs: Tensor | None = None


class Proposer(Protocol):
    """Guesses are free to be wrong: they cost time, never a token."""

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        """Guesses for requests that decode, at most so many tokens each; who is left out gets none."""

    def copy_blocks(self, pairs: Sequence[BlockCopy]) -> None:
        """Blocks of the cache were copied, (from, to): so is what the proposer keeps in its own."""

    def forget(self, request: Request) -> None:
        """The request has ended."""
