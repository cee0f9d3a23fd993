"""`python -m stages.s08_speculative.fuzz_speculative`: random loads on an engine that guesses, rightly or absurdly.

The worlds are those of stage 07: small pools, prompts that begin alike, swapping, preemption, aborts, steps that fail,
and overlap whenever nobody guesses. The runner verifies guesses against the marks that K/V is made of; what each answer
must be is known from a single run without guesses.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Engine
from stages.s04_continuous_batching.fake_runner import (
    EOS,
    VOCAB,
    Block,
    FakeRunner,
    choose,
    copy,
    first_mark,
    mark_after,
    single_run,
)
from stages.s04_continuous_batching.fuzz_scheduler import main
from stages.s04_continuous_batching.plan import Handle, Plan, PlannedRow, RowResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.span import Span
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s07_cuda_graph.ahead_scheduler import PENDING
from stages.s07_cuda_graph.fuzz_ahead import AheadFuzz, Late, LateRunner
from stages.s08_speculative.acceptance import matching
from stages.s08_speculative.draft_model import DraftModelProposer
from stages.s08_speculative.ngram import NgramProposer
from stages.s08_speculative.pace import Pace, Record
from stages.s08_speculative.proposer import Draft, Proposer
from stages.s08_speculative.speculative_engine import SpeculativeEngine
from stages.s08_speculative.speculative_scheduler import SpeculativeScheduler


def marks_after(request: Request, token_ids: Sequence[int]) -> list[int]:
    """The mark of each token's K/V."""
    marks = [first_mark(request)]
    for token_id in token_ids:
        marks.append(mark_after(marks[-1], token_id))
    return marks[1:]


class VerifyingRunner(LateRunner):
    """Writes K/V of guesses as it is told to, and answers with those that stand and one token more."""

    vocab_size = VOCAB

    def __init__(self, *args: Any, most: int) -> None:
        super().__init__(*args)
        self.most, self.probs = most, dict[Request, Any]()
        self.beyond: dict[Request, int] = {}  # tokens of its last row that nobody will be told

    def execute(self, plan: Plan) -> Handle:
        handle = cast(Late, super().execute(plan))
        for row, given in zip(plan.rows, handle.result.rows, strict=True):
            if row.drafts and handle.fails:
                self.beyond[row.request] = len(given.tokens)
        return handle

    def marks_with(self, row: PlannedRow) -> list[int]:
        return marks_after(row.request, [*self.tokens_of(row.request), *row.drafts])

    def write(self, row: PlannedRow) -> None:
        if not row.drafts:
            return super().write(row)
        tokens, span, marks, size = self.tokens_of(row.request), row.span, self.marks_with(row), self.block_size
        assert (row.token_ids, span.start) == ([tokens[-1], *row.drafts], len(tokens) - 1)
        for position in range(span.start, span.end):
            self.device[span.block_table[position // size]][position % size] = marks[position]

    def result(self, row: PlannedRow) -> RowResult:
        if not row.drafts:
            return super().result(row)
        span, generation, marks = row.span, row.request.generation, self.marks_with(row)
        stored = [mark for block in span.block_table for mark in self.device[block]][: span.end]
        assert stored == marks, f"request {row.request.id} reads K/V that is not its own"
        sampled = [choose(mark, generation) for mark in marks[span.start :]]
        given = sampled[: matching(row.drafts, [token.token_id for token in sampled]) + 1]
        ends = [place for place, token in enumerate(given) if token.token_id == EOS]
        self.beyond[row.request] = len(given) - 1 - ends[0] if ends else 0
        return RowResult(tuple(given))


class Knowing:
    """Knows what comes; `kind` says what it makes of it."""

    kinds = ("right", "wrong", "mixed", "too long", "foreign", "strangers")

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.rng, self.kind = rng, kind

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        drafts = {request: self.draft(request, count) for request, count in wanted.items() if self.rng.random() < 0.9}
        if self.kind == "strangers":  # who did not ask
            drafts[Request(-1, next(iter(wanted)).generation)] = Draft((1, 2))
        return drafts

    def draft(self, request: Request, count: int) -> Draft:
        rng, known = self.rng, len(request.generation.token_ids)
        coming = single_run(request)[0][known : known + count]
        if self.kind == "too long":
            coming = single_run(request)[0][known:] + [rng.randrange(VOCAB) for _ in range(9)]
        wrong = {"right": 0.0, "wrong": 1.0}.get(self.kind, 0.3)
        tokens = [token if rng.random() >= wrong else (token + 1) % VOCAB for token in coming]
        if self.kind == "foreign":
            tokens.insert(rng.randint(0, len(tokens)), rng.choice((-1, PENDING, VOCAB, 2**40)))
        return Draft(tuple(tokens[: len(tokens) if self.kind == "too long" else count]))

    def copy_blocks(self, pairs: Sequence[BlockCopy]) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


class MarkDraft(DraftModelProposer):
    """The draft model's books with marks in the place of K/V: what it reads must be what it would compute anew."""

    def __init__(self, cache: PagedCache, wrong: float, rng: random.Random) -> None:
        absent: Any = None
        super().__init__(absent, absent, absent, absent, cache, drawn=False)
        self.device: list[Block] = [[None] * cache.block_size for _ in range(cache.pool.num_blocks)]
        self.wrong, self.rng = wrong, rng

    def logits(self, requests: Sequence[Request], guesses: Mapping[Request, list[int]]) -> Any:
        chunks = [self.chunk(request, guesses[request]) for request in requests]
        for request, chunk in zip(requests, chunks, strict=True):
            self.compute(request, chunk)
            count = min(request.sequence.num_tokens, chunk.num_tokens)
            self.read[request] = request.num_preemptions, count, chunk.token_ids[count : chunk.num_tokens]
        return [marks_after(request, chunk.token_ids)[-1] for request, chunk in zip(requests, chunks, strict=True)]

    def compute(self, request: Request, chunk: Span) -> None:
        marks, size, table = marks_after(request, chunk.token_ids), self.cache.block_size, chunk.block_table
        for position in range(chunk.num_kv, chunk.num_tokens):
            self.device[table[position // size]][position % size] = marks[position]
        stored = [mark for block in table for mark in self.device[block]][: chunk.num_tokens]
        assert stored == marks, "the draft model reads K/V that is not its own"

    def choose(self, marks: Any, requests: Sequence[Request], guesses: Mapping[Request, list[int]]) -> Any:
        chosen = [max(choose(mark, r.generation).token_id, 0) for mark, r in zip(marks, requests, strict=True)]
        tokens = [t if self.rng.random() >= self.wrong else (t + 1) % VOCAB for t in chosen]
        return tokens, tokens

    def copy_blocks(self, pairs: Sequence[BlockCopy]) -> None:
        copy(tuple(pairs), self.device, self.device)


class QuickPace(Pace):
    """Pauses short enough for small worlds."""

    def record(self, request: Request) -> Record:
        return self.records.setdefault(request, Record(pause=2))


class SpeculativeFuzz(AheadFuzz):
    """What changes: rows that carry guesses give one token or more."""

    engine: SpeculativeEngine
    runner: VerifyingRunner

    def begin(self) -> None:
        """Most worlds have time between two arrivals: while somebody waits for a row that is free, nobody guesses."""
        super().begin()
        self.arrivals = self.rng.choice((0.02, 0.05, 0.1, self.arrivals))

    def make_scheduler(self, cache: PagedCache, swap: SwapSpace, max_num_seqs: int, budget: int) -> Scheduler:
        self.max_chunk = self.rng.choice((None, None, 1, 2, self.rng.randint(1, budget)))
        return SpeculativeScheduler(cache, swap, max_num_seqs, budget, self.max_chunk)

    def make_proposer(self) -> Proposer:
        rng = self.rng
        kind = rng.choice((*Knowing.kinds, "ngram", "draft model", "draft model"))
        if kind == "ngram":
            return NgramProposer(largest=rng.randint(2, 4), smallest=rng.randint(1, 2))
        if kind == "draft model":
            return MarkDraft(self.cache, rng.choice((0.0, 0.2, 0.6)), rng)
        return Knowing(rng, kind)

    def make_engine(self, num_host_blocks: int) -> tuple[FakeRunner, Engine]:
        rng = self.rng
        runner = VerifyingRunner(self.cache, num_host_blocks, self.check_plan, most=rng.randint(1, 6))
        self.host_bound = rng.random() < 0.3
        pace = QuickPace(rng.choice((1, 3, 16, 16)), rng.choice((0.0, 0.3, 0.8)))
        scheduler = cast(SpeculativeScheduler, self.scheduler)
        return runner, SpeculativeEngine(scheduler, runner, self.make_proposer(), pace, rng.choice((0, 1, 1, 1)))  # type: ignore[arg-type]

    def check_plan(self, plan: Plan) -> None:
        """With the guesses taken for tokens, all is as without; and no guess is made beside a prompt."""
        guessing, most = [row for row in plan.rows if row.drafts], self.runner.most
        if guessing:
            assert all(row.samples and row.request.generation.token_limit for row in plan.rows)
            assert all(len(row.drafts) == row.span.num_new - 1 <= most for row in plan.rows)
            assert len(plan.rows) <= self.engine.pace.max_rows and not self.engine.under_way
        for row in guessing:
            generation = row.request.generation
            assert len(generation.token_ids) + 1 + len(row.drafts) <= generation.token_limit, "guesses beyond the cap"
            row.span.token_ids.extend((*row.drafts, PENDING))
        cap = self.max_chunk
        if guessing and cap:  # a cap on what one prompt may take of a step
            self.max_chunk = max(cap, 1 + most)
        super().check_plan(plan)
        self.max_chunk = cap
        for row in guessing:
            del row.span.token_ids[-1 - len(row.drafts) :]
            self.done["row with guesses"] += 1
            self.done["guess"] += len(row.drafts)
        self.done["guesses beside rows without"] += 0 < len(guessing) < len(plan.rows)

    def step(self) -> None:
        stood = self.engine.stats.accepted
        super().step()
        engine, cache = self.engine, self.cache
        self.done["guess that stood"] += engine.stats.accepted - stood
        self.done["pause"] += any(record.resumes for record in engine.pace.records.values())
        for row in self.runner.plans[-1].rows if self.runner.plans else ():
            sequence = row.request.sequence
            if row.drafts and row.request.state == "running":  # what only guesses needed has been given back
                assert len(sequence.block_table) <= cache.blocks_for(sequence.num_kv + 1)
        kept: Any = engine.proposer
        for books in (engine.pace.records, getattr(kept, "read", {}), getattr(kept, "indexes", {})):
            assert {request for request in books if request.state == "finished"} == set(), "who has ended is kept"

    def end(self, request: Request, aborted: bool = False) -> None:
        """Tokens that came after the end of an answer, in the same row, were never told."""
        made, beyond = self.runner.made.get(request, []), self.runner.beyond.pop(request, 0)
        del made[len(made) - beyond :]
        super().end(request, aborted)

    def drain(self) -> None:
        super().drain()
        stats = self.engine.stats
        assert stats.drafted == sum(stats.drafted_at) >= stats.accepted == sum(stats.accepted_at)
        for places in (stats.drafted_at, stats.accepted_at):
            assert places == sorted(places, reverse=True)


if __name__ == "__main__":
    main(SpeculativeFuzz)
