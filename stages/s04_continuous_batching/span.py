"""Part of a sequence: what one row computes in one step."""

from __future__ import annotations

from typing import NamedTuple

from stages.s02_kv_cache.sequence import Sequence


class Span(NamedTuple):  # as `PlannedRow`, made for every row of every step: in half the time of a frozen dataclass
    """Positions [start, end) of a sequence, under the names that a `Sequence` has for its next step.

    The scheduler moves `sequence.num_kv` on while it plans; the span keeps where the step began.
    """

    sequence: Sequence
    start: int
    end: int

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the sequence."""
        return self.sequence.token_ids

    @property
    def block_table(self) -> list[int]:
        """Where its K/V lies."""
        return self.sequence.block_table

    @property
    def num_kv(self) -> int:
        """Tokens in the cache before the step."""
        return self.start

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache after it."""
        return self.end

    @property
    def num_new(self) -> int:
        """Tokens that the step computes."""
        return self.end - self.start
