"""Rows that carry guesses, by hand: limits, blocks that are taken and given back, and who comes first. No model."""

import pytest

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import SampledToken
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.plan import Plan, RowResult, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Step
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s06_prefix_cache.hash_chain import HashChain
from stages.s06_prefix_cache.prefix_cache import PrefixCache
from stages.s07_cuda_graph.ahead_scheduler import PENDING
from stages.s08_speculative.fuzz_speculative import SpeculativeFuzz
from stages.s08_speculative.speculative_scheduler import SpeculativeScheduler

EOS = 2


def ask(number: int, length: int, limit: int = 20, **keys) -> Request:
    """Prompt 10 * number, 10 * number + 1 .."""
    prompt = list(range(10 * number, 10 * number + length))
    params = SamplingParams(max_tokens=limit, **keys)
    return Request(number, Generation(prompt, params, seed=0, token_limit=limit, eos_token_ids=[EOS]))


def make(
    blocks: int = 16, *, rows: int = 4, budget: int = 16, swap: int = 0, cached: bool = False
) -> SpeculativeScheduler:
    """Blocks of 4 tokens."""
    cache = PrefixCache(blocks + 1, 4, HashChain()) if cached else PagedCache(blocks + 1, 4)
    return SpeculativeScheduler(cache, SwapSpace(swap), rows, budget)


def started(scheduler: SpeculativeScheduler, *requests: Request) -> None:
    """Their prompts are computed, and each has one token: its number and 5."""
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    assert [row.request for row in plan.rows] == list(requests)
    give(scheduler, plan, *([10 * request.id + 5] for request in requests))


def guess(scheduler: SpeculativeScheduler, drafts: dict[Request, tuple[int, ...]]) -> Plan:
    scheduler.drafts = drafts
    plan = scheduler.schedule()
    scheduler.drafts = {}
    return plan


def give(scheduler: SpeculativeScheduler, plan: Plan, *rows: list[int]) -> list[tuple[int, int, str | None]]:
    """Tell a step's tokens, one list per row; the events."""
    results = tuple(RowResult(tuple(SampledToken(token) for token in tokens)) for tokens in rows)
    events = scheduler.update(plan, StepResult(results))
    return [(request.id, event.token_id, event.finish_reason) for request, event in events]


def rows_of(plan: Plan) -> list[tuple[int, int, int, tuple[int, ...]]]:
    return [(row.request.id, row.span.start, row.span.num_new, row.drafts) for row in plan.rows]


def test_random_loads():
    """10,000 steps; a million by the module's own command."""
    done = SpeculativeFuzz(seed=8).run(10_000)
    assert done["step"] >= 10_000
    for kind in ("row with guesses", "guess that stood", "guesses beside rows without", "pause", "step ahead"):
        assert done[kind] > 50, kind
    for kind in ("failed step", "abort", "preemption", "swap in", "copy", "hit token", "mixed step", "stop", "error"):
        assert done[kind] > 10, kind


def test_a_row_computes_its_newest_token_and_the_guesses():
    scheduler, a = make(), ask(1, 3)
    started(scheduler, a)
    plan = guess(scheduler, {a: (7, 8, 9)})
    (row,) = plan.rows
    assert rows_of(plan) == [(1, 3, 4, (7, 8, 9))]
    assert (row.token_ids, row.samples, plan.num_tokens) == ([15, 7, 8, 9], True, 4)
    assert a.sequence.token_ids == [10, 11, 12, 15], "guesses are no tokens, and nothing is pending"
    assert a.sequence.num_kv == 7


@pytest.mark.parametrize("stood", range(5))
def test_what_stands_and_what_falls(stood):
    """Of 4 guesses some stand, and one token comes after: K/V holds to the last guess that stood."""
    scheduler, a = make(), ask(1, 3)
    started(scheduler, a)
    plan = guess(scheduler, {a: (7, 8, 9, 6)})
    assert len(a.sequence.block_table) == 2
    told = [*(7, 8, 9, 6)[:stood], 30]
    assert give(scheduler, plan, told) == [(1, token, None) for token in told]
    assert a.sequence.token_ids == [10, 11, 12, 15, *told]
    assert (a.sequence.num_kv, a.sequence.num_new) == (4 + stood, 1)
    assert len(a.sequence.block_table) == 2, "the next token goes to position 4 or later"
    assert scheduler.outcomes == [(a, 4, stood)]
    assert rows_of(scheduler.schedule()) == [(1, 4 + stood, 1, ())]
    assert a.sequence.token_ids[-1] == PENDING


def test_blocks_that_only_guesses_needed_go_back():
    scheduler, a = make(blocks=6), ask(1, 3)
    started(scheduler, a)
    pool, before = scheduler.cache.pool, list(a.sequence.block_table)
    plan = guess(scheduler, {a: tuple(range(60, 73))})
    assert (len(a.sequence.block_table), pool.num_free) == (5, 1)
    give(scheduler, plan, [30])
    assert (len(a.sequence.block_table), pool.num_free) == (2, 4)
    assert a.sequence.block_table[0] == before[0]
    pool.check()


@pytest.mark.parametrize(("limit", "expected"), [(1, None), (2, 0), (3, 1), (4, 2), (9, 5)])
def test_no_guess_beyond_the_cap(limit, expected):
    """One token is told; the last comes after all guesses."""
    scheduler, a = make(), ask(1, 3, limit)
    scheduler.add(a)
    events = give(scheduler, scheduler.schedule(), [15])
    if expected is None:
        assert events == [(1, 15, "length")]
        return
    plan = guess(scheduler, {a: (7, 8, 9, 6, 5)})
    assert len(plan.rows[0].drafts) == expected
    told = [*plan.rows[0].drafts, 30]
    events = give(scheduler, plan, told)
    assert events[-1] == (1, 30, "length" if len(told) + 1 == limit else None)


def test_tokens_behind_an_end_are_not_told():
    """Neither to the reader nor to the sequence; the cache keeps nothing of them."""
    scheduler, a = make(cached=True), ask(1, 6)
    started(scheduler, a)
    stored = []
    scheduler.cache.subscribers.append(stored.append)
    plan = guess(scheduler, {a: (7, EOS, 9, 6)})
    assert give(scheduler, plan, [7, EOS, 9, 6, 30]) == [(1, 7, None), (1, EOS, "stop")]
    assert a.generation.token_ids == [15, 7, EOS]
    assert scheduler.outcomes == [(a, 4, 1)]
    assert [event.tokens for event in stored] == [(14, 15, 15, 7)]
    assert scheduler.cache.pool.num_free == 16
    assert not scheduler.has_work


def test_published_blocks_hold_accepted_tokens_only():
    """Two blocks are full of guesses; of these the second fell, and what comes instead is published later."""
    scheduler, a = make(cached=True), ask(1, 3)
    stored = []
    scheduler.cache.subscribers.append(stored.append)
    started(scheduler, a)
    plan = guess(scheduler, {a: (7, 8, 9, 6, 5, 4, 3, 1)})
    assert stored == []
    give(scheduler, plan, [7, 8, 30])
    assert [event.tokens for event in stored] == [(10, 11, 12, 15)]
    plan = guess(scheduler, {a: (31, 32, 33)})
    give(scheduler, plan, [31, 32, 33, 34])
    assert [event.tokens for event in stored] == [(10, 11, 12, 15), (7, 8, 30, 31)]


def test_an_error_within_a_run_ends_it():
    scheduler, a = make(), ask(1, 3)
    started(scheduler, a)
    plan = guess(scheduler, {a: (7, 8)})
    rows = (RowResult((SampledToken(7), SampledToken(-1, error="no token can be chosen"))),)
    events = scheduler.update(plan, StepResult(rows))
    assert [event.finish_reason for _, event in events] == [None, "error"]
    assert a.generation.token_ids == [15, 7]
    assert scheduler.cache.pool.num_free == 16


# ---- what guesses may not take ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "counts"), [(16, (4, 4, 4)), (9, (4, 2, 0)), (6, (3, 0, 0)), (4, (1, 0, 0)), (3, (0, 0, 0))]
)
def test_guesses_leave_a_token_of_the_step_to_everybody(budget, counts):
    """Three decode, each with four guesses; the oldest guess first, and nobody waits for the guesses of another."""
    scheduler, requests = make(rows=3, budget=16), [ask(number, 3) for number in (1, 2, 3)]
    started(scheduler, *requests)
    scheduler.max_num_batched_tokens = budget
    plan = guess(scheduler, dict.fromkeys(requests, (7, 8, 9, 6)))
    assert [len(row.drafts) for row in plan.rows] == list(counts)
    assert plan.num_tokens == 3 + sum(counts) <= budget
    give(scheduler, plan, *([30] for _ in requests))
    assert [request.sequence.num_new for request in requests] == [1, 1, 1]


def test_without_blocks_for_guesses_there_are_none():
    """The row itself is planned all the same."""
    scheduler, a = make(blocks=2), ask(1, 3, limit=6)
    started(scheduler, a)
    scheduler.cache.pool.allocate(1)
    plan = guess(scheduler, {a: (7, 8, 9)})
    assert rows_of(plan) == [(1, 3, 1, ())]
    assert a.sequence.token_ids[-1] == PENDING


def test_nobody_is_preempted_for_a_guess():
    """Two need a block each for their next token; there are two, which the first one's guesses would have taken."""
    scheduler, a, b = make(blocks=4), ask(1, 4, 8), ask(2, 4, 8)
    started(scheduler, a, b)
    plan = guess(scheduler, {a: (7, 8, 9, 6, 5), b: (7, 8)})
    assert [row.request for row in plan.rows] == [a, b]
    assert [len(row.drafts) for row in plan.rows] == [0, 2]
    assert scheduler.num_preemptions == 0


def test_more_than_the_newest_token_to_compute_is_no_place_for_guesses():
    """A chunk of a prompt, a row that comes back after a preemption, and one whose last token is on its way."""
    scheduler, a = make(budget=4), ask(1, 6, 2)
    scheduler.add(a)
    assert rows_of(guess(scheduler, {a: (7,)})) == [(1, 0, 4, ())]
    assert rows_of(guess(scheduler, {a: (7,)})) == [(1, 4, 2, ())]
    assert scheduler.try_guesses(a, 1, Step()) is False
    plan = guess(scheduler, {})
    assert rows_of(plan) == [(1, 6, 1, ())]
    assert guess(scheduler, {a: (7,)}).rows == ()


# ---- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", [0, 8])
def test_a_row_with_guesses_is_taken_back(swap):
    """Its newest token stays known and is the next to be computed; nothing of its guesses is left."""
    scheduler, a, b = make(rows=2, swap=swap), ask(1, 3), ask(2, 3)
    started(scheduler, a, b)
    step = Step()
    scheduler.drafts = {b: (7, 8, 9)}
    assert scheduler.try_row(b, 1, step)
    assert (b.sequence.num_kv, step.num_tokens) == (7, 4)
    scheduler.preempt(b, step)
    assert (step.rows, step.num_tokens) == ([], 0)
    assert b.sequence.token_ids == [20, 21, 22, 25]
    assert (b.state, b.sequence.num_kv, b.sequence.block_table) == ("waiting", 0, [])
    assert (b.host_kv if swap else 3) == 3
    scheduler.drafts = {}
    plan = scheduler.schedule()
    assert (2, 3 if swap else 0, 1 if swap else 4, ()) in rows_of(plan)
    assert b.sequence.token_ids == [20, 21, 22, 25, PENDING]


def test_a_row_without_guesses_is_taken_back_as_before():
    scheduler, a = make(), ask(1, 3)
    started(scheduler, a)
    step = Step()
    assert scheduler.try_row(a, 1, step)
    assert a.sequence.token_ids[-1] == PENDING
    scheduler.preempt(a, step)
    assert a.sequence.token_ids == [10, 11, 12, 15]


def test_an_aborted_row_is_passed_over():
    scheduler, a, b = make(), ask(1, 3), ask(2, 3)
    started(scheduler, a, b)
    plan = guess(scheduler, {a: (7, 8), b: (7, 8)})
    scheduler.abort(a)
    assert give(scheduler, plan, [7, 8, 30], [7, 31]) == [(2, 7, None), (2, 31, None)]
    assert scheduler.outcomes == [(b, 2, 1)]
    scheduler.abort(b)
    assert scheduler.cache.pool.num_free == 16
