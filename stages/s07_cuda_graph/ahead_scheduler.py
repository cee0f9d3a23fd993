"""Plans a step before the tokens of the step before it are known."""

from __future__ import annotations

from stages.s01_forward.outputs import SampledToken
from stages.s04_continuous_batching.plan import PlannedRow
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Step
from stages.s05_chunked_prefill.scheduler import ChunkedScheduler

PENDING = -1  # stands at the end of a sequence for a token that has been planned and is not known yet


class AheadScheduler(ChunkedScheduler):
    """What a step computes depends on lengths alone, and a step makes a decode row one token longer whatever the token.

    So a row that samples gets a placeholder at once, with which the next step can be planned; `update` puts the token
    in its place. Only an end that nobody could foresee (EOS, a stop string, an abort) comes a step too late: its row
    in the step that is already under way is computed in vain.
    """

    def share_of(self, request: Request, step: Step) -> int:
        """Nothing for a request whose last token is on its way."""
        return 0 if complete(request) else super().share_of(request, step)

    def plan_decode(self, request: Request, step: Step) -> bool:
        """The short way for a plain decode row."""
        planned = not complete(request) and super().plan_decode(request, step)
        return planned and self.await_token(step.rows[-1])

    def try_row(self, request: Request, count: int, step: Step) -> bool:
        """Plan a row; if it samples, its token is pending from now on."""
        return super().try_row(request, count, step) and self.await_token(step.rows[-1])

    def await_token(self, row: PlannedRow) -> bool:
        """A placeholder for the token of a planned row, if it gives one. True."""
        if gives_token(row):
            row.span.token_ids.append(PENDING)
        return True

    def take(self, row: PlannedRow, token: SampledToken) -> None:
        """The token of a row takes its place."""
        row.span.sequence.token_ids[row.span.end] = token.token_id

    def preempt(self, request: Request, step: Step) -> None:
        """A row of this step that is taken back will not sample."""
        if any(row.request is request and gives_token(row) for row in step.rows):
            request.sequence.token_ids.pop()
        super().preempt(request, step)


def gives_token(row: PlannedRow) -> bool:
    """Will a row's step give a token? A request that only asks for scores never gets one."""
    return row.samples and row.request.generation.token_limit > 0


def complete(request: Request) -> bool:
    """Are all tokens that it may generate known or pending?"""
    return request.generation.token_limit > 0 and request.tokens_left <= 0
