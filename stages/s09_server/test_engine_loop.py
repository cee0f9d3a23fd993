"""The engine's side: one message for each step, whatever fails in it, and nothing kept of who has gone."""

from typing import Any

import pytest

from stages.s01_forward.outputs import SampledToken
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Engine
from stages.s04_continuous_batching.fake_runner import EOS, VOCAB, FakeRunner
from stages.s04_continuous_batching.plan import Handle, Plan, RowResult, StepResult
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler
from stages.s07_cuda_graph.fuzz_ahead import LateRunner
from stages.s07_cuda_graph.overlap_engine import OverlapEngine
from stages.s09_server.engine_loop import MAX_FAILURES, EngineLoop
from stages.s09_server.fuzz_server import ServerFuzz
from stages.s09_server.messages import Abort, Add, Begun, Step

NUM_BLOCKS, BLOCK = 40, 4


class Rigged(FakeRunner):
    """Never says EOS; `fail` is what the next steps raise, one after the other."""

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache, 0, lambda plan: None)
        self.fail: list[BaseException | None] = []

    def execute(self, plan: Plan) -> Handle:
        if self.fail and (error := self.fail.pop(0)):
            raise error
        result = super().execute(plan).result
        rows = [
            RowResult(tuple(SampledToken(token.token_id or 1) for token in row.tokens), row.prompt_logprobs, row.error)
            for row in result.rows
        ]
        return Handle(StepResult(tuple(rows)))

    def marks_of(self, request):
        self.marks.pop(request, None)
        return super().marks_of(request)


def make(max_num_seqs: int = 2) -> EngineLoop:
    cache = PagedCache(NUM_BLOCKS, BLOCK)
    return EngineLoop(Engine(Scheduler(cache, SwapSpace(0), max_num_seqs, 200), Rigged(cache)), [EOS])


def add(first: int, limit: int = 8, n: int = 1, prompt: tuple[int, ...] = (5, 6, 7), **params: Any) -> Add:
    wish = SamplingParams(max_tokens=limit, n=n, **params)
    return Add(first, first, list(prompt), wish, [0] * n, limit)


def is_clean(loop: EngineLoop) -> bool:
    """Nothing is kept of anybody, and every block is free."""
    cache = loop.engine.scheduler.cache
    cache.pool.check()
    tables = (loop.requests, loop.not_begun, loop.tokenless, loop.scored, loop.refused, loop.compiling)
    return not any(tables) and not loop.has_work and cache.pool.num_free == NUM_BLOCKS - 1


def run(loop: EngineLoop, steps: int = 100) -> list[Step]:
    told = []
    while loop.has_work:
        assert len(told) < steps, "it does not come to an end"
        told.append(loop.step())
    return told


def tokens_of(steps: list[Step], answer: int) -> list[int]:
    pairs = (pair for step in steps for pair in zip(step.answers, step.tokens, strict=True))
    return [token for number, token in pairs if number == answer]


def test_answers_are_told_by_their_numbers():
    loop = make()
    for first in (10, 20, 30):
        loop.take(add(first, limit=first // 5, n=2 if first == 20 else 1))
    told = run(loop)
    assert [len(tokens_of(told, answer)) for answer in (10, 20, 21, 30)] == [2, 4, 4, 6]
    assert sorted(begun.answer for step in told for begun in step.begun) == [10, 20, 21, 30]
    assert (told[-1].stats.tokens, told[-1].stats.steps, told[-1].stats.running) == (16, len(told), 0)
    assert is_clean(loop)


def test_a_step_that_fails_ends_its_requests_and_nobody_else():
    """Two run, one waits, and one is in between: off the wire, in no step yet. ml-explore/mlx-lm#1909."""
    loop = make(max_num_seqs=2)
    for first in (1, 2, 3):
        loop.take(add(first))
    loop.step()
    assert [loop.stats().running, loop.stats().waiting] == [2, 1]
    loop.take(add(4))
    loop.engine.runner.fail = [MemoryError("no room")]
    step = loop.step()
    assert step.errors == {1: "MemoryError: no room", 2: "MemoryError: no room"}
    assert (step.answers, step.begun) == ([], [])
    loop.take(add(5))
    told = run(loop)
    assert [len(tokens_of(told, answer)) for answer in (1, 2, 3, 4, 5)] == [0, 0, 8, 8, 8]
    assert told[-1].stats.failed_steps == 1
    assert is_clean(loop)


def test_failures_one_after_the_other_are_the_engines_own():
    """Then it says so, and ends; before, everybody who was in such a step has heard of it."""
    loop = make(max_num_seqs=1)
    for first in range(5):
        loop.take(add(first))
    loop.engine.runner.fail = [RuntimeError("broken")] * MAX_FAILURES
    for number in range(MAX_FAILURES - 1):
        assert loop.step().errors == {number: "RuntimeError: broken"}
    with pytest.raises(RuntimeError, match="broken"):
        loop.step()


def test_failures_with_tokens_between_them_are_not():
    loop = make()
    for number in range(4 * MAX_FAILURES):
        loop.take(add(number, limit=2))
        loop.engine.runner.fail = [None, ValueError("now and then")]
        assert list(loop.step().errors) == []
        assert list(loop.step().errors) == [number]
    assert is_clean(loop)


def test_an_error_of_the_gpu_is_the_end_at_once():
    loop = make()
    loop.take(add(1))
    loop.engine.runner.fail = [RuntimeError("CUDA error: an illegal memory access was encountered")]
    with pytest.raises(RuntimeError, match="CUDA"):
        loop.step()


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), RuntimeError("CUDA error")], ids=repr)
def test_what_is_raised_does_not_take_the_news_with_it(error):
    """Somebody reads several streams in turns and is interrupted in one: the others must not wait for ever."""
    loop = make()
    loop.take(add(1, n=2))
    loop.step()
    loop.engine.runner.fail = [error]
    with pytest.raises(type(error)):
        loop.step()
    assert not loop.engine.has_work
    words = f"{type(error).__name__}: {error}"
    assert [step.errors for step in run(loop)] == [{1: words, 2: words}]
    assert is_clean(loop)


class LateFailures(LateRunner):
    """Every step starts well, and fails when its tokens are read, as steps of a GPU do."""

    def execute(self, plan: Plan) -> Handle:
        self.fail_late = True
        return super().execute(plan)


def test_failures_that_show_a_step_later_count_too():
    """A step that was only started has not succeeded."""
    cache = PagedCache(NUM_BLOCKS, BLOCK)
    scheduler = AheadScheduler(cache, SwapSpace(0), 2, 200, None)
    loop = EngineLoop(OverlapEngine(scheduler, LateFailures(cache, 0, lambda plan: None)), [EOS])
    ended: list[int] = []
    with pytest.raises(MemoryError):
        for number in range(100):
            loop.take(add(number))
            ended += loop.step().errors
    assert loop.failed_steps == MAX_FAILURES
    assert 0 < len(ended) < 10


def test_an_abort_frees_within_a_step():
    """Running or waiting, once or twice, unknown or ended: nobody else notices. sgl-project/mini-sglang#15."""
    loop = make(max_num_seqs=2)
    for first in (1, 2, 3):
        loop.take(add(first, limit=30))
    loop.step()
    loop.take(Abort([1, 3]))
    step = loop.step()
    assert (step.answers, step.errors) == ([2], {})
    assert (step.stats.running, step.stats.waiting, step.stats.kv_blocks_used) == (1, 0, 1)
    loop.take(Abort([1, 1, 3, 77, -1]))
    told = [step, *run(loop)]
    assert len(tokens_of(told, 2)) == 29
    loop.take(Abort([2]))
    assert is_clean(loop)


def test_what_an_abort_has_freed_is_told_although_nothing_is_left_to_do():
    loop = make()
    loop.take(add(1))
    assert loop.step().stats.running == 1
    loop.take(Abort([1]))
    assert loop.has_work
    step = loop.step()
    assert (step.answers, step.stats.running, step.stats.kv_blocks_used) == ([], 0, 0)
    assert is_clean(loop)


def test_aborted_before_its_first_step_and_beside_its_siblings():
    loop = make(max_num_seqs=3)
    loop.take(add(1, n=3))
    loop.take(add(9))
    loop.take(Abort([1, 9]))
    told = run(loop)
    assert [len(tokens_of(told, answer)) for answer in (1, 2, 3, 9)] == [0, 8, 8, 0]
    assert is_clean(loop)


def test_who_could_never_run_is_told_so_and_nobody_waits():
    loop = make()
    loop.take(add(1, limit=500))
    loop.take(add(2, limit=500, n=2))
    loop.take(Abort([2]))
    step = loop.step()
    assert sorted(step.errors) == [1, 2, 3]
    assert "502 tokens" in step.errors[1]
    assert is_clean(loop)


def test_who_wants_its_prompt_scored_and_no_token():
    loop = make()
    loop.take(add(1, limit=0, prompt_logprobs=0))
    told = run(loop)
    (begun,) = [begun for step in told for begun in step.begun]
    assert (begun.answer, [score and score.token_id for score in begun.prompt_logprobs]) == (1, [None, 6, 7])
    assert [step.answers for step in told] == [[]] * len(told)
    assert is_clean(loop)


def test_nothing_is_told_twice_of_how_an_answer_began():
    loop = make()
    loop.take(add(1, n=2, prompt_logprobs=0))
    begun = [begun for step in run(loop) for begun in step.begun]
    assert sorted(item.answer for item in begun) == [1, 2]
    assert [item.prompt_logprobs is None for item in sorted(begun, key=lambda item: item.answer)] == [False, True]
    assert all(isinstance(item, Begun) for item in begun)


def test_a_row_without_a_token_ends_alone():
    """The runner's answer to some prefixes is an error."""
    loop = make(max_num_seqs=8)
    runner = loop.engine.runner
    execute = runner.execute

    def one_row_fails(plan: Plan) -> Handle:
        rows = list(execute(plan).result.rows)
        rows[0] = RowResult((), (), "the logits are not finite")
        return Handle(StepResult(tuple(rows)))

    loop.take(add(1))
    loop.take(add(2))
    runner.execute = one_row_fails
    step = loop.step()
    assert (step.errors, step.answers) == ({1: "the logits are not finite"}, [2])
    runner.execute = execute
    assert len(tokens_of(run(loop), 2)) == 7
    assert is_clean(loop)
    assert max(step.tokens) < VOCAB


def test_fuzz():
    """Both sides of the server through random worlds; a million steps by `python -m stages.s09_server.fuzz_server`."""
    done = ServerFuzz(seed=3).run(3_000)
    happened = "world answer abort stop length error".split()
    happened += ["failed step", "answer that failed", "engine that gave up", "stop string"]
    happened += [f"{kind} engine" for kind in ("plain", "ahead", "steady", "guessing")]
    for kind in happened:
        assert done[kind] > 2, kind
