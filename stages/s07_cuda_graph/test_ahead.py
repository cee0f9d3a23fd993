"""The scheduler that plans a step before it knows the last one's tokens, without a model."""

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import SampledToken
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.plan import Plan, RowResult, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Step
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s06_prefix_cache.prefix_cache import PrefixCache
from stages.s07_cuda_graph.ahead_scheduler import PENDING, AheadScheduler
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.fuzz_ahead import AheadFuzz
from stages.s07_cuda_graph.steady_scheduler import SteadyScheduler

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
EOS = 2


def ask(number: int, length: int, limit: int = 4) -> Request:
    """Prompt number, number + 1, ...; a limit of 0 asks for scores only."""
    params = SamplingParams(max_tokens=limit, prompt_logprobs=None if limit else 0)
    prompt = list(range(number, number + length))
    return Request(number, Generation(prompt, params, seed=0, token_limit=limit, eos_token_ids=[EOS]))


def make(blocks: int = 16, *, rows: int = 4, budget: int = 16, swap: int = 0) -> AheadScheduler:
    """Blocks of 4 tokens."""
    return AheadScheduler(PagedCache(blocks + 1, 4), SwapSpace(swap), rows, budget)


def spans(plan: Plan) -> list[tuple[int, int, int, bool]]:
    return [(row.request.id, row.span.start, row.span.num_new, row.samples) for row in plan.rows]


def give(scheduler: AheadScheduler, plan: Plan, *tokens: int | None) -> list[tuple[int, int, str | None]]:
    """Tell a step's tokens; the events."""
    rows = tuple(RowResult(() if token is None else (SampledToken(token),)) for token in tokens)
    events = scheduler.update(plan, StepResult(rows))
    return [(request.id, event.token_id, event.finish_reason) for request, event in events]


@beforehand(lambda: (AheadFuzz(seed=7).run, 10_000))
def test_random_loads(answer):
    """10,000 steps; a million by the module's own command."""
    assert answer["step"] >= 10_000
    for kind in (
        "step ahead",
        "group",
        "wasted row",
        "failed step",
        "abort",
        "preemption",
        "swap in",
        "copy",
        "hit token",
    ):
        assert answer[kind] > 50, kind
    for kind in ("stop", "length", "error", "chunk of one", "mixed step", "refused"):
        assert answer[kind] > 5, kind


def test_a_step_is_planned_before_the_last_one_is_told():
    scheduler, request = make(), ask(5, 3)
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert spans(first) + spans(second) == [(5, 0, 3, True), (5, 3, 1, True)]
    assert request.sequence.token_ids == [5, 6, 7, PENDING, PENDING]
    assert give(scheduler, first, 40) == [(5, 40, None)]
    assert request.sequence.token_ids == [5, 6, 7, 40, PENDING]
    third = scheduler.schedule()
    assert give(scheduler, second, 41) == [(5, 41, None)]
    assert spans(third) == [(5, 4, 1, True)]
    assert request.sequence.token_ids == [5, 6, 7, 40, 41, PENDING]
    assert (request.sequence.num_kv, request.num_computed) == (5, 4)


def test_a_chunk_awaits_no_token():
    scheduler, request = make(budget=4), ask(5, 6)
    scheduler.add(request)
    assert spans(scheduler.schedule()) == [(5, 0, 4, False)]
    assert PENDING not in request.sequence.token_ids
    assert spans(scheduler.schedule()) == [(5, 4, 2, True)]
    assert request.sequence.token_ids[6:] == [PENDING]


def test_no_row_is_planned_beyond_the_cap():
    """Of 3 tokens, 3 rows give one each; who waits for its last token is not computed, and ends once."""
    scheduler, request = make(), ask(5, 3, limit=3)
    scheduler.add(request)
    plans = [scheduler.schedule() for _ in range(5)]
    assert [len(plan.rows) for plan in plans] == [1, 1, 1, 0, 0]
    events = [event for plan in plans[:3] for event in give(scheduler, plan, 9)]
    assert events == [(5, 9, None), (5, 9, None), (5, 9, "length")]
    assert not scheduler.has_work
    assert scheduler.cache.pool.num_free == 16


def test_an_end_that_nobody_foresaw_costs_one_row():
    scheduler, request, other = make(), ask(5, 3), ask(20, 2)
    for each in (request, other):
        scheduler.add(each)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert give(scheduler, first, EOS, 9) == [(5, EOS, "stop"), (20, 9, None)]
    assert (request.state, request.sequence.block_table) == ("finished", [])
    assert spans(scheduler.schedule()) == [(20, 3, 1, True)]
    assert give(scheduler, second, 33, 10) == [(20, 10, None)], "what came of the row in vain is told to nobody"
    assert request.generation.token_ids == [EOS]


def test_an_aborted_request_is_passed_over():
    scheduler, request = make(), ask(5, 3)
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.abort(request)
    assert give(scheduler, first, 8) == give(scheduler, second, 9) == []
    assert request.generation.token_ids == []
    assert scheduler.cache.pool.num_free == 16


def test_a_preempted_row_takes_its_placeholder_along():
    """Its row of this step will not sample; the token of the step before is still on its way and finds its place."""
    scheduler, request = make(swap=8), ask(5, 3)
    scheduler.add(request)
    first, step = scheduler.schedule(), Step()
    assert scheduler.plan_decode(request, step)
    assert request.sequence.token_ids == [5, 6, 7, PENDING, PENDING]
    scheduler.preempt(request, step)
    assert (step.rows, request.sequence.token_ids) == ([], [5, 6, 7, PENDING])
    assert (request.state, request.host_kv, request.sequence.num_kv) == ("waiting", 3, 0)
    assert give(scheduler, first, 44) == [(5, 44, None)]
    assert request.sequence.token_ids == [5, 6, 7, 44]
    assert request.sequence.num_kv == 0, "nothing of it is in the cache"
    back = scheduler.schedule()
    assert (spans(back), len(back.swap_in)) == ([(5, 3, 1, True)], 1)


def test_a_preempted_request_may_end_while_it_waits():
    scheduler, request = make(swap=8), ask(5, 3)
    scheduler.add(request)
    first = scheduler.schedule()
    scheduler.preempt(request, Step())
    assert give(scheduler, first, EOS) == [(5, EOS, "stop")]
    assert not scheduler.has_work
    assert len(scheduler.swap.free) == 8


def test_who_asks_for_scores_only_awaits_nothing():
    """Neither when its last chunk is planned, whichever way, nor when that is taken back: the prompt stays whole."""
    for length in (4, 5, 6):  # of its last chunk of one token: begins a block, or is planned in the short way
        scheduler, request = make(budget=8), ask(5, length, limit=0)
        scheduler.add(request)
        scheduler.max_chunk = length - 1
        assert spans(scheduler.schedule()) == [(5, 0, length - 1, False)]
        step = Step()
        assert scheduler.plan_decode(request, step) or scheduler.try_row(request, 1, step)
        assert step.rows[0].samples
        scheduler.preempt(request, step)
        assert request.sequence.token_ids == request.generation.prompt_token_ids


def test_only_known_tokens_are_published():
    """The block that the placeholder would fill is not full yet."""
    cache = PrefixCache(17, 4)
    scheduler, request = AheadScheduler(cache, SwapSpace(0), 4, 16), ask(5, 3, limit=8)
    scheduler.add(request)
    plans = [scheduler.schedule(), scheduler.schedule()]
    give(scheduler, plans[0], 40)
    assert not cache.index.by_block
    plans.append(scheduler.schedule())
    give(scheduler, plans[1], 41)
    assert list(cache.index.by_block) == request.sequence.block_table[:1]
    assert cache.tokens_of(request.sequence, 0) == (5, 6, 7, 40)


def test_who_asks_for_scores_is_not_left_out_of_a_group():
    """A prompt that is only scored has no token to come, and chunks to compute while another decodes."""
    scheduler = SteadyScheduler(PagedCache(17, 4), SwapSpace(0), 4, 4, 2)
    decodes, scored = ask(5, 2, limit=9), ask(20, 7, limit=0)
    for each in (decodes, scored):
        scheduler.add(each)
    plans = [scheduler.schedule() for _ in range(5)]
    assert [sorted({row.request.id for row in plan.rows}) for plan in plans] == [[5, 20]] * 4 + [[5]]
    assert scored.sequence.num_kv == 7
