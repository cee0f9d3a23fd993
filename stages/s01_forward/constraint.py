"""Read later: the seam for structured output: what may come next in one answer. Stage 09 makes such from grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # who only carries it need not import torch
    from torch import Tensor


class Constraint(Protocol):
    """Where one answer stands in what it must follow. It belongs to its `Generation` and goes where that goes.

    error: why nothing is allowed any more, if that is so.
    """

    error: str | None

    def allowed(self) -> Tensor:
        """Which tokens may come next: bool [V], on the CPU."""

    def accept(self, token_id: int) -> bool:
        """Take the answer's next token. True: it is complete, no other token may follow."""

    def after(self, token_ids: Sequence[int]) -> Constraint:
        """What this would be after some more tokens; guesses (stage 08) need not be tokens that are allowed."""
