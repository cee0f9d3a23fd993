"""The scheduler alone, on counts and block ids: who computes what, who waits, who steps back, who is refused."""

import subprocess
import sys

import pytest

import stages
from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import SampledToken, TokenLogprob
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.fuzz_scheduler import SchedulerFuzz
from stages.s04_continuous_batching.plan import Plan, PlannedRow, RowResult, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler, Step
from stages.s04_continuous_batching.span import Span
from stages.s04_continuous_batching.swap import SwapSpace

EOS, TOKEN = 2, SampledToken(7)


def ask(number, prompt_len, limit=4, *, priority=0, sibling=None, **keys) -> Request:
    """A request that came as number `number`; its prompt is number, number + 1, ..."""
    params = SamplingParams(max_tokens=limit, **keys)
    prompt = list(range(number, number + prompt_len))
    generation = Generation(prompt, params, seed=number, token_limit=limit, eos_token_ids=[EOS])
    return Request(number, generation, priority, sibling)


def make(blocks, *, seqs=8, budget=64, swap=0, cls=Scheduler) -> Scheduler:
    """So many blocks of 4 tokens, the dummy not counted."""
    return cls(PagedCache(blocks + 1, 4), SwapSpace(swap), seqs, budget)


def run_on(scheduler, request, num_kv) -> Request:
    """Let a request run, with the K/V of its first `num_kv` tokens there, without a call of `schedule`."""
    assert scheduler.cache.reserve(request.sequence, num_kv) == []
    request.sequence.num_kv, request.state = num_kv, "running"
    scheduler.running.append(request)
    return request


def books(scheduler):
    pool = scheduler.cache.pool
    return list(pool.ref_counts), list(pool.free), list(scheduler.swap.free)


# ---- a row -----------------------------------------------------------------------------------------------------------


class TestTryRow:
    def test_takes_blocks_and_plans(self):
        scheduler, step, request = make(3), Step(num_tokens=5), ask(0, 6)
        assert scheduler.try_row(request, 6, step) is True
        assert step.rows == [PlannedRow(request, Span(request.sequence, 0, 6), samples=True)]
        assert (step.num_tokens, request.sequence.num_kv) == (11, 6)
        assert (len(request.sequence.block_table), scheduler.cache.pool.num_free) == (2, 1)

    def test_samples_only_at_the_last_known_token(self):
        scheduler, request, steps = make(3), ask(0, 6), [Step(), Step()]
        assert scheduler.try_row(request, 4, steps[0])
        assert scheduler.try_row(request, 2, steps[1])
        assert [(row.span.start, row.span.end, row.samples) for step in steps for row in step.rows] == [
            (0, 4, False),
            (4, 6, True),
        ]

    def test_without_blocks_nothing_is_changed(self):
        scheduler, step = make(2), Step(num_tokens=5)
        first, second = run_on(scheduler, ask(0, 3), 3), ask(1, 5)
        before = books(scheduler)
        assert scheduler.try_row(second, 5, step) is False
        assert (step.rows, step.copies, step.num_tokens, second.sequence.num_kv) == ([], [], 5, 0)
        assert books(scheduler) == before
        assert scheduler.try_row(second, 4, step), "four of its five tokens fit"
        assert first.sequence.block_table != second.sequence.block_table

    def test_copies_of_shared_blocks_are_planned(self):
        scheduler, step = make(4), Step(copies=[(9, 8)])
        source, fork = run_on(scheduler, ask(0, 6), 6), ask(0, 6)
        scheduler.cache.fork_prefix(source.sequence, fork.sequence, 5)
        assert scheduler.try_row(fork, 1, step)
        old, new = source.sequence.block_table[1], fork.sequence.block_table[1]
        assert old != new
        assert step.copies == [(9, 8), (old, new)]


# ---- admission -------------------------------------------------------------------------------------------------------


class Door(Scheduler):
    """Lets in whom the test names."""

    asked: list[Request]
    welcome: set[Request]

    def start(self, request, step):
        self.asked.append(request)
        return request in self.welcome


def door(waiting, welcome, *, running=(), seqs=8) -> Door:
    scheduler = make(8, seqs=seqs, cls=Door)
    scheduler.waiting, scheduler.running = list(waiting), list(running)
    scheduler.asked, scheduler.welcome = [], set(welcome)
    for request in running:
        request.state = "running"
    return scheduler


class TestAdmitWaiting:
    def test_in_order_and_nobody_overtakes(self):
        a, b, c, d = (ask(i, 3) for i in range(4))
        scheduler = door([a, b, c, d], [a, b, d])
        scheduler.admit_waiting(Step())
        assert (scheduler.running, scheduler.waiting, scheduler.asked) == ([a, b], [c, d], [a, b, c])
        assert [request.state for request in (a, b, c, d)] == ["running", "running", "waiting", "waiting"]

    def test_while_rows_last(self):
        a, b, c, d = (ask(i, 3) for i in range(4))
        scheduler = door([b, c, d], [b, c, d], running=[a], seqs=3)
        scheduler.admit_waiting(Step())
        assert (scheduler.running, scheduler.waiting, scheduler.asked) == ([a, b, c], [d], [b, c])

    def test_an_empty_queue(self):
        scheduler = door([], [])
        scheduler.admit_waiting(Step())
        assert scheduler.running == []

    def test_the_running_stay_in_order(self):
        """Who was preempted comes back to its old place, and the urgent go before all."""
        old, new, urgent = ask(1, 3), ask(2, 3), ask(3, 3, priority=-1)
        scheduler = door([urgent, old], [urgent, old], running=[new])
        scheduler.admit_waiting(Step())
        assert scheduler.running == [urgent, old, new]


# ---- running requests ------------------------------------------------------------------------------------------------


class Rigged(Scheduler):
    """A row fits once `missing` requests have stepped back; nothing is really reserved."""

    missing = 0
    share = 1

    def share_of(self, request, step):
        return self.share

    def try_row(self, request, count, step):
        step.rows.append((request, count, self.missing <= 0))
        return self.missing <= 0

    def preempt(self, request, step):
        self.missing -= 1
        self.running.remove(request)
        self.waiting.insert(0, request)


def rigged(missing, count=3) -> tuple[Rigged, list[Request]]:
    scheduler, requests = make(8, cls=Rigged), [ask(i, 3) for i in range(count)]
    scheduler.running, scheduler.missing = list(requests), missing
    return scheduler, requests


class TestContinueRunning:
    def test_a_row_where_there_is_room(self):
        scheduler, (a, b, c) = rigged(0)
        scheduler.continue_running(b, step := Step())
        assert (step.rows, scheduler.running) == ([(b, 1, True)], [a, b, c])

    def test_whoever_comes_last_makes_room(self):
        scheduler, (a, b, c) = rigged(2)
        scheduler.continue_running(a, step := Step())
        assert (scheduler.running, scheduler.waiting) == ([a], [b, c])
        assert step.rows == [(a, 1, False), (a, 1, False), (a, 1, True)]

    def test_the_last_steps_back_itself(self):
        scheduler, (a, b, c) = rigged(9)
        scheduler.continue_running(b, step := Step())
        assert (scheduler.running, scheduler.waiting) == ([a], [b, c])
        assert step.rows == [(b, 1, False), (b, 1, False)]

    def test_nothing_to_compute(self):
        scheduler, requests = rigged(9)
        scheduler.share = 0
        scheduler.continue_running(requests[0], step := Step())
        assert (step.rows, scheduler.running) == ([], requests)


class TestPlanDecode:
    @staticmethod
    def one_new(prompt_len, **keys) -> tuple[Scheduler, Request]:
        """All but the newest token have their K/V, in blocks of 4."""
        scheduler = make(8, **keys)
        return scheduler, run_on(scheduler, ask(0, prompt_len), prompt_len - 1)

    @pytest.mark.parametrize("prompt_len", [2, 3, 4, 6, 8])
    def test_the_row_that_continue_running_plans(self, prompt_len):
        plans = []
        for short in (True, False):
            scheduler, request = self.one_new(prompt_len)
            step = Step(num_tokens=5)
            if short:
                assert scheduler.plan_decode(request, step)
            else:
                scheduler.continue_running(request, step)
            (row,) = step.rows
            plans.append((row.span.start, row.span.end, row.samples, step.num_tokens, request.sequence.num_kv))
            assert (row.request, row.span.sequence, scheduler.cache.pool.num_free) == (
                request,
                request.sequence,
                8 - -(-prompt_len // 4),
            )
        assert plans == [(prompt_len - 1, prompt_len, True, 6, prompt_len)] * 2

    def refused(self, scheduler, request, **step):
        step, before = Step(**step), (books(scheduler), request.sequence.num_kv)
        assert not scheduler.plan_decode(request, step)
        assert (step.rows, (books(scheduler), request.sequence.num_kv)) == ([], before)

    @pytest.mark.parametrize("prompt_len", [1, 5, 9])
    def test_a_block_that_has_not_begun(self, prompt_len):
        self.refused(*self.one_new(prompt_len))

    def test_another_number_of_new_tokens(self):
        scheduler, request = self.one_new(7)
        request.sequence.num_kv = 5
        self.refused(scheduler, request)
        request.sequence.num_kv = 7
        self.refused(scheduler, request)

    def test_a_block_that_is_shared(self):
        scheduler, request = self.one_new(7)
        scheduler.cache.fork(request.sequence)
        self.refused(scheduler, request)

    def test_a_step_that_is_full(self):
        self.refused(*self.one_new(7, budget=5), num_tokens=5)


# ---- preemption ------------------------------------------------------------------------------------------------------


def crowded(swap) -> tuple[Scheduler, Request, Request]:
    """a and b run; b has two blocks, six tokens written, and a seventh, its second of output, known."""
    scheduler = make(6, swap=swap)
    a, b = run_on(scheduler, ask(0, 5), 5), run_on(scheduler, ask(1, 5), 5)
    for token_id in (7, 8):
        b.generation.append(SampledToken(token_id))
        b.sequence.token_ids.append(token_id)
    b.sequence.num_kv = 6
    return scheduler, a, b


class TestPreempt:
    def test_blocks_go_and_tokens_stay(self):
        scheduler, a, b = crowded(swap=0)
        scheduler.preempt(b, step := Step())
        assert (scheduler.running, scheduler.waiting) == ([a], [b])
        assert (b.state, b.num_preemptions, scheduler.num_preemptions, step.preempted) == ("waiting", 1, 1, True)
        assert (b.sequence.block_table, b.sequence.num_kv, scheduler.cache.pool.num_free) == ([], 0, 4)
        assert (b.sequence.token_ids, b.generation.token_ids) == ([1, 2, 3, 4, 5, 7, 8], [7, 8])
        assert (step.swap_out, b.host_blocks) == ([], [])

    def test_back_to_its_place_in_the_queue(self):
        scheduler, _, b = crowded(swap=0)
        urgent, later = ask(9, 3, priority=-1), [ask(2, 3), ask(3, 3)]
        scheduler.waiting = [urgent, *later]
        scheduler.preempt(b, Step())
        assert scheduler.waiting == [urgent, b, *later]

    def test_to_host_memory_if_there_is_room(self):
        scheduler, _, b = crowded(swap=3)
        table = list(b.sequence.block_table)
        scheduler.preempt(b, step := Step(swap_out=[(5, 0)]))
        assert step.swap_out == [(5, 0), *zip(table, b.host_blocks, strict=True)]
        assert (len(set(b.host_blocks)), b.host_kv, len(scheduler.swap.free)) == (2, 6, 1)
        assert (b.sequence.block_table, scheduler.cache.pool.num_free) == ([], 4)

    def test_computed_again_if_there_is_none(self):
        scheduler, _, b = crowded(swap=1)
        scheduler.preempt(b, step := Step())
        assert (step.swap_out, b.host_blocks, scheduler.swap.free) == ([], [], [0])


# ---- after the step --------------------------------------------------------------------------------------------------


def planned(scheduler, *spans) -> Plan:
    """A row for each (request, start, end), with its blocks; the K/V of the tokens before is there."""
    rows = []
    for request, start, end in spans:
        run_on(scheduler, request, end)
        request.sequence.num_kv = start
        rows.append(PlannedRow(request, Span(request.sequence, start, end), end == request.sequence.num_tokens))
    return Plan(tuple(rows))


def results(*rows, logprobs=()) -> StepResult:
    """Token ids of each row."""
    return StepResult(tuple(RowResult(tuple(SampledToken(i) for i in ids), logprobs) for ids in rows))


class TestUpdate:
    def test_tokens_are_known_and_told(self):
        scheduler, a, b = make(8), ask(0, 3), ask(10, 5)
        plan = planned(scheduler, (a, 0, 3), (b, 4, 5))
        events = scheduler.update(plan, results([7], [8]))
        assert [(request, event.token_id, event.finish_reason) for request, event in events] == [
            (a, 7, None),
            (b, 8, None),
        ]
        assert (a.sequence.token_ids, a.generation.token_ids) == ([0, 1, 2, 7], [7])
        assert [(r.sequence.num_kv, r.sequence.num_new, r.num_computed) for r in (a, b)] == [(3, 1, 3), (5, 1, 1)]

    def test_take_decides_where_a_token_goes(self):
        class Replacing(Scheduler):
            def take(self, row, token):
                row.span.sequence.token_ids[-1] = token.token_id

        scheduler, a = make(8, cls=Replacing), ask(0, 3)
        scheduler.update(planned(scheduler, (a, 0, 3)), results([7]))
        assert (a.sequence.token_ids, a.generation.token_ids) == ([0, 1, 7], [7])

    def test_who_ends_frees_its_blocks_at_once(self):
        scheduler, a, b, c = make(8), ask(0, 3, limit=1), ask(10, 5), ask(20, 4)
        plan = planned(scheduler, (a, 0, 3), (b, 0, 5), (c, 0, 4))
        events = scheduler.update(plan, results([7], [EOS], [9]))
        assert [event.finish_reason for _, event in events] == ["length", "stop", None]
        assert (scheduler.running, a.state, b.state, scheduler.cache.pool.num_free) == ([c], "finished", "finished", 7)

    def test_a_stop_inside_several_tokens_cuts_the_rest(self):
        """Of one step's tokens those after the end are dropped. sgl-project/sglang#31599."""
        scheduler, a = make(8), ask(0, 3)
        events = scheduler.update(planned(scheduler, (a, 0, 3)), results([7, EOS, 9]))
        assert [event.token_id for _, event in events] == a.generation.token_ids == [7, EOS]
        assert a.generation.finish_reason == "stop"
        assert a.state == "finished"

    def test_an_aborted_request_is_passed_over(self):
        """It was aborted while the step was under way; its row's tokens reach nobody. vllm-project/vllm#10583."""
        scheduler, a, b = make(8), ask(0, 3), ask(10, 5)
        plan = planned(scheduler, (a, 0, 3), (b, 0, 5))
        scheduler.abort(a)
        events = scheduler.update(plan, results([7], [8]))
        assert [request for request, _ in events] == [b]
        assert (a.generation.token_ids, a.generation.finish_reason, a.sequence.num_kv) == ([], "abort", 0)

    def test_a_row_with_more_to_compute_goes_on(self):
        """Nothing is sampled and nothing ends, even where the answer is to have no token at all."""
        entry = TokenLogprob(5, -1.0, 1, ())
        scheduler, score, b = make(8), ask(0, 8, limit=0, prompt_logprobs=0), ask(10, 8)
        plan = planned(scheduler, (score, 0, 4), (b, 0, 4))
        assert scheduler.update(plan, results([], [], logprobs=(entry,))) == []
        assert [(r.state, r.sequence.num_kv) for r in (score, b)] == [("running", 4)] * 2
        assert score.prompt_logprobs == [None, entry]
        scheduler.running.clear()
        assert scheduler.update(planned(scheduler, (score, 4, 8)), results([])) == []
        assert (score.state, score.generation.finish_reason, score.num_computed) == ("finished", "length", 8)

    def test_an_error_ends_its_own_request(self):
        scheduler, a, b = make(8), ask(0, 3), ask(10, 5)
        broken = RowResult((SampledToken(-1, error="not finite"),))
        events = scheduler.update(planned(scheduler, (a, 0, 3), (b, 0, 5)), StepResult((broken, RowResult((TOKEN,)))))
        assert [(event.token_id, event.finish_reason) for _, event in events] == [(-1, "error"), (7, None)]
        assert (a.generation.token_ids, a.generation.error, scheduler.running) == ([], "not finite", [b])


# ---- all of it together ----------------------------------------------------------------------------------------------


def steps(scheduler, most=200) -> list[dict[int, tuple[int, int]]]:
    """Run to the end; of each step, {request id: (start, end)}. Nobody says EOS."""
    history = []
    while scheduler.has_work:
        assert len(history) < most, "the requests do not end"
        plan = scheduler.schedule()
        history.append({row.request.id: (row.span.start, row.span.end) for row in plan.rows})
        tokens = [(TOKEN,) if row.samples and row.request.generation.token_limit else () for row in plan.rows]
        scheduler.update(plan, StepResult(tuple(RowResult(each) for each in tokens)))
    scheduler.cache.pool.check()
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks - 1
    assert len(scheduler.swap.free) == scheduler.swap.num_blocks
    return history


def test_a_free_row_is_taken_in_the_next_step():
    """Two rows, outputs of 6, 2, 3 and 2 tokens: 7 steps, where waves of two take 9."""
    scheduler = make(16, seqs=2)
    for number, (prompt_len, limit) in enumerate([(3, 6), (3, 2), (2, 3), (4, 2)]):
        scheduler.add(ask(number, prompt_len, limit))
    assert steps(scheduler) == [
        {0: (0, 3), 1: (0, 3)},
        {0: (3, 4), 1: (3, 4)},
        {0: (4, 5), 2: (0, 2)},
        {0: (5, 6), 2: (2, 3)},
        {0: (6, 7), 2: (3, 4)},
        {0: (7, 8), 3: (0, 4)},
        {3: (4, 5)},
    ]


TIGHT = [{0: (0, 7), 1: (0, 5)}, {0: (7, 8), 1: (5, 6)}, *({0: (i, i + 1)} for i in range(8, 12))]


@pytest.mark.parametrize(("swap", "back"), [(0, (0, 7)), (1, (0, 7)), (2, (6, 7))])
def test_the_last_steps_back_and_loses_no_token(swap, back):
    """4 blocks; prompts of 7 and 5, 6 tokens each. With two host blocks its 6 tokens of K/V are kept."""
    scheduler = make(4, swap=swap)
    requests = [ask(0, 7, 6), ask(1, 5, 6)]
    for request in requests:
        scheduler.add(request)
    assert steps(scheduler) == [*TIGHT, {1: back}, {1: (7, 8)}, {1: (8, 9)}, {1: (9, 10)}]
    assert [request.num_preemptions for request in requests] == [0, 1]
    assert [request.num_computed for request in requests] == [12, 10 if swap == 2 else 16]
    assert [len(request.generation.token_ids) for request in requests] == [6, 6]


def test_nobody_new_comes_in_while_somebody_steps_back():
    """The block that B gives up would be enough for C, and would be missed in the next step."""
    scheduler = make(4)
    for request in (ask(0, 7, 6), ask(1, 5, 6), ask(2, 1, 2)):
        scheduler.add(request)
    history = steps(scheduler)
    assert history[:6] == TIGHT
    assert history[6] == {1: (0, 7), 2: (0, 1)}


def test_a_step_takes_prompts_while_its_tokens_last():
    """6 tokens: the decode of 0 and a prompt of 5; the small one behind them waits for its turn."""
    scheduler = make(16, budget=6)
    scheduler.add(ask(0, 3, 4))
    first = scheduler.schedule()
    scheduler.update(first, results([7]))
    for request in (ask(1, 5, 2), ask(2, 5, 1), ask(3, 1, 1)):
        scheduler.add(request)
    assert steps(scheduler) == [
        {0: (3, 4), 1: (0, 5)},
        {0: (4, 5), 1: (5, 6)},
        {0: (5, 6), 2: (0, 5)},
        {3: (0, 1)},
    ]


def test_priority_goes_before_age():
    """In the queue, and in who steps back. The running are not interrupted for it."""
    scheduler = make(16, seqs=1)
    for number, priority in enumerate([0, 1, -1, 0]):
        scheduler.add(ask(number, 3, 1, priority=priority))
    assert [list(step) for step in steps(scheduler)] == [[2], [0], [3], [1]]
    scheduler = make(4)
    for request in (ask(0, 7, 6), ask(1, 5, 6, priority=-1)):
        scheduler.add(request)
    history = steps(scheduler)
    assert history[2] == {1: (6, 7)}, "the older one steps back for the more urgent"


def test_answers_to_one_prompt_share_its_blocks():
    """The second waits for the prompt's K/V, shares one full block, and computes the prompt's last token again."""
    scheduler = make(8)
    first = ask(0, 6, 3)
    second = ask(0, 6, 3, sibling=first)
    second.id = 1
    for request in (first, second):
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.update(plan, results([7]))
    plan = scheduler.schedule()
    assert [(row.request, row.span.start, row.span.end) for row in plan.rows] == [(first, 6, 7), (second, 5, 6)]
    (one, two), (other_one, other_two) = first.sequence.block_table, second.sequence.block_table
    assert one == other_one
    assert plan.copies == ((two, other_two),)
    scheduler.update(plan, results([7], [8]))
    assert len(steps(scheduler)) == 2


@pytest.mark.parametrize("gone", ["aborted", "preempted"])
def test_a_sibling_that_is_gone_is_not_waited_for(gone):
    scheduler = make(8)
    first = ask(0, 6, 5)
    second = ask(0, 6, 3, sibling=first)
    second.id = 1
    for request in (first, second):
        scheduler.add(request)
    scheduler.update(scheduler.schedule(), results([7]))
    if gone == "aborted":
        scheduler.abort(first)
        assert steps(scheduler)[0] == {1: (0, 6)}
    else:
        scheduler.preempt(first, Step())
        assert steps(scheduler)[:2] == [{0: (0, 7)}, {0: (7, 8), 1: (5, 6)}]


def test_an_abort_ends_a_request_wherever_it_is():
    """Running, waiting, swapped out; twice, and after the end: nothing happens. All is free again."""
    scheduler = make(4, swap=2)
    running, swapped, waiting = ask(0, 7, 6), ask(1, 5, 6), ask(2, 9, 2)
    for request in (running, swapped, waiting):
        scheduler.add(request)
    for tokens in ([7], [7]), ([7], [7]), ([7],):
        scheduler.update(scheduler.schedule(), results(*tokens))
    assert (scheduler.running, scheduler.waiting) == ([running], [swapped, waiting])
    assert swapped.host_blocks
    for request in (swapped, waiting, swapped, running):
        scheduler.abort(request)
        assert (request.state, request.generation.finish_reason) == ("finished", "abort")
    assert not scheduler.has_work
    assert books(scheduler)[0] == [1, 0, 0, 0, 0]
    assert sorted(scheduler.swap.free) == [0, 1]
    assert [len(request.generation.token_ids) for request in (running, swapped, waiting)] == [3, 2, 0]


# ---- "not now" and "never" -------------------------------------------------------------------------------------------


def test_what_the_pool_can_never_hold_is_refused_at_once():
    """8 blocks of 4. A: 40 tokens of prompt; B: 5; C: 12 and 40 more. vllm-project/vllm#39828."""
    scheduler = make(8)
    with pytest.raises(ValueError, match=r"may need 43 tokens of K/V, 11 blocks of 4; there are 8"):
        scheduler.add(ask(0, 40))
    scheduler.add(b := ask(1, 5))
    with pytest.raises(ValueError, match=r"may need 51 tokens of K/V, 13 blocks of 4; there are 8"):
        scheduler.add(ask(2, 12, 40))
    assert scheduler.waiting == [b]
    assert len(steps(scheduler)) == 4
    assert len(b.generation.token_ids) == 4


@pytest.mark.parametrize(("prompt_len", "limit", "fits"), [(8, 1, True), (8, 4, False), (7, 2, True), (7, 8, False)])
def test_one_request_alone_in_a_pool_of_two_blocks(prompt_len, limit, fits):
    """It ends or is refused, and a small one after it runs. GeeeekExplorer/nano-vllm#274."""
    scheduler = make(2)
    if fits:
        scheduler.add(ask(0, prompt_len, limit))
        assert len(steps(scheduler)) == limit
    else:
        with pytest.raises(ValueError, match="there are 2"):
            scheduler.add(ask(0, prompt_len, limit))
    scheduler.add(ask(1, 3, 2))
    assert steps(scheduler) == [{1: (0, 3)}, {1: (3, 4)}]


def test_what_no_step_can_compute_is_refused():
    """A step of 16 tokens, a prompt of 17, then one of 5; after a preemption all is computed again.

    tenstorrent/vllm#436.
    """
    scheduler = make(32, budget=16)
    for prompt_len, limit in ((17, 1), (16, 2), (5, 13)):
        with pytest.raises(ValueError, match=r"compute 17 tokens in one step; max_num_batched_tokens is 16"):
            scheduler.add(ask(0, prompt_len, limit))
    scheduler.add(ask(1, 5, 12))
    assert len(steps(scheduler)) == 12


def test_a_prompt_without_tokens_is_refused():
    """It would never have a row. vllm-project/vllm#7632."""
    scheduler = make(2)
    with pytest.raises(ValueError, match="empty"):
        scheduler.add(ask(0, 0))
    assert not scheduler.has_work


def test_a_replay_is_all_known_tokens_in_one_row():
    """Prompt of 6, preempted after 3 tokens of output: 9 are computed again. GeeeekExplorer/nano-vllm#144."""
    scheduler, request = make(8), ask(0, 6, 6)
    scheduler.add(request)
    for _ in range(3):
        scheduler.update(scheduler.schedule(), results([7]))
    scheduler.preempt(request, Step())
    plan = scheduler.schedule()
    (row,) = plan.rows
    assert (row.span.start, row.span.end, row.samples) == (0, 9, True)
    assert row.span.token_ids[row.span.num_kv : row.span.num_tokens] == [0, 1, 2, 3, 4, 5, 7, 7, 7]
    scheduler.update(plan, results([7]))
    assert len(steps(scheduler)) == 2


# ---- fuzz ------------------------------------------------------------------------------------------------------------


@pytest.mark.end_to_end
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_thousand_random_steps(seed):
    """A million by `python -m stages.s04_continuous_batching.fuzz_scheduler`."""
    done = SchedulerFuzz(seed).run(10_000)
    assert done["step"] >= 10_000
    common = {"request", "length", "stop", "abort", "failed step", "refused"}
    common |= {"preemption", "swap out", "swap in", "copy"}
    assert all(done[kind] >= 100 for kind in common), done
    assert done["error"] >= 10


def test_the_fuzz_and_all_it_needs_load_without_torch():
    """The scheduler decides on counts and block ids: no tensor, and nothing that brings one."""
    program = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'triton', 'numpy'):\n"
        "            raise ImportError(f'{name} is not to be loaded')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from stages.s04_continuous_batching import engine, plan, request, scheduler, swap\n"
        "from stages.s04_continuous_batching.fuzz_scheduler import SchedulerFuzz\n"
        "print(SchedulerFuzz(3).run(50)['step'] >= 50, 'torch' in sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=stages.STAGES_DIR.parent, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split() == ["True", "False"], run.stderr
