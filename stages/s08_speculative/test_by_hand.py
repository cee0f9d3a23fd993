"""By hand, as in the lesson: which guesses are planned, and what of them counts. No model, and no whole step."""

import pytest

from stages.s01_forward.generation import Generation
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.plan import PlannedRow
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Step
from stages.s04_continuous_batching.span import Span
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s08_speculative.speculative_scheduler import SpeculativeScheduler

GUESSES = (7, 8, 9, 6)


def make(blocks: int = 16, budget: int = 32) -> SpeculativeScheduler:
    """Blocks of 4 tokens, beside the dummy."""
    return SpeculativeScheduler(PagedCache(blocks + 1, 4), SwapSpace(0), 4, budget)


def decoding(scheduler: SpeculativeScheduler, num_kv: int, limit: int = 20) -> Request:
    """A running request with K/V of its prompt of `num_kv` tokens; one token has come and is to be computed."""
    prompt = list(range(100, 100 + num_kv))
    request = Request(len(scheduler.running), Generation(prompt, SamplingParams(), seed=0, token_limit=limit))
    assert scheduler.cache.reserve(request.sequence, num_kv) == []
    scheduler.cache.commit(request.sequence, num_kv)
    request.sequence.token_ids.append(5)
    request.state = "running"
    scheduler.running.append(request)
    return request


class TestTryGuesses:
    def test_the_newest_token_and_the_guesses_behind_it(self):
        scheduler, step = make(), Step()
        request = decoding(scheduler, 12)
        scheduler.drafts = {request: GUESSES}
        assert scheduler.try_guesses(request, 1, step) is True
        (row,) = step.rows
        assert (row.request, row.span.start, row.span.end) == (request, 12, 17)
        assert (row.drafts, row.samples, row.token_ids) == (GUESSES, True, [5, *GUESSES])
        assert (step.num_tokens, step.copies) == (5, [])
        assert (request.sequence.num_kv, len(request.sequence.block_table)) == (17, 5)
        assert request.sequence.token_ids[12:] == [5], "a guess is no token of the answer"

    @pytest.mark.parametrize(("limit", "count"), [(20, 4), (6, 4), (5, 3), (3, 1)])
    def test_no_more_than_the_answer_may_have(self, limit, count):
        """One token is there, and one comes anyway."""
        scheduler, step = make(), Step()
        request = decoding(scheduler, 3, limit)
        scheduler.drafts = {request: GUESSES}
        assert scheduler.try_guesses(request, 1, step)
        assert step.rows[0].drafts == GUESSES[:count]

    @pytest.mark.parametrize(("budget", "counts"), [(32, (4, 4)), (11, (4, 4)), (10, (4, 3)), (8, (4, 1)), (6, (3, 0))])
    def test_everybody_keeps_a_token_of_the_step(self, budget, counts):
        """Three decode, two of them guess; the third is planned last."""
        scheduler, step = make(budget=budget), Step()
        first, second, _ = (decoding(scheduler, 3) for _ in range(3))
        scheduler.drafts = {first: GUESSES, second: GUESSES}
        planned = [scheduler.try_guesses(request, 1, step) for request in (first, second)]
        assert planned == [count > 0 for count in counts]
        assert [len(row.drafts) for row in step.rows] == [count for count in counts if count]
        assert step.num_tokens == sum(1 + count for count in counts if count)

    @pytest.mark.parametrize(("blocks", "planned"), [(4, False), (5, True)])
    def test_everybody_keeps_a_block(self, blocks, planned):
        """Two blocks are held, and two more are needed for the guesses; the other one needs one for its next token."""
        scheduler, step = make(blocks=blocks), Step()
        request, _ = decoding(scheduler, 4), decoding(scheduler, 4)
        scheduler.drafts = {request: GUESSES}
        assert scheduler.try_guesses(request, 1, step) is planned
        assert len(request.sequence.block_table) == (3 if planned else 1)

    def test_guesses_that_need_no_block_ask_for_none(self):
        scheduler, step = make(blocks=4), Step()
        request, _ = decoding(scheduler, 5), decoding(scheduler, 8)
        scheduler.drafts = {request: (7, 8)}
        assert scheduler.cache.pool.num_free == 0
        assert scheduler.try_guesses(request, 1, step)

    def test_a_shared_block_is_copied_first(self):
        scheduler, step = make(), Step()
        request = decoding(scheduler, 6)
        scheduler.cache.fork(request.sequence)
        shared = request.sequence.block_table[1]
        scheduler.drafts = {request: (7,)}
        assert scheduler.try_guesses(request, 1, step)
        assert step.copies == [(shared, request.sequence.block_table[1])]

    @pytest.mark.parametrize("case", ["no guesses", "two to compute", "a chunk of one", "complete", "no block left"])
    def test_where_there_is_no_place_for_guesses(self, case):
        """False, and nothing has changed."""
        scheduler, step = make(blocks=1), Step()
        request = decoding(scheduler, 4 if case == "no block left" else 2, limit=1 if case == "complete" else 20)
        sequence, count = request.sequence, 2 if case == "two to compute" else 1
        scheduler.drafts = {} if case == "no guesses" else {request: (7,)}
        if case in ("two to compute", "a chunk of one"):
            sequence.token_ids.append(6)
        before = sequence.num_kv, list(sequence.token_ids), list(sequence.block_table)
        assert scheduler.try_guesses(request, count, step) is False
        assert (step.rows, step.num_tokens, step.copies) == ([], 0, [])
        assert (sequence.num_kv, sequence.token_ids, sequence.block_table) == before


class TestWritten:
    def verified(self, scheduler: SpeculativeScheduler, drafts: tuple[int, ...]) -> PlannedRow:
        """A row of a request with 13 tokens, of which 12 have K/V, that has just been computed."""
        request = decoding(scheduler, 12)
        span = Span(request.sequence, 12, 13 + len(drafts))
        assert scheduler.cache.reserve(request.sequence, span.end) == []
        request.sequence.num_kv = span.end
        return PlannedRow(request, span, samples=True, drafts=drafts)

    @pytest.mark.parametrize(
        ("stood", "num_kv", "blocks"), [(0, 13, 4), (1, 14, 4), (2, 15, 4), (3, 16, 5), (4, 17, 5)]
    )
    def test_what_stood_counts(self, stood, num_kv, blocks):
        """The newest token, and the guesses that stood; blocks for these and the next token stay."""
        scheduler = make()
        row = self.verified(scheduler, GUESSES)
        assert (len(row.request.sequence.block_table), scheduler.cache.pool.num_free) == (5, 11)
        assert scheduler.written(row, stood + 1) == num_kv
        assert row.request.sequence.num_kv == num_kv
        assert (len(row.request.sequence.block_table), scheduler.cache.pool.num_free) == (blocks, 16 - blocks)
        assert scheduler.outcomes == [(row.request, 4, stood)]

    def test_a_row_without_guesses_is_as_before(self):
        scheduler = make()
        row = self.verified(scheduler, ())
        assert scheduler.written(row, 1) == 13
        assert (row.request.sequence.num_kv, scheduler.outcomes) == (13, [])
