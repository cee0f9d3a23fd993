"""The group: the plans and events of the scheduler without one, and no work per row but the counters."""

import gc
import sys
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from reference.bench.harness import Result
from stages.s01_forward.generation import Generation
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.plan import Plan, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s06_prefix_cache.prefix_cache import PrefixCache
from stages.s07_cuda_graph import bench_scheduler
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler
from stages.s07_cuda_graph.device_state import DeviceState
from stages.s07_cuda_graph.fake_graphs import FakeGraphs
from stages.s07_cuda_graph.llm import LLM
from stages.s07_cuda_graph.runner import LateHandle
from stages.s07_cuda_graph.slots import Slots
from stages.s07_cuda_graph.steady import Group, GroupPlan, group_result, row_result
from stages.s07_cuda_graph.steady_scheduler import SteadyScheduler

EOS, BLOCK = 2, 4


class Letters:
    """A tokenizer: most tokens are one letter, some only half of one."""

    def token_bytes(self, token_id: int) -> bytes:
        return (b"\xc3", b"\xa9")[token_id % 2] if token_id > 900 else bytes([97 + token_id % 26])


def ask(number: int, prompt: list[int], limit: int, **keys: Any) -> Request:
    params = SamplingParams(max_tokens=limit, **{key: keys.pop(key) for key in ("stop", "min_tokens") if key in keys})
    tokenizer: Any = Letters() if keys.pop("text", False) else None
    answer = Generation(prompt, params, seed=0, token_limit=limit, eos_token_ids=[EOS], tokenizer=tokenizer)
    return Request(number, answer, **keys)


def made_up(plan: Plan) -> StepResult:
    """Tokens that depend on the request and the position alone; a few are EOS, a few none at all."""
    ids = []
    for row in plan.rows:
        value = Random(row.request.id * 100_003 + row.span.end).random()
        ids.append(-1 if value < 0.002 else EOS if value < 0.02 else 10 + int(value * 1000))
    if isinstance(plan, GroupPlan):
        return group_result(ids)
    rows = zip(plan.rows, ids, strict=True)
    return StepResult(
        [row_result(token_id)._replace(tokens=row_result(token_id).tokens[: row.samples]) for row, token_id in rows]
    )


# ---- the same plans and events ---------------------------------------------------------------------------------------


def random_load(scheduler: AheadScheduler, rng: Random, lag: int, steps: int = 250) -> dict[str, Any]:
    """Requests of all kinds come, end and are aborted; what was planned, and what each request was told."""
    requests: list[Request] = []
    told: dict[int, list[Any]] = {}
    plans: list[Any] = []
    under_way: deque[tuple[Plan, StepResult]] = deque()
    kinds: Counter[str] = Counter()
    for step in range(5000):
        if step < steps and rng.random() < 0.25:
            prompt, sibling = [rng.randrange(3) for _ in range(rng.randrange(1, 20))], None
            for _ in range(rng.choice((1, 1, 1, 2))):
                stop = rng.choice(([], [], [], ["ab", "f"]))
                keys = {"text": rng.random() < 0.5, "stop": stop, "priority": rng.choice((0, 0, 0, -1))}
                limit = rng.randrange(1, 40)
                keys["min_tokens"] = rng.choice((0,) * 15 + (limit,))
                requests.append(ask(len(requests), prompt, limit, sibling=sibling, **keys))
                sibling = requests[-1]
                scheduler.add(sibling)
        if step < steps and requests and rng.random() < 0.03:
            scheduler.abort(rng.choice(requests))
        plan = scheduler.schedule()
        rows = [(row.request.id, row.span.start, row.span.end, row.samples, *row.span.block_table) for row in plan.rows]
        plans.append((rows, plan.swap_out, plan.swap_in, plan.copies, plan.num_tokens))
        kinds[type(plan).__name__] += 1
        if plan.rows:
            under_way.append((plan, made_up(plan)))
        while len(under_way) > (lag if plan.rows else 0):
            for request, event in scheduler.update(*under_way.popleft()):
                told.setdefault(request.id, []).append(event)
        scheduler.cache.pool.check()
        if step >= steps and not scheduler.has_work:
            break
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks - 1
    outputs = [(request.generation.output(), request.num_computed, request.num_preemptions) for request in requests]
    return {"plans": plans, "told": told, "outputs": outputs, "kinds": kinds}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("cache", "blocks", "swap"), [(PagedCache, 60, 0), (PagedCache, 17, 12), (PrefixCache, 18, 0)])
def test_the_same_as_without_a_group(cache, blocks, swap, lag):
    """Text, stop strings, EOS, errors, aborts, priorities, forks, preemption and swapping, in small pools."""
    kinds: Counter[str] = Counter()
    for seed in range(3):
        plain, steady = (
            random_load(kind(cache(blocks, BLOCK), SwapSpace(swap), 8, 24), Random(seed), lag)
            for kind in (AheadScheduler, SteadyScheduler)
        )
        kinds += steady.pop("kinds")
        del plain["kinds"]
        assert steady == plain
    assert kinds["GroupPlan"] > 100


# ---- what a group is -------------------------------------------------------------------------------------------------


def started(rows: int, limit: int = 100, cache: type = PagedCache, blocks: int = 400, **keys: Any) -> SteadyScheduler:
    """Prompts of 5 tokens, each request's first row told; from now on all of them just decode."""
    scheduler = SteadyScheduler(cache(blocks, BLOCK), SwapSpace(0), rows, 8 * rows)
    for number in range(rows):
        scheduler.add(ask(number, [number, 4, 5, 6, 7], limit, **keys))
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult([row_result(30)] * rows))
    return scheduler


def step(scheduler: SteadyScheduler, token_id: int = 31) -> GroupPlan:
    """One step of the group, told at once."""
    plan = scheduler.schedule()
    assert isinstance(plan, GroupPlan)
    scheduler.update(plan, group_result([token_id] * len(plan.rows)))
    return plan


def test_rows_of_a_group_are_those_of_its_plan():
    scheduler = started(3)
    step(scheduler)
    plan = scheduler.schedule()
    assert isinstance(plan, GroupPlan)
    rows = list(plan.rows)
    assert [(row.request.id, row.span.start, row.span.end, row.samples) for row in rows] == [
        (number, 6, 7, True) for number in range(3)
    ]
    assert (len(plan.rows), plan.rows[2], plan.rows[-1], plan.num_tokens) == (3, rows[2], rows[2], 3)
    with pytest.raises(IndexError):
        plan.rows[3]
    result = group_result([7, -1, 8])
    assert [row.tokens[0].token_id for row in result.rows] == [7, -1, 8]
    assert [row.tokens[0].error is None for row in result.rows] == [True, False, True]


def test_the_calendar_of_blocks():
    """Sequences of 7 and 8 tokens now: who begins a block is known from their lengths, step after step."""
    scheduler = started(1)
    scheduler.add(ask(1, [1, 4, 5, 6, 7, 8, 9], 100))
    scheduler.max_num_seqs = 2
    plan = scheduler.schedule()  # the first decodes, beside the other's prompt
    assert [row.span.end for row in plan.rows] == [6, 7]
    scheduler.update(plan, StepResult([row_result(30)] * 2))
    seen = []
    for _ in range(5):
        plan = step(scheduler)
        seen.append((plan.lengths, list(plan.begin), list(plan.full)))
        tables = [len(row.request.sequence.block_table) for row in plan.rows]
        assert tables == [-(-length // BLOCK) for length in plan.lengths]
    assert seen == [
        ([7, 8], [], [1]),
        ([8, 9], [1], [0]),
        ([9, 10], [0], []),
        ([10, 11], [], []),
        ([11, 12], [], [1]),
    ]


def test_a_group_lasts_until_somebody_comes_or_goes():
    scheduler = started(4, limit=9)
    first = step(scheduler).group
    assert step(scheduler).group is first
    scheduler.abort(first.members[2].request)
    second = step(scheduler).group
    assert [member.request.id for member in second.members] == [0, 1, 3]
    scheduler.add(ask(9, [1, 2, 3], 50))
    plan = scheduler.schedule()
    assert not isinstance(plan, GroupPlan)
    assert [row.request.id for row in plan.rows] == [0, 1, 3, 9]
    scheduler.update(plan, StepResult([row_result(EOS), *[row_result(40)] * 3]))
    third = step(scheduler).group
    assert [member.request.id for member in third.members] == [1, 3, 9]
    while len(scheduler.running) == 3:
        step(scheduler)
    assert [request.id for request in scheduler.running] == [9], "the others had 9 tokens to make"
    assert third.members[0].request.generation.finish_reason == "length"
    assert step(scheduler).group is not third


def test_who_is_only_one_of_many_goes_its_own_way():
    """A stop token, none at all and an abort in one step under way; all others go on."""
    scheduler = started(5)
    plan, later = scheduler.schedule(), scheduler.schedule()
    assert isinstance(plan, GroupPlan)
    requests = list(scheduler.running)
    scheduler.abort(requests[3])
    events = scheduler.update(plan, group_result([50, EOS, -1, 51, 52]))
    told = {request.id: (event.token_id, event.finish_reason) for request, event in events}
    assert told == {0: (50, None), 1: (EOS, "stop"), 2: (-1, "error"), 4: (52, None)}
    events = scheduler.update(later, group_result([60, 61, 62, 63, 64]))
    assert [(request.id, event.token_id) for request, event in events] == [(0, 60), (4, 64)]
    assert scheduler.running == [requests[0], requests[4]]


def test_where_blocks_lack_somebody_steps_back():
    """Two blocks each and one that is left: the scheduler without a group decides who waits."""
    scheduler = started(3, limit=15, blocks=8)
    while scheduler.num_preemptions == 0:
        plan = scheduler.schedule()
        scheduler.update(plan, group_result([31] * len(plan.rows)))
    assert [request.id for request in scheduler.waiting] == [2]
    assert len(step(scheduler).rows) == 2


def test_who_needs_the_host_is_in_no_group():
    assert not isinstance(started(2, min_tokens=3).schedule(), GroupPlan)


def test_who_shares_the_block_that_it_writes_to_is_in_no_group():
    """It gets a copy of its own first, row by row."""
    scheduler = started(2)
    twin = scheduler.cache.fork(scheduler.running[0].sequence)
    (pair,) = scheduler.schedule().copies
    assert pair == (twin.block_table[1], scheduler.running[0].sequence.block_table[1])
    assert isinstance(scheduler.schedule(), GroupPlan)


def test_full_blocks_are_published():
    scheduler = started(2, cache=PrefixCache)
    for _ in range(7):
        step(scheduler)
    cache: Any = scheduler.cache
    for request in scheduler.running:
        place = cache.index.root(())
        for number in range(3):
            place = cache.index.find(place, cache.tokens_of(request.sequence, number))
            assert place.block == request.sequence.block_table[number]


# ---- on the device's side --------------------------------------------------------------------------------------------


def test_only_who_begins_a_block_is_sent():
    """The same state as when every row is looked at; in most steps no edit at all."""
    scheduler = started(6)
    states = [DeviceState(6, 100, 1000, torch.device("cpu")) for _ in range(2)]
    fast, plain = (Slots(state, 16) for state in states)
    counts = []
    for _ in range(9):
        plan = step(scheduler)
        assert fast.follow_group(plan) == plain.follow(Plan(list(plan.rows)))
        (where, what), expected = states[0].take_edits(), states[1].take_edits()
        assert np.array_equal(where, expected[0])
        assert np.array_equal(what, expected[1])
        counts.append(len(where))
    assert counts[1:] == [0, 0, 6, 0, 0, 0, 6, 0]


def test_a_group_takes_over_the_slots_of_the_one_before():
    scheduler = started(3)
    slots = Slots(DeviceState(3, 100, 1000, torch.device("cpu")), 16)
    before = slots.follow_group(step(scheduler))
    scheduler.abort(scheduler.running[1])
    assert slots.follow_group(step(scheduler)) == [before[0], before[2]]
    assert slots.free == [before[1]]


def test_a_steady_step_makes_no_rows(tiny, monkeypatch):
    """From the plan to the tokens, through a stand-in for the graph: only a group's first step looks at its rows."""
    llm: Any = LLM(tiny("qwen2"), device="cpu", dtype="float32", block_size=4, max_model_len=64, max_num_seqs=3)
    runner, made, row = llm.engine.runner, Counter[Group](), Group.row
    runner.graphs = FakeGraphs(runner.step, 3, 64, 64)

    def counted(group: Group, number: int, length: int) -> Any:
        made[group] += 1
        return row(group, number, length)

    params = [SamplingParams(max_tokens=30, ignore_eos=True)] * 3
    expected = [answer.token_ids for answer in llm.generate([[1, 2, 3], [4, 5], [6]], params)]
    monkeypatch.setattr(Group, "row", counted)
    assert [answer.token_ids for answer in llm.generate([[1, 2, 3], [4, 5], [6]], params)] == expected
    assert runner.graphs.replays > 50
    assert len(made) == 1
    # Its first step is packed (slots, and whether it decodes), and its last is told row by row: all three end there.
    assert sum(made.values()) <= 12


def test_the_bench_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # of all that other checks have left, two dozen times
    bench_scheduler.main(["--quick", "--out", str(tmp_path)])
    result = Result.load("s07_scheduler", tmp_path)
    assert len(result.measurements) == 2 * 2 * 3 * 4
    assert result["16 running, prefix cache, a group, edits"].median > 0


def calls(work: Callable[[], object]) -> int:
    """How many Python functions were called."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.disable()  # whoever wants to hear of a collection, as Hypothesis does, would be counted
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


@pytest.mark.parametrize("cache", [PagedCache, PrefixCache])
def test_calls_of_a_step_do_not_grow_with_the_rows(cache):
    """In a step in which no block begins or is full; and in one in which all do, only what blocks cost."""
    counts: dict[int, list[int]] = {}
    for rows in (64, 256):
        scheduler = started(rows, cache=cache, blocks=4 * rows)
        slots = Slots(DeviceState(rows, 100, 1000, torch.device("cpu")), 16)
        slots.follow_group(step(scheduler))
        tokens = torch.full((rows,), 31, dtype=torch.int32)

        def one_step(scheduler=scheduler, slots=slots, tokens=tokens) -> None:
            plan = scheduler.schedule()
            slots.follow_group(plan)
            scheduler.update(plan, LateHandle(plan, tokens, torch.cpu.Event(), {}).wait())

        counts[rows] = [calls(one_step) for _ in range(4)]
    (usual, full, begin, _), (usual_of_more, full_of_more, begin_of_more, _) = counts[64], counts[256]
    assert usual == usual_of_more < 30
    if cache is PagedCache:
        assert full == usual + 64
        assert full_of_more == usual + 256
    assert begin - usual == pytest.approx((begin_of_more - usual) / 4)
