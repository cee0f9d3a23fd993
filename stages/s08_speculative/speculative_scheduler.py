"""Rows that carry guesses: more tokens than are known, of which some may fall."""

from __future__ import annotations

from stages.s01_forward.outputs import SampledToken
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.plan import Plan, PlannedRow
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Step
from stages.s04_continuous_batching.span import Span
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler, complete
from stages.s07_cuda_graph.steady_scheduler import SteadyScheduler


class SpeculativeScheduler(SteadyScheduler):
    """`drafts`: the guesses for the next step, set before it is planned.

    A request with k guesses computes 1 + k tokens: its newest and the guesses. Of these, K/V holds as far as the
    guesses do. The rest is written over by the steps to come; blocks that only it needed go back.
    """

    def __init__(
        self,
        cache: PagedCache,
        swap: SwapSpace,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_chunk: int | None = None,
    ) -> None:
        super().__init__(cache, swap, max_num_seqs, max_num_batched_tokens, max_chunk)
        self.drafts: dict[Request, tuple[int, ...]] = {}
        self.outcomes: list[tuple[Request, int, int]] = []  # request, guesses verified, guesses that stood

    def schedule(self) -> Plan:
        """With guesses, row by row: a group is for steps in which all rows are alike."""
        if not self.drafts:
            return super().schedule()
        self.group = None
        return AheadScheduler.schedule(self)

    def plan_decode(self, request: Request, step: Step) -> bool:
        """Guesses take the long way."""
        return request not in self.drafts and super().plan_decode(request, step)

    def try_row(self, request: Request, count: int, step: Step) -> bool:
        """A row with guesses if there are some and room for them, else without."""
        return self.try_guesses(request, count, step) or super().try_row(request, count, step)

    def try_guesses(self, request: Request, count: int, step: Step) -> bool:
        """Plan the newest token and the guesses after it: as many as could still be tokens of the answer, one of which
        comes anyway. True if planned.

        Guesses never take from others: each running request that has no row yet keeps a token of the step, and a block
        if this row needs new ones. False, with nothing changed: no guess is left, the row has more to compute than its
        newest token or is asked for more (`count`), its answer is complete, or blocks lack.
        """
        sequence = request.sequence
        others = len(self.running) - len(step.rows) - 1
        room = min(request.tokens_left - 1, self.max_num_batched_tokens - step.num_tokens - 1 - others)
        drafts = self.drafts.get(request, ())[: max(room, 0)]
        if not drafts or count != 1 or sequence.num_new != 1 or complete(request):
            return False
        span = Span(sequence, sequence.num_kv, sequence.num_kv + 1 + len(drafts))
        missing = self.cache.blocks_for(span.end) - len(sequence.block_table)
        if missing > 0 and missing + others > self.cache.pool.num_free:
            return False
        copies = self.cache.reserve(sequence, span.end)
        if copies is None:
            return False
        step.copies += copies
        step.rows.append(PlannedRow(request, span, samples=True, drafts=drafts))
        step.num_tokens += span.num_new
        sequence.num_kv = span.end
        return True

    def take(self, row: PlannedRow, token: SampledToken) -> None:
        """A row with guesses has no placeholder: how many tokens come was not known."""
        if row.drafts:
            row.request.sequence.token_ids.append(token.token_id)
        else:
            super().take(row, token)

    def written(self, row: PlannedRow, taken: int) -> int:
        """How many tokens of a row's sequence K/V holds after its step, of which `taken` tokens were handed out.

        With guesses: those before the row, its newest and the guesses that stood, which are `taken` in all, since the
        last one handed out is in no cache yet. Blocks behind them go back (`cache.trim`), and `outcomes` is told.
        """
        if not row.drafts:
            return super().written(row, taken)
        self.outcomes.append((row.request, len(row.drafts), taken - 1))
        sequence = row.request.sequence
        sequence.num_kv = row.span.start + taken
        self.cache.trim(sequence)
        return sequence.num_kv

    def preempt(self, request: Request, step: Step) -> None:
        """Guesses that were planned fall with their row; there is no placeholder of theirs to take back."""
        guessing = any(row.request is request and row.drafts for row in step.rows)
        if guessing:
            step.drop(request)
        super().preempt(request, step)
