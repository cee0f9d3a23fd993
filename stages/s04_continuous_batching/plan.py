"""What one step computes, and what came of it: frozen data between the scheduler and the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stages.s01_forward.outputs import SampledToken, TokenLogprob
from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.span import Span


class PlannedRow(NamedTuple):
    """What one request computes. It samples only if the span ends with its last known token."""

    request: Request
    span: Span
    samples: bool
    drafts: tuple[int, ...] = ()  # guesses at the end of the span, to be verified (stage 08)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens that are computed, the guesses included."""
        return [*self.span.token_ids[self.span.start : self.span.end - len(self.drafts)], *self.drafts]


@dataclass(frozen=True)
class Plan:
    """Blocks move in the order of the fields below, then comes one forward pass over all rows."""

    rows: Sequence[PlannedRow]
    swap_out: tuple[BlockCopy, ...] = ()  # device block -> host block
    swap_in: tuple[BlockCopy, ...] = ()  # host block -> device block
    copies: tuple[BlockCopy, ...] = ()  # within the device: copy-on-write

    @property
    def num_tokens(self) -> int:
        """T of the forward pass."""
        return sum(row.span.num_new for row in self.rows)

    @property
    def has_drafts(self) -> bool:
        """Does any row carry guesses (stage 08)?"""
        return any(row.drafts for row in self.rows)


class RowResult(NamedTuple):
    """What one row gave: one token, several (stage 08), or none if it has more of its prompt to compute."""

    tokens: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt tokens after those computed here
    error: str | None = None  # the row's request cannot go on


@dataclass(frozen=True)
class StepResult:
    """One result per row of the plan, in its order."""

    rows: Sequence[RowResult]


@dataclass(frozen=True)
class Handle:
    """A step that was started. Here it is done already; from stage 07 on it may still be under way."""

    result: StepResult

    def wait(self) -> StepResult:
        """The step's result; returns when it is there."""
        return self.result
