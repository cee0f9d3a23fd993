"""The loop with guesses: propose, verify, keep what stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from stages.s04_continuous_batching.engine import Events
from stages.s04_continuous_batching.plan import Plan
from stages.s04_continuous_batching.request import Request
from stages.s07_cuda_graph.overlap_engine import OverlapEngine
from stages.s08_speculative.pace import NO_GUESS, Pace
from stages.s08_speculative.proposer import Draft, Proposer
from stages.s08_speculative.speculative_runner import SpeculativeRunner
from stages.s08_speculative.speculative_scheduler import SpeculativeScheduler


@dataclass
class SpeculationStats:
    """Counts since the start. Only guesses that stood are accepted: the token that follows them is the model's own."""

    drafted: int = 0
    accepted: int = 0
    rows: int = 0  # that carried guesses
    drafted_at: list[int] = field(default_factory=list)  # by place in the row
    accepted_at: list[int] = field(default_factory=list)

    def note(self, drafted: int, accepted: int) -> None:
        """One row."""
        self.rows += 1
        self.drafted += drafted
        self.accepted += accepted
        while len(self.drafted_at) < drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for place in range(drafted):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < accepted

    @property
    def acceptance_rate(self) -> float:
        """Accepted of all drafted; 0 before the first."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens of a row with guesses: 1 and what stood."""
        return 1 + self.accepted / self.rows if self.rows else 1.0


class SpeculativeEngine(OverlapEngine):
    """While anybody guesses, steps go one after the other: the next guesses hang on the tokens of this step.

    No guesses are made in steps that also compute prompts, or may: such a step is bound by arithmetic already.
    """

    scheduler: SpeculativeScheduler
    runner: SpeculativeRunner

    def __init__(
        self, scheduler: SpeculativeScheduler, runner: SpeculativeRunner, proposer: Proposer, pace: Pace, ahead: int = 1
    ) -> None:
        super().__init__(scheduler, runner, ahead)
        self.proposer, self.pace = proposer, pace
        self.stats = SpeculationStats()

    def lag(self) -> int:
        """None while somebody is about to guess."""
        lag = super().lag()
        return 0 if self.guessers() else lag

    def guessers(self) -> dict[Request, int]:
        """Who should guess now, and how many tokens at most; nobody unless all that run decode."""
        scheduler, most = self.scheduler, self.runner.most
        if scheduler.waiting and len(scheduler.running) < scheduler.max_num_seqs:
            return {}
        if len(scheduler.running) > self.pace.max_rows or not all(decodes(request) for request in scheduler.running):
            return {}
        ready = self.pace.ready(request for request in scheduler.running if request.tokens_left > 1)
        return {request: min(most, request.tokens_left - 1) for request in ready}

    def plan(self) -> Plan:
        """Ask for guesses, then plan."""
        scheduler, self.runner.probs = self.scheduler, {}
        scheduler.drafts = {}
        guessers = {} if self.under_way else self.guessers()
        drafts = self.proposer.propose(guessers) if guessers else {}
        for request, most in guessers.items():
            draft = drafts.get(request, Draft(()))
            if tokens := usable(draft.tokens, most, self.runner.vocab_size):
                scheduler.drafts[request] = tokens
                if draft.probs is not None:
                    self.runner.probs[request] = draft.probs
            else:
                self.pace.note(request, 1, 0, weight=NO_GUESS)
        plan = super().plan()
        self.proposer.copy_blocks(plan.copies)
        return plan

    def read(self, lag: int, events: Events) -> None:
        """As before; then what became of the guesses, and who has ended. A step with guesses is never left unread."""
        guessed = any(plan.has_drafts for plan, _ in self.under_way)
        super().read(0 if guessed else lag, events)
        for request, drafted, accepted in self.scheduler.outcomes:
            self.stats.note(drafted, accepted)
            self.pace.note(request, drafted, accepted)
        self.scheduler.outcomes.clear()
        for request, event in events:
            if event.finish_reason is not None:
                self.forget(request)

    def abort(self, request: Request) -> None:
        """As before."""
        super().abort(request)
        self.forget(request)

    def fail(self, plan: Plan, error: str) -> Events:
        """As before."""
        events = super().fail(plan, error)
        for request, _ in events:
            self.forget(request)
        return events

    def forget(self, request: Request) -> None:
        """Nothing is kept of a request that has ended."""
        self.pace.forget(request)
        self.proposer.forget(request)


def decodes(request: Request) -> bool:
    """Has a running request computed its prompt, and all its tokens but the newest?"""
    return request.sequence.num_new <= 1 and request.sequence.num_kv >= request.prompt_len


def usable(tokens: Sequence[int], most: int, vocab_size: int) -> tuple[int, ...]:
    """Of a proposer's guesses, as many as it was asked for, up to the first that is no token of the model."""
    return tuple(takewhile(lambda token: 0 <= token < vocab_size, tokens[:most]))
