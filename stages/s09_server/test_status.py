"""What the status page is told: the same as stage 04's recorder sees, only while somebody asks, and cheap."""

import asyncio
import json
import time
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import SampledToken
from stages.s01_forward.sampling_params import SamplingParams
from stages.s04_continuous_batching.plan import Handle, PlannedRow, RowResult, StepResult
from stages.s04_continuous_batching.recorder import recorded_batches
from stages.s04_continuous_batching.span import Span
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s06_prefix_cache.hash_chain import HashChain
from stages.s06_prefix_cache.prefix_cache import PrefixCache
from stages.s06_prefix_cache.radix_tree import RadixTree
from stages.s07_cuda_graph.overlap_engine import OverlapEngine
from stages.s07_cuda_graph.steady import GroupPlan, group_result
from stages.s07_cuda_graph.steady_scheduler import SteadyScheduler
from stages.s09_server import block_status as blocks_of
from stages.s09_server import errors
from stages.s09_server import status as page
from stages.s09_server.block_status import FINDABLE, FREE, SHARED, block_status
from stages.s09_server.messages import EngineStats
from stages.s09_server.status import Watch, kind_of
from stages.s09_server.status_routes import PAGE, router

each_index = pytest.mark.parametrize("index", [HashChain, RadixTree])


class Sevens:
    """A runner without a model: token 7 for every row that samples."""

    def execute(self, plan):
        if isinstance(plan, GroupPlan):
            return Handle(group_result([7] * plan.num_tokens))
        return Handle(StepResult([RowResult((SampledToken(7),) if row.samples else ()) for row in plan.rows]))


def make(blocks=40, *, seqs=4, budget=16, ahead=1, index=HashChain) -> OverlapEngine:
    """An engine over so many blocks of 4 tokens, the dummy not counted."""
    cache = PrefixCache(blocks + 1, 4, index())
    return OverlapEngine(SteadyScheduler(cache, SwapSpace(0), seqs, budget), Sevens(), ahead)


def add(engine, prompt, limit=4):
    prompt = list(range(prompt)) if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=limit, ignore_eos=True)
    return engine.add_request(Generation(prompt, params, seed=0, token_limit=limit))


def run(engine):
    while engine.has_work:
        engine.step()


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("blocks", [16, 60])  # with preemptions and without
def test_the_steps_are_those_that_the_recorder_sees(ahead, blocks):
    engine = make(blocks, ahead=ahead)
    with recorded_batches(engine) as batches:
        watch = Watch(engine)
        watch.status()
        for number, size in enumerate([5, 30, 9, 21, 2, 13]):
            add(engine, [number] * size, limit=14)
            engine.step()
        run(engine)
        steps = watch.status()["steps"]
    assert (engine.scheduler.num_preemptions > 0) == (blocks == 16)
    batches = [batch for batch in batches if batch.rows]
    assert len(steps) == len(batches) > 25
    for step, batch in zip(steps, batches, strict=True):
        rows = {(row.request + 1, row.kind, row.computed) for row in batch.rows}
        assert set(step["rows"]) == rows | {(request + 1, "preempted", 0) for request in batch.preempted}
        assert step["waiting"] == [request + 1 for request in batch.waiting]
        assert step["tokens"] == sum(row.computed for row in batch.rows)


def test_nothing_is_noted_until_somebody_asks_nor_when_nobody_has_for_a_while(monkeypatch):
    engine = make()
    before = set(vars(engine)), set(vars(engine.scheduler))
    watch = Watch(engine)
    add(engine, 5, limit=30)
    engine.step()
    assert (set(vars(engine)), set(vars(engine.scheduler))) == before and not watch.steps
    assert watch.status()["steps"] == []
    engine.step()
    engine.step()
    assert [step["number"] for step in watch.status()["steps"]] == [1, 2]
    watch.asked -= page.QUIET + 1
    engine.step()
    assert (set(vars(engine)), set(vars(engine.scheduler))) == before
    engine.step()
    assert len(watch.steps) == 2
    assert watch.status()["steps"] == [], "what was noted before the pause is old"
    engine.step()
    assert [step["number"] for step in watch.status()["steps"]] == [3]


def test_only_the_newest():
    engine = make()
    watch = Watch(engine)
    watch.status()
    add(engine, 5, limit=150)
    run(engine)
    steps = watch.status()["steps"]
    numbers = [step["number"] for step in steps]
    assert numbers == list(range(numbers[0], numbers[0] + page.MOST_STEPS)) and numbers[-1] == 150
    assert all(0 < a["at"] < b["at"] and b["seconds"] > 0 for a, b in zip(steps, steps[1:], strict=False))


def test_a_step_that_fails_is_left_out(monkeypatch):
    engine = make(ahead=0)
    watch = Watch(engine)
    watch.status()
    add(engine, 5)

    def fails(plan):
        raise MemoryError("no room")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine.runner, "execute", fails)
        engine.step()
    add(engine, 6)
    engine.step()
    assert [step["rows"] for step in watch.status()["steps"]] == [[(2, "prefill", 6)]]


def test_guesses_are_part_of_a_decode_row():
    request = add(make(), 5)

    def kind(start, end, *, drafts=(), samples=True, ran=True):
        row = PlannedRow(request, Span(None, start, end), samples, drafts)
        return kind_of(row, {request} if ran else set())

    assert kind(5, 8, drafts=(1, 2)) == kind(5, 6) == "decode"
    assert kind(5, 8, samples=False) == kind(0, 3, samples=False, ran=False) == kind(3, 5) == "chunk"
    assert kind(0, 5, ran=False) == kind(4, 5, ran=False) == kind(0, 8, ran=False) == "prefill"


def test_an_answer_is_bounded_and_prompts_are_told_first(monkeypatch):
    engine = make(2000, seqs=page.MOST_ROWS + 20, budget=page.MOST_ROWS + 24)
    watch = Watch(engine)
    for number in range(300):
        add(engine, [number], limit=40)
    engine.step()
    engine.step()
    watch.status()
    engine.step()
    assert len(watch.status()["steps"][-1]["rows"]) == page.MOST_ROWS
    for request in engine.scheduler.running[:3]:
        engine.abort(request)
    engine.step()
    told = watch.status()
    assert len(told["steps"][-1]["rows"]) == page.MOST_ROWS
    assert [row[1] for row in told["steps"][-1]["rows"][:4]] == ["prefill"] * 3 + ["decode"]
    assert len(told["steps"][-1]["waiting"]) == page.MOST_WAITING
    assert len(told["requests"]) == page.MOST_REQUESTS
    assert [request["id"] for request in told["requests"]] == list(range(4, 4 + page.MOST_REQUESTS))
    monkeypatch.setattr(page, "MOST_REQUESTS", 50)
    assert len(watch.status()["requests"]) == 50 < len(engine.scheduler.running)


# ---- requests and blocks ---------------------------------------------------------------------------------------------


def test_requests_are_told_as_they_are():
    engine = make(seqs=1)
    watch = Watch(engine)
    add(engine, 9, limit=1)
    run(engine)
    add(engine, 22, limit=3)
    add(engine, 5)
    add(engine, 6)
    engine.step()
    told = watch.status()
    first, second, _ = told["requests"]
    assert (told["running"], told["waiting"], told["block_size"]) == (1, 2, 4) and 0 < told["uptime"] < 60
    assert 0 <= second.pop("age") <= first.pop("age") < 60
    assert first == {
        "id": 2, "state": "running", "prompt_tokens": 22, "output_tokens": 0, "token_limit": 3,
        "kv_tokens": 22, "blocks": 6, "cached_tokens": 8, "preemptions": 0,
    }  # fmt: skip
    assert second["state"] == "waiting" and second["blocks"] == 0


def test_a_request_is_as_old_as_it_is_although_nobody_looked():
    engine = make()
    request = add(engine, 5)
    watch = Watch(engine)
    [told] = watch.status()["requests"]
    assert 0 < request.arrival < watch.began and told["age"] == watch.asked - request.arrival


@each_index
def test_each_block_has_its_owner(index):
    engine = make(20, index=index)
    add(engine, 9, limit=1)  # blocks 1 to 3, of which two are full and stay findable
    run(engine)
    assert block_status(engine.scheduler.cache, []) == {
        "total": 20, "used": 0, "cached": 2, "free": 18, "every": 1, "owners": [FINDABLE, FINDABLE] + [FREE] * 18,
    }  # fmt: skip
    add(engine, 10), add(engine, 11)
    engine.step()
    blocks = Watch(engine).status()["blocks"]
    assert blocks["owners"][:3] == [SHARED, SHARED, FREE], "the prompt's beginning is found by both"
    assert sorted(blocks["owners"][3:]) == [FREE] * 15 + [2, 3]
    assert (blocks["used"], blocks["cached"], blocks["free"]) == (4, 0, 16)


@each_index
def test_what_follows_a_lost_block_is_not_findable(index):
    cache = PrefixCache(10, 4, index())
    root = cache.index.root(())
    first, _ = cache.index.put(root, (1, 2, 3, 4), 1)
    cache.index.put(first, (5, 6, 7, 8), 2)
    assert block_status(cache, [])["owners"] == [FINDABLE, FINDABLE] + [FREE] * 7
    cache.index.remove(1)
    assert block_status(cache, [])["owners"] == [FREE] * 9


def test_of_a_large_pool_every_so_manieth_block(monkeypatch):
    engine = make(21)
    add(engine, [50] * 26, limit=1)  # six full blocks stay findable
    run(engine)
    for number in range(3):
        add(engine, [number] * 9, limit=20)
    for _ in range(4):
        engine.step()
    whole = block_status(engine.scheduler.cache, engine.scheduler.running)
    monkeypatch.setattr(blocks_of, "MOST_CELLS", 10)
    part = block_status(engine.scheduler.cache, engine.scheduler.running)
    assert part["every"] == 3 and part["owners"] == whole["owners"][::3]
    assert (part["total"], part["used"]) == (whole["total"], whole["used"]) == (21, 9)
    assert len({*part["owners"]}) == 5, "three requests, findable, empty"
    assert part["cached"] == 3 * part["owners"].count(FINDABLE) and part["free"] == 12 - part["cached"]


def test_ten_thousand_blocks_are_told_in_milliseconds():
    engine = make(10_000, seqs=64, budget=4096)
    for number in range(250):
        add(engine, [number] * 100, limit=1)
    run(engine)
    for number in range(100):
        add(engine, [1000 + number] * 200, limit=100)
    for _ in range(10):
        engine.step()
    watch, times = Watch(engine), []
    for _ in range(10):
        began = time.thread_time()
        blocks = watch.status()["blocks"]
        times.append(time.thread_time() - began)
    assert blocks["used"] > 2000 and blocks["cached"] > 5000
    assert min(times) < 0.05, f"{min(times)} s"  # 3 ms on a laptop, 4 on a small server


def test_it_travels_as_it_is():
    engine = make()
    watch = Watch(engine)
    watch.status()
    add(engine, 9)
    run(engine)
    add(engine, 12)
    engine.step()
    told = watch.status()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told)) == json.loads(json.dumps(told))


# ---- the routes ------------------------------------------------------------------------------------------------------


def ask(*paths, alive=True):
    """GET these of a server without an engine, whose steps have the numbers 1 to 5."""

    async def status():
        steps = [{"number": number} for number in range(1, 6)]
        return {"uptime": 1.5, "running": 0, "waiting": 1, "steps": steps}

    async def all_of_them():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return [await client.get(path) for path in paths]

    app = FastAPI()
    errors.install(app)
    llm = SimpleNamespace(alive=alive, death="no memory", status=status, stats=EngineStats(running=3, tokens=70))
    app.state.service = SimpleNamespace(llm=llm, model_name="tiny")
    app.include_router(router)
    return asyncio.run(all_of_them())


def test_the_page_and_its_status_are_served():
    html, whole, news, wrong = ask("/", "/status", "/status?since=3", "/status?since=-1")
    assert html.content == PAGE and html.headers["content-type"].startswith("text/html")
    assert (whole.json()["model"], whole.json()["uptime"], len(whole.json()["steps"])) == ("tiny", 1.5, 5)
    assert [whole.json()["stats"][name] for name in ("running", "waiting", "tokens")] == [0, 1, 70]
    assert [step["number"] for step in news.json()["steps"]] == [4, 5]
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "since"


def test_a_dead_engine_has_no_status_and_the_page_is_still_there():
    html, status = ask("/", "/status", alive=False)
    assert html.status_code == 200
    assert status.status_code == 503 and "no memory" in status.json()["error"]["message"]
