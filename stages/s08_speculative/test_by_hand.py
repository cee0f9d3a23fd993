"""By hand, as in the lesson: which guesses are planned, what of them counts, what the device is told. No whole step."""

import pytest
import torch

from stages.s01_forward.generation import Generation
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.plan import Plan, PlannedRow
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Step
from stages.s04_continuous_batching.span import Span
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s07_cuda_graph.device_state import DeviceState
from stages.s08_speculative.guess_slots import GuessSlots
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


class TestGuessSlots:
    """Blocks of 4, three slots of four blocks; a request has computed its prompt of 3 and makes two guesses."""

    def setup_method(self):
        self.state = DeviceState(3, 4, 32, torch.device("cpu"))
        self.slots = GuessSlots(self.state, 4)
        self.request = Request(1, Generation([5, 6, 7], SamplingParams(), seed=1, token_limit=9))
        self.request.state, self.request.sequence.block_table = "running", [3]
        self.follow(0, 3)
        self.request.sequence.token_ids.append(8)
        self.request.sequence.block_table.append(4)
        self.slot = self.follow(3, 6, drafts=(21, 22))
        self.state.length[self.slot], self.state.last_token[self.slot] = 6, 23  # the device has counted both

    def follow(self, start, end, drafts=()) -> int:
        """The slot; what is sent arrives at once. A step's own work on the device is not done."""
        row = PlannedRow(self.request, Span(self.request.sequence, start, end), samples=True, drafts=drafts)
        (slot,) = self.slots.follow(Plan((row,)))
        where, what = self.state.take_edits()
        self.sent = len(where)
        self.state.flat[torch.from_numpy(where).long()] = torch.from_numpy(what)
        return slot

    def told(self) -> tuple[int, int, list[int]]:
        """Length, newest token and block table, as the device knows them."""
        newest, table = self.state.last_token[self.slot], self.state.block_tables[self.slot, :2]
        return int(self.state.length[self.slot]), int(newest), table.tolist()

    def test_all_fell(self):
        """The second block was given back for another."""
        self.request.sequence.token_ids.append(9)
        self.request.sequence.block_table[1] = 6
        assert self.follow(4, 5) == self.slot
        assert self.told() == (4, 9, [3, 6])

    def test_one_stood_and_others_are_made(self):
        self.request.sequence.token_ids += [21, 9]
        self.follow(5, 7, drafts=(11,))
        assert self.told()[::2] == (5, [3, 4])
        self.state.length[self.slot] = 7
        self.request.sequence.token_ids.append(12)
        self.follow(6, 7)
        assert self.told() == (6, 12, [3, 4])

    def test_afterwards_it_is_as_without(self):
        """Nothing is sent that the device knows."""
        self.request.sequence.token_ids.append(9)
        self.follow(4, 5)
        self.request.sequence.token_ids.append(-1)
        self.follow(5, 6)
        assert self.sent == 0

    def test_who_comes_back_is_told_anew(self):
        """Preempted after its guesses: its next row begins with the prompt."""
        self.request.num_preemptions, self.request.sequence.block_table = 1, [7, 8]
        self.follow(0, 4)
        assert self.told()[::2] == (0, [7, 8])

    def test_nothing_is_kept_of_who_has_ended(self):
        self.request.state = "finished"
        self.slots.follow(Plan(()))
        assert not self.slots.guessed and not self.slots.seats
