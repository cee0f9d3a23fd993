"""Who computes how much in a step, without a model."""

import pytest

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import SampledToken
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Engine
from stages.s04_continuous_batching.plan import Handle, Plan, PlannedRow, RowResult, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler, Step
from stages.s04_continuous_batching.span import Span
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s05_chunked_prefill.fuzz_scheduler import ChunkedFuzz
from stages.s05_chunked_prefill.scheduler import ChunkedScheduler

LONG = list(range(100, 200))


class Sevens:
    """A runner whose every answer is 7, 7, 7; keeps the plans."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def execute(self, plan: Plan) -> Handle:
        self.plans.append(plan)
        return Handle(StepResult(tuple(RowResult((SampledToken(7),) if row.samples else ()) for row in plan.rows)))


def generation(prompt: list[int], count: int) -> Generation:
    """An answer of so many tokens, still to be made."""
    return Generation(prompt, SamplingParams(max_tokens=count), seed=0, token_limit=count)


def scheduler(
    *, blocks: int = 64, rows: int = 4, budget: int = 16, max_chunk: int | None = None, swap: int = 0
) -> ChunkedScheduler:
    """Blocks of 4 tokens."""
    return ChunkedScheduler(PagedCache(blocks + 1, 4), SwapSpace(swap), rows, budget, max_chunk)


def engine(**options: int) -> Engine:
    return Engine(scheduler(**options), Sevens())


def request(length: int, *, output: int = 0, num_kv: int = 0, number: int = 0) -> Request:
    """A running request with a prompt of so many tokens, some output, and the first `num_kv` tokens in the cache."""
    entry = Request(number, generation(list(range(length)), 50), state="running")
    for _ in range(output):
        entry.sequence.token_ids.append(7)
        entry.generation.token_ids.append(7)
    entry.sequence.num_kv = num_kv
    return entry


def spans(plan) -> list[tuple[int, int, int, bool]]:
    """(request, first position, number of tokens, does it sample?) per row."""
    return [(row.request.id, row.span.start, row.span.num_new, row.samples) for row in plan.rows]


def steps(engine: Engine) -> list[list[tuple[int, int, int, bool]]]:
    """Step to the end; what each step computed."""
    before = len(engine.runner.plans)
    while engine.has_work:
        engine.step()
    return [spans(plan) for plan in engine.runner.plans[before:]]


# ---- exercise by exercise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "num_kv", "taken", "max_chunk", "share"),
    [
        (100, 0, 0, None, 16),  # as much as the budget allows
        (100, 0, 5, None, 11),  # what other rows have left of it
        (100, 0, 16, None, 0),  # nothing
        (100, 90, 0, None, 10),  # the rest of a prompt
        (100, 90, 13, None, 3),
        (100, 0, 0, 6, 6),  # no more than one request may have
        (100, 0, 5, 6, 6),  # ... whatever the others took
        (100, 0, 12, 6, 4),
        (100, 97, 0, 6, 3),
        (100, 99, 15, 6, 1),  # a decode
        (100, 96, 0, 1, 1),
        (3, 0, 0, None, 3),
    ],
)
def test_share_is_what_is_left_of_request_budget_and_cap(known, num_kv, taken, max_chunk, share):
    step = Step(num_tokens=taken)
    assert scheduler(max_chunk=max_chunk).share_of(request(known, num_kv=num_kv), step) == share
    assert step.num_tokens == taken


def test_share_counts_output_that_has_to_be_replayed():
    """Prompt 5, then 7 tokens of output, all of it to compute again. tenstorrent/vllm-tt-plugin#52."""
    chunks = scheduler(max_chunk=4)
    shares = [chunks.share_of(request(5, output=7, num_kv=num_kv), Step()) for num_kv in (0, 4, 8, 11)]
    assert shares == [4, 4, 4, 1]


def turn(*entries: Request) -> list[int]:
    """The order in which these running requests are served."""
    chunked = scheduler()
    chunked.running = list(entries)
    order = [entry.id for entry in chunked.in_turn()]
    assert chunked.running == list(entries), "the list of the running requests keeps its own order"
    return order


def test_turn_of_decodes_comes_first():
    prefill, decode = request(50, number=1), request(5, output=3, num_kv=7, number=2)
    assert turn(prefill, decode) == [2, 1]


def test_turn_within_decodes_and_within_prefills_is_by_age():
    lengths = (60, 9, 30, 8)
    prefills = [request(length, number=2 * i) for i, length in enumerate(lengths)]
    decodes = [request(length, output=1, num_kv=length, number=2 * i + 1) for i, length in enumerate(lengths)]
    mixed = [entry for pair in zip(prefills, decodes, strict=True) for entry in pair]
    assert turn(*mixed) == [1, 3, 5, 7, 0, 2, 4, 6]
    assert turn(*prefills) == [0, 2, 4, 6]
    assert turn() == []


def test_turn_of_a_replay_is_that_of_a_prefill():
    """It has output, and still more than one token to compute. tenstorrent/vllm-tt-plugin#52."""
    replay, decode = request(5, output=7, num_kv=4, number=1), request(9, output=1, num_kv=9, number=2)
    assert turn(replay, decode) == [2, 1]


def planned_decode(chunked: ChunkedScheduler, step: Step) -> tuple[Request, Request]:
    """Two running requests of 8 tokens in 2 blocks each, and a step that computes the ninth token of both."""
    entries = request(8, number=1), request(8, number=2)
    for entry in entries:
        chunked.running.append(entry)
        chunked.cache.reserve(entry.sequence, 8)
        chunked.cache.commit(entry.sequence, 8)
        entry.sequence.token_ids.append(7)
        assert chunked.try_row(entry, 1, step)
    return entries


def test_preempt_takes_a_planned_row_out_of_the_step():
    """The other's row stays, and the token that is not computed is there for others."""
    chunked, step = scheduler(blocks=6), Step()
    first, second = planned_decode(chunked, step)
    assert (step.num_tokens, chunked.cache.pool.num_free) == (2, 0)
    chunked.preempt(second, step)
    assert step.rows == [PlannedRow(first, Span(first.sequence, 8, 9), samples=True)]
    assert step.num_tokens == 1
    assert (first.sequence.num_kv, second.sequence.num_kv) == (9, 0)


def test_preempt_frees_the_blocks_and_queues_the_request():
    chunked, step = scheduler(blocks=6), Step()
    first, second = planned_decode(chunked, step)
    chunked.preempt(second, step)
    assert (chunked.running, chunked.waiting) == ([first], [second])
    assert (second.state, second.num_preemptions, step.preempted) == ("waiting", 1, True)
    assert (second.sequence.block_table, second.sequence.num_tokens) == ([], 9)
    assert chunked.cache.pool.num_free == 3
    chunked.cache.pool.check()


def test_preempt_swaps_out_what_was_written_and_no_more():
    """The planned token has no K/V yet: 8 are kept, not 9."""
    chunked, step = scheduler(blocks=6, swap=8), Step()
    _, second = planned_decode(chunked, step)
    table = list(second.sequence.block_table)
    chunked.preempt(second, step)
    assert second.host_kv == 8
    assert [block for block, _ in step.swap_out] == table


def test_preempt_of_a_request_without_a_row_leaves_the_others():
    chunked, step = scheduler(blocks=6), Step()
    first, second = planned_decode(chunked, Step())
    step.rows.append(PlannedRow(first, Span(first.sequence, 8, 9), samples=True))
    step.num_tokens = 1
    chunked.preempt(second, step)
    assert [row.request for row in step.rows] == [first]
    assert (step.num_tokens, chunked.waiting) == (1, [second])


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_budget_takes_two_steps():
    """Budget 16, 17 tokens. tenstorrent/vllm#436."""
    chunked = engine()
    chunked.add_request(generation(LONG[:17], 1))
    assert steps(chunked) == [[(0, 0, 16, False)], [(0, 16, 1, True)]]


@pytest.mark.parametrize("chunk", range(1, 12))
def test_chunks_cover_the_prompt_without_gap_and_only_the_last_samples(chunk):
    """A chunk of one token is a prefill all the same. sgl-project/sglang#30181."""
    for length in (1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1):
        if length > 0:
            chunked = engine(max_chunk=chunk)
            entry = chunked.add_request(generation(LONG[:length], 2))
            *prefill, decode = [row for (row,) in steps(chunked)]
            assert [start for _, start, _, _ in prefill] == list(range(0, length, chunk))
            assert sum(count for _, _, count, _ in prefill) == length
            assert [samples for _, _, _, samples in prefill] == [False] * (len(prefill) - 1) + [True]
            assert decode == (0, length, 1, True)
            assert entry.generation.token_ids == [7, 7]


def test_no_decode_waits_while_a_long_prompt_arrives():
    """Three answers get a token in every step; the prompt of 100 gets the 13 tokens that they leave."""
    chunked = engine()
    for number in range(3):
        chunked.add_request(generation([number, 9], 40))
    events = [chunked.step() for _ in range(3)]
    late = chunked.add_request(generation(LONG, 4))
    first = len(chunked.runner.plans)
    while chunked.has_work:
        events.append(chunked.step())
    plans = [spans(plan) for plan in chunked.runner.plans[first:]]
    assert [row for plan in plans[:8] for row in plan if row[0] == 3] == [
        (3, 13 * i, 13 if i < 7 else 9, i == 7) for i in range(8)
    ]
    for step in events[:40]:
        assert [entry.id for entry, _ in step if entry is not late] == [0, 1, 2], "a gap of one step, always"
    assert max(plan.num_tokens for plan in chunked.runner.plans) == 16
    assert late.generation.token_ids == [7] * 4


def test_stage_04_would_have_made_them_wait():
    """The same load without chunks: one step computes the whole prompt, and everybody waits for it."""
    whole = Engine(Scheduler(PagedCache(65, 4), SwapSpace(0), 4, 128), Sevens())
    whole.add_request(generation([1, 9], 10))
    whole.step()
    whole.add_request(generation(LONG, 4))
    assert (0, 2, 1, True) in steps(whole)[0]
    assert max(plan.num_tokens for plan in whole.runner.plans) == 101


def test_decodes_stand_first_in_the_plan():
    chunked = engine()
    chunked.add_request(generation(LONG[:50], 3))
    chunked.step()
    chunked.add_request(generation([5], 9))
    chunked.step()  # the older prompt takes all there is
    assert spans(chunked.runner.plans[-1]) == [(0, 16, 16, False)]
    for _ in range(2):
        chunked.step()
    assert spans(chunked.runner.plans[-1]) == [(0, 48, 2, True), (1, 0, 1, True)]
    chunked.add_request(generation(LONG, 1))
    chunked.step()
    assert spans(chunked.runner.plans[-1]) == [(0, 50, 1, True), (1, 1, 1, True), (2, 0, 14, False)]
    chunked.add_request(generation([6, 6], 1))
    assert spans(chunked.scheduler.schedule()) == [(0, 51, 1, True), (1, 2, 1, True), (2, 14, 14, False)]


def test_a_cap_leaves_room_for_others():
    """Two long prompts and a short one: without a cap the first takes every step until it is done."""
    firsts = {}
    for max_chunk in (None, 6):
        chunked = engine(max_chunk=max_chunk)
        for prompt in (LONG[:60], LONG[:12], [1, 2, 3]):
            chunked.add_request(generation(prompt, 1))
        rows = steps(chunked)
        firsts[max_chunk] = {row[0]: number for number, plan in enumerate(rows) for row in plan if row[3]}
        assert all(count <= (max_chunk or 16) for plan in rows for _, _, count, _ in plan)
    assert firsts == {None: {0: 3, 1: 4, 2: 4}, 6: {0: 9, 1: 1, 2: 0}}


def test_who_waits_for_a_siblings_prompt_lets_others_in():
    """A second answer to a prompt of many chunks stands first in the queue, and starts after the last of them."""
    chunked = engine(max_chunk=4)
    first = chunked.add_request(generation(LONG[:40], 3))
    second = chunked.add_request(generation(LONG[:40], 3), sibling=first)
    chunked.add_request(generation([5, 6], 1))
    chunked.add_request(generation([7, 8], 1))
    chunked.step()
    assert spans(chunked.runner.plans[0]) == [(0, 0, 4, False), (2, 0, 2, True), (3, 0, 2, True)]
    assert chunked.scheduler.waiting == [second], "it keeps its place"
    started = [plan for plan in steps(chunked) if any(row[0] == 1 for row in plan)]
    assert started[0] == [(0, 40, 1, True), (1, 39, 1, True)], "and shares all but the prompt's last token"


def test_a_step_is_full_while_there_is_work_for_it():
    chunked = engine(rows=8)
    for number in range(8):
        chunked.add_request(generation(LONG[: 20 + number], 1))
    sizes = [sum(count for _, _, count, _ in plan) for plan in steps(chunked)]
    total = sum(20 + number for number in range(8))
    assert sizes == [16] * (total // 16) + ([total % 16] if total % 16 else [])


# ---- preemption ------------------------------------------------------------------------------------------------------


def test_resumption_replays_its_own_output_in_chunks():
    """Chunks of 4, prompt 5, preempted after 7 tokens of output: 12 to replay. tenstorrent/vllm-tt-plugin#52."""
    chunked = engine(max_chunk=4)
    entry = chunked.add_request(generation(LONG[:5], 10))
    while len(entry.generation.token_ids) < 7:
        chunked.step()
    chunked.scheduler.preempt(entry, Step())
    assert steps(chunked) == [
        [(0, 0, 4, False)], [(0, 4, 4, False)], [(0, 8, 4, True)], [(0, 12, 1, True)], [(0, 13, 1, True)]
    ]  # fmt: skip
    assert entry.generation.token_ids == [7] * 10
    assert entry.num_computed == 14 + 11


@pytest.mark.parametrize(("swap", "resumed"), [(0, (1, 0, 3, True)), (8, (1, 2, 1, True))])
def test_an_older_chunk_takes_the_block_of_a_decode_that_was_planned_already(swap, resumed):
    """Decodes are planned first, so the row that has to go may be in the step: then it computes nothing there."""
    chunked = engine(blocks=3, budget=5, rows=2, max_chunk=4, swap=swap)
    chunked.add_request(generation(LONG[:12], 1))
    young = chunked.add_request(generation([1], 6))
    assert steps(chunked) == [
        [(0, 0, 4, False), (1, 0, 1, True)],
        [(1, 1, 1, True), (0, 4, 4, False)],
        [(0, 8, 4, True)],  # the third of three blocks
        [resumed],
        *([(1, position, 1, True)] for position in (3, 4, 5)),
    ]
    assert young.num_preemptions == 1
    assert young.generation.token_ids == [7] * 6


def test_ten_thousand_random_steps():
    """A million by `python -m stages.s05_chunked_prefill.fuzz_scheduler`."""
    done = ChunkedFuzz(0).run(10_000)
    kinds = ("chunk", "chunk of one", "mixed step", "preemption", "swap in", "copy", "abort", "failed step", "refused")
    assert all(done[kind] > 20 for kind in kinds), done


def test_priorities_decide_who_is_served_first():
    chunked = engine(rows=2, budget=4)
    chunked.add_request(generation(LONG[:8], 1), priority=5)
    chunked.add_request(generation(LONG[:8], 1), priority=-5)
    assert [row[0] for plan in steps(chunked) for row in plan] == [1, 1, 0, 0]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "budget"), [(4, 3), (1, 0), (2, -1)])
def test_a_budget_that_cannot_let_everyone_decode(rows, budget):
    with pytest.raises(ValueError, match=f"max_num_batched_tokens is {budget}; {rows} running requests"):
        scheduler(rows=rows, budget=budget)


def test_what_the_pool_can_never_hold_is_refused_and_others_go_on():
    """Any length can be computed in chunks, but not held. vllm-project/vllm#39828."""
    chunked = engine(blocks=8)
    with pytest.raises(ValueError, match=r"40 tokens of K/V, 10 blocks of 4; there are 8"):
        chunked.add_request(generation(LONG[:40], 1))
    small = chunked.add_request(generation(LONG[:5], 3))
    steps(chunked)
    assert small.generation.token_ids == [7] * 3
