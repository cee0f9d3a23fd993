"""The engine that launches a step before it has read the last one: the same tokens, each told once, whatever fails."""

from collections import Counter
from typing import Any

import pytest
import torch

from stages.s01_forward.config import ModelConfig
from stages.s01_forward.outputs import TokenEvent
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.kv_store import kv_bytes_per_token
from stages.s04_continuous_batching.plan import Plan, StepResult
from stages.s06_prefix_cache.llm import LLM as InTurns
from stages.s07_cuda_graph.fake_graphs import FakeGraphs
from stages.s07_cuda_graph.llm import LLM
from stages.s07_cuda_graph.staging import DEPTH, Ring
from tests.scripted import scripted

LONG = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[5] * 20, [6] * 30, [7] * 3, [8] * 9]


def engine(folder: Any, blocks: int = 24, swap: int = 0, cls: type = LLM, **options: Any) -> Any:
    """Blocks of 4 tokens; the default 24 hold one and a half sequences of 64 tokens, the longest."""
    block = 4 * kv_bytes_per_token(ModelConfig.from_dir(folder), torch.float32) / 2**20
    memory = {"kv_cache_mb": (blocks + 1) * block, "swap_mb": swap * block, "block_size": 4, "max_model_len": 64}
    return cls(folder, device="cpu", dtype="float32", **{**memory, **options})


def ids(outputs: Any) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def all_free(llm: LLM) -> bool:
    """When the last step, perhaps computed in vain, has been read too."""
    while llm.engine.has_work:
        assert llm.engine.step() == []
    scheduler = llm.engine.scheduler
    scheduler.cache.pool.check()
    free = scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks - 1
    return free and len(scheduler.swap.free) == scheduler.swap.num_blocks and not llm.inboxes


# ---- tokens that come late -------------------------------------------------------------------------------------------


class LateCopy:
    """The event after a copy to the host: until somebody waits for it, the buffer holds what is not to be read."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.there, self.unread = buffer, buffer.clone(), False

    def record(self) -> None:
        self.there.copy_(self.buffer)
        self.buffer.fill_(-77)
        self.unread = True

    def synchronize(self) -> None:
        if self.unread:
            self.buffer.copy_(self.there)
        self.unread = False


class LateRing(Ring):
    """Copies are as late as can be. A buffer is not handed out again before what was in it has been read."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, torch.device("cpu"))
        self.late = [LateCopy(buffer) for buffer in self.buffers]
        self.most_unread = 0

    def next(self) -> Any:
        self.most_unread = max(self.most_unread, sum(copy.unread for copy in self.late))
        self.turn = (self.turn + 1) % DEPTH
        assert not self.late[self.turn].unread, "a step's tokens are overwritten before they are read"
        return self.buffers[self.turn], self.late[self.turn]


def with_late_copies(llm: LLM) -> LateRing:
    """From now on every step's tokens are there when they are waited for, and not before."""
    runner: Any = llm.engine.runner
    runner.out = LateRing(len(runner.out.buffers[0]))
    return runner.out


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("padded", [False, True])
def test_late_copies_through_a_small_pool(family, padded, tiny):
    """Preempted, swapped, cut in chunks, several answers to a prompt: the tokens of stage 06."""
    params = [
        SamplingParams(
            max_tokens=9 + 5 * i, temperature=i % 2, seed=i, n=1 + i // 3, frequency_penalty=1, ignore_eos=True
        )
        for i in range(4)
    ]
    options = {"blocks": 16, "max_num_seqs": 5, "max_num_batched_tokens": 12}
    expected = ids(engine(tiny(family), cls=InTurns, **options).generate(PROMPTS, params))
    for swap in (0, 40):
        llm = engine(tiny(family), swap=swap, **options)
        ring = with_late_copies(llm)
        if padded:
            llm.engine.runner.graphs = FakeGraphs(llm.engine.runner.step, 5, 12, 64)
        assert ids(llm.generate(PROMPTS, params)) == expected
        assert all_free(llm)
        assert llm.engine.scheduler.num_preemptions > 2
        assert ring.most_unread == 1, "one step is under way while the next is launched"


def test_a_thousand_steps_ahead_and_in_turns(tiny):
    """Requests come and go all the time, four at once: the same ids and ends."""
    prompts = [[(7 * i + j) % 490 for j in range(1 + i % 11)] for i in range(64)]
    params = [SamplingParams(max_tokens=64 - i % 30, temperature=1.5 * (i % 3), seed=i) for i in range(64)]
    in_turns, ahead = (engine(tiny("qwen2"), 100, max_num_seqs=rows, overlap=rows < 16) for rows in (16, 3))
    count, launch, answers = Counter[str](), ahead.engine.runner.execute, []
    ahead.engine.runner.execute = lambda plan: (count.update(["step"]), launch(plan))[1]
    for llm in (in_turns, ahead):
        del llm.model.layers[1:]  # a shorter step, for there are many
        ring = with_late_copies(llm)
        answers.append([(o.token_ids, o.finish_reason, o.text) for o in llm.generate(prompts, params)])
        assert ring.most_unread == (llm is ahead)
        assert all_free(llm)
    assert answers[0] == answers[1]
    assert {reason for _, reason, _ in answers[0]} == {"length", "stop"}
    assert count["step"] >= 1000


@pytest.mark.parametrize("overlap", [False, True])
def test_an_end_costs_at_most_one_row(overlap, tiny):
    """EOS after 3 tokens and after 5, a cap of 4: rows that were computed, and rows that told."""
    source = tiny("qwen2")
    folder = scripted(source, source.parent / "ends", [[10, 11, 12, 2], [20, 21, 22, 23, 24, 9], [30, 31, 32, 33, 34]],
                      {"generation_config.json": {"eos_token_id": [2, 9]}})  # fmt: skip
    llm = engine(folder, overlap=overlap)
    rows, execute = Counter[int](), llm.engine.runner.execute
    llm.engine.runner.execute = lambda plan: (rows.update(r.request.id for r in plan.rows), execute(plan))[1]
    caps = [SamplingParams(max_tokens=n) for n in (20, 20, 4)]
    outputs = llm.generate([[10], [20], [30]], caps)
    assert [o.token_ids for o in outputs] == [[11, 12, 2], [21, 22, 23, 24, 9], [31, 32, 33, 34]]
    assert [o.finish_reason for o in outputs] == ["stop", "stop", "length"]
    assert all_free(llm)
    assert rows == {0: 3 + overlap, 1: 5 + overlap, 2: 4}, "an end that can be foreseen costs nothing"


def test_what_a_row_in_vain_writes_reaches_nobody(tiny):
    """Its block may belong to somebody new in the very next step, and what it found in the cache is still right."""
    source = tiny("qwen2")
    folder = scripted(source, source.parent / "vain", [[10, 11, 12, 13, 2]])
    llm, alone = engine(folder, blocks=16, max_num_seqs=2), engine(folder, blocks=16, cls=InTurns)
    prompts = [[40 + i, 41, 42, 10][: 1 + i % 4] + [10] for i in range(12)]
    params = SamplingParams(max_tokens=20)
    for _ in range(2):
        assert ids(llm.generate(prompts, params)) == ids(alone.generate(prompts, params))
        assert all_free(llm)


# ---- when a step fails -----------------------------------------------------------------------------------------------


class Failing:
    """Around a runner: step number `at`, counted from 1, fails when it is launched or when it is waited for."""

    def __init__(self, llm: LLM, at: int, when: str, error: BaseException) -> None:
        self.engine, self.inner, self.at, self.when, self.error = llm.engine, llm.engine.runner, at, when, error
        self.count, self.waited = 0, 0
        llm.engine.runner = self

    def execute(self, plan: Plan) -> Any:
        self.count += 1
        if (self.count, self.when) == (self.at, "before"):
            raise self.error
        handle = self.inner.execute(plan)
        if (self.count, self.when) == (self.at, "launched"):
            raise self.error
        return Handle(self, self.count, handle)

    def stop(self) -> None:
        self.engine.runner = self.inner


class Handle:
    def __init__(self, failing: Failing, number: int, inner: Any) -> None:
        self.failing, self.number, self.inner = failing, number, inner

    def wait(self) -> StepResult:
        if (self.number, self.failing.when) == (self.failing.at, "waited"):
            raise self.failing.error
        return self.inner.wait()


NARROW = {"blocks": 20, "swap": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def healthy(tiny):
    """What comes if nothing fails."""
    return ids(engine(tiny("qwen2"), **NARROW).generate(PROMPTS, LONG))


@pytest.mark.parametrize("when", ["before", "launched", "waited"])
@pytest.mark.parametrize("at", [1, 2, 9])
def test_a_failed_step_ends_its_requests_and_nothing_leaks(when, at, healthy, tiny):
    """The error reaches the caller; afterwards all is as before."""
    llm = engine(tiny("qwen2"), **NARROW)
    failing = Failing(llm, at, when, MemoryError("a rigged failure"))
    with pytest.raises(MemoryError, match="rigged"):
        llm.generate(PROMPTS, LONG)
    failing.stop()
    assert all_free(llm)
    assert ids(llm.generate(PROMPTS, LONG)) == healthy


@pytest.mark.parametrize("error", [MemoryError("a rigged failure"), KeyboardInterrupt("a rigged interrupt")], ids=repr)
@pytest.mark.parametrize("when", ["launched", "waited"])
def test_everybody_is_told_once_how_it_ended(when, error, tiny):
    """Two streams: one raises, the other ends with an error event after the tokens that it was told before."""
    llm = engine(tiny("qwen2"), blocks=80)
    expected = ids(llm.generate([[5] * 3, [6] * 4], LONG))
    first, second = llm.stream([[5] * 3], LONG), llm.stream([[6] * 4], LONG)
    told = [[next(first)], [next(second)]]
    failing = Failing(llm, 2, when, error)
    with pytest.raises(type(error), match="rigged"):
        while True:
            told[0].append(next(first))
    failing.stop()
    told[1] += list(second)
    assert [event.finish_reason for event in told[1]] == [None] * (len(told[1]) - 1) + ["error"]
    assert told[1][-1].token_id == -1
    for events, (tokens,) in zip((told[0], told[1][:-1]), expected, strict=True):
        assert [event.token_id for event in events] == tokens[: len(events)]
    assert all_free(llm)


def step_until(llm: LLM, number: int) -> list[tuple[Any, TokenEvent]]:
    return [event for _ in range(number) for event in llm.engine.step()]


def add(llm: LLM, prompt: list[int], params: SamplingParams) -> Any:
    (request,) = llm.requests.build([prompt], params)
    return llm.engine.add_request(request.generations[0])


def test_who_had_ended_before_its_row_failed_stays_ended(tiny):
    """EOS is read while a row in vain is under way; that row's failure is not its own."""
    source = tiny("qwen2")
    llm = engine(scripted(source, source.parent / "vain", [[10, 11, 12, 13, 2]]))
    ended, other = add(llm, [12], SamplingParams(max_tokens=9)), add(llm, [30], LONG)
    failing = Failing(llm, 3, "waited", MemoryError("a rigged failure"))
    events = step_until(llm, 3)
    assert (ended.generation.finish_reason, ended.generation.token_ids) == ("stop", [13, 2])
    with pytest.raises(MemoryError, match="rigged"):
        llm.engine.step()
    failing.stop()
    assert [(request, event.finish_reason) for request, event in llm.engine.failed] == [(other, "error")]
    assert (ended.generation.finish_reason, ended.generation.error) == ("stop", None)
    assert [event.finish_reason for request, event in events if request is ended] == [None, "stop"]
    assert all_free(llm)


def test_tokens_read_in_the_step_that_fails_are_told(tiny):
    """A request that needs the host arrives: the step reads what is under way, launches, and the launch fails."""
    for when in ("launched", "waited"):
        llm = engine(tiny("qwen2"))
        first = add(llm, [5, 6], LONG)
        llm.engine.step()
        add(llm, [7], SamplingParams(max_tokens=3, logprobs=0))
        failing = Failing(llm, 1, when, MemoryError("a rigged failure"))
        with pytest.raises(MemoryError, match="rigged"):
            llm.engine.step()
        failing.stop()
        told = [(event.token_id >= 0, event.finish_reason) for request, event in llm.engine.failed if request is first]
        assert told == [(True, None), (False, "error")]
        assert len(llm.engine.failed) == 3
        assert all_free(llm)


@pytest.mark.parametrize("swap", [0, 60])
def test_who_was_preempted_for_a_step_that_never_was_comes_back_whole(swap, tiny):
    """Its newest token, or its last chunk, is still under way when it could start again: that is read first."""
    expected = ids(engine(tiny("qwen2"), blocks=80).generate(PROMPTS, LONG))
    llm = engine(tiny("qwen2"), blocks=16, swap=swap, max_num_batched_tokens=8, max_num_seqs=4)
    scheduler, runner = llm.engine.scheduler, llm.engine.runner
    for left in range(3):
        entries, state = (
            [add(llm, prompt, LONG) for prompt in PROMPTS],
            {"left": left, "seen": scheduler.num_preemptions},
        )

        def execute(plan: Plan, state: dict[str, int] = state) -> Any:
            """The step that makes somebody step back fails, after some others like it."""
            if scheduler.num_preemptions > state["seen"]:
                state["seen"], state["left"] = scheduler.num_preemptions, state["left"] - 1
                if state["left"] < 0:
                    raise MemoryError("a rigged failure")
            return type(runner).execute(runner, plan)

        runner.execute = execute
        with pytest.raises(MemoryError, match="rigged"):
            while llm.engine.has_work:
                llm.engine.step()
        del runner.execute
        while llm.engine.has_work:
            llm.engine.step()
        ended = [entry.generation for entry in entries]
        assert {generation.finish_reason for generation in ended} == {"error", "length"}
        for generation, (tokens,) in zip(ended, expected, strict=True):
            whole = generation.finish_reason == "length"
            assert generation.token_ids == tokens[: None if whole else len(generation.token_ids)]
        assert all_free(llm)


def test_a_broken_row_breaks_alone(tiny):
    """NaN in one row's embedding: an error of its own, told one step late like a token; others do not notice."""
    llm = engine(tiny("qwen2"))
    params = SamplingParams(max_tokens=3, n=2, ignore_eos=True)
    healthy = ids(llm.generate([[6, 7]] * 3, params))
    with torch.no_grad():
        llm.model.embed_tokens.weight[499] = float("nan")
    broken, whole = llm.generate([[499, 5], [6, 7]], params)
    assert [a.finish_reason for a in (*broken.outputs, *whole.outputs)] == ["error", "error", "length", "length"]
    assert all("not finite" in answer.error for answer in broken.outputs)
    assert all_free(llm)
    assert ids(llm.generate([[6, 7]] * 3, params)) == healthy


# ---- requests that need the host -------------------------------------------------------------------------------------


def test_no_step_is_planned_ahead_while_somebody_needs_the_host(tiny):
    """From its arrival to its end, however it ends; then the lag is back."""
    llm = engine(tiny("qwen2"), blocks=80)
    add(llm, [5, 6], LONG)
    lags = []

    def steps(number: int) -> None:
        for _ in range(number):
            llm.engine.step()
            lags.append(len(llm.engine.under_way))

    steps(2)
    add(llm, [7], SamplingParams(max_tokens=2, logit_bias={3: 1.0}, ignore_eos=True))
    steps(3)
    left = add(llm, [8], SamplingParams(max_tokens=9, min_tokens=2))
    steps(2)
    llm.engine.abort(left)
    steps(2)
    assert lags == [1, 1, 0, 0, 1, 0, 0, 1, 1]
