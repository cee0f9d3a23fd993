"""`python -m stages.s07_cuda_graph.fuzz_ahead`: random loads on an engine that plans before it has seen the last step.

The worlds are those of stage 06: small pools, prompts that begin alike, swapping, preemption, aborts. The runner here
computes when it is told to, as a GPU's stream does, and tells later; a step may fail at either moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from stages.s01_forward.generation import Generation
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Engine, Events
from stages.s04_continuous_batching.fake_runner import FakeRunner, first_mark, mark_after
from stages.s04_continuous_batching.fuzz_scheduler import main
from stages.s04_continuous_batching.plan import Handle, Plan, PlannedRow, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s06_prefix_cache.fuzz_prefix import CachedFuzz
from stages.s07_cuda_graph.ahead_scheduler import PENDING, AheadScheduler, complete
from stages.s07_cuda_graph.overlap_engine import OverlapEngine
from stages.s07_cuda_graph.steady import GroupPlan, group_result
from stages.s07_cuda_graph.steady_scheduler import SteadyScheduler


@dataclass(frozen=True)
class Late(Handle):
    """A step that has been computed, and tells when somebody waits."""

    runner: LateRunner
    plan: Plan
    fails: bool

    def wait(self) -> StepResult:
        if self.fails:
            self.runner.failed = self.plan
            raise MemoryError("a rigged failure")
        return self.result


class LateRunner(FakeRunner):
    """Knows itself which tokens it gave; the newest is at hand for as long as its request runs on without a break."""

    def __init__(self, cache: PagedCache, num_host_blocks: int, check: Callable[[Plan], object]) -> None:
        super().__init__(cache, num_host_blocks, check)
        self.made: dict[Request, list[int]] = {}  # -1: it could not choose
        self.stay: dict[Request, int] = {}  # `num_preemptions` when it last sampled
        self.plans: list[Plan] = []  # the newest
        self.executed = 0
        self.fail_late, self.failed = False, Plan(())

    def execute(self, plan: Plan) -> Handle:
        self.failed, self.plans, self.executed = plan, [*self.plans[-2:], plan], self.executed + 1
        handle = super().execute(plan)
        for row, given in zip(plan.rows, handle.result.rows, strict=True):
            for token in given.tokens:
                self.made.setdefault(row.request, []).append(token.token_id)
                self.stay[row.request] = row.request.num_preemptions
        fails, self.fail_late = self.fail_late, False
        result = handle.result
        if isinstance(plan, GroupPlan):
            result = group_result([given.tokens[0].token_id for given in result.rows])
        return Late(result, self, plan, fails)

    def tokens_of(self, request: Request) -> list[int]:
        return [*request.generation.prompt_token_ids, *self.made.get(request, ())]

    def marks_of(self, request: Request) -> list[int]:
        marks = self.marks.setdefault(request, [])
        for token_id in self.tokens_of(request)[len(marks) :]:
            marks.append(mark_after(marks[-1] if marks else first_mark(request), token_id))
        return marks

    def write(self, row: PlannedRow) -> None:
        request, span, tokens = row.request, row.span, self.tokens_of(row.request)
        for position, token_id in enumerate(span.token_ids[span.start : span.end], start=span.start):
            if token_id == PENDING:
                at_hand = self.stay.get(request) == request.num_preemptions
                assert span.num_new == 1 and at_hand, "a token is needed that nobody has"
            else:
                assert token_id == tokens[position]
        super().write(row)


class AheadFuzz(CachedFuzz):
    """What changes: placeholders stand for tokens that are on their way, and an end may come a step too late."""

    engine: OverlapEngine
    runner: LateRunner

    def make_scheduler(self, cache: PagedCache, swap: SwapSpace, max_num_seqs: int, budget: int) -> Scheduler:
        self.max_chunk = self.rng.choice((None, None, 1, 2, self.rng.randint(1, budget)))
        kind = self.rng.choice((AheadScheduler, SteadyScheduler, SteadyScheduler))
        return kind(cache, swap, max_num_seqs, budget, self.max_chunk)

    def make_engine(self, num_host_blocks: int) -> tuple[FakeRunner, Engine]:
        runner = LateRunner(self.cache, num_host_blocks, self.check_plan)
        self.host_bound = self.rng.random() < 0.3  # a world in which some requests take the way without a lag
        return runner, OverlapEngine(cast(AheadScheduler, self.scheduler), runner, self.rng.choice((0, 1, 1, 1)))

    def idle(self, request: Request) -> bool:
        return complete(request) or request.sequence.num_new == 0

    def answers(self, prompt: list[int], limit: int, n: int) -> list[Generation]:
        if self.host_bound:
            return super().answers(prompt, limit, n)
        answers = super().answers(prompt, max(limit, 1), n)
        for generation in answers:
            generation.params = replace(generation.params, prompt_logprobs=None)
        return answers

    def check_plan(self, plan: Plan) -> None:
        """With the placeholders of this step taken out, all is as if each step waited for the one before."""
        pending = [row.span.token_ids for row in plan.rows if row.samples and row.request.generation.token_limit]
        assert all(token_ids.pop() == PENDING for token_ids in pending)
        queues = (*self.before, self.live)  # before it planned, the step may have read the ends of some
        *before, live = ([request for request in queue if request.state != "finished"] for queue in queues)
        self.before, self.live = (before[0], before[1]), live
        super().check_plan(plan)
        self.live = queues[2]
        self.done["group"] += isinstance(plan, GroupPlan)
        for token_ids in pending:
            token_ids.append(PENDING)

    def step(self) -> None:
        """No event is lost, none comes twice, and whoever was in a step that failed ends with the error."""
        runner, engine, live = self.runner, self.engine, list(self.live)
        self.before = (list(self.scheduler.running), list(self.scheduler.waiting))
        self.swapped = {request: request.host_kv for request in self.scheduler.waiting if request.host_blocks}
        fails = self.rng.random() < self.fault_rate
        runner.fail_at = self.rng.choice(("start", "copied", "written", None)) if fails else None
        runner.fail_late = fails and runner.fail_at is None
        lost, had_work = set[Request](), engine.has_work
        before = len(engine.under_way), runner.executed
        try:
            events = engine.step()
        except MemoryError:
            events = engine.failed
            first = next(place for place, plan in enumerate(runner.plans) if plan is runner.failed)
            lost = {row.request for plan in runner.plans[first:] for row in plan.rows}
            self.done["failed step"] += 1
        moved = events or lost or before != (len(engine.under_way), runner.executed)
        assert moved or not had_work, "the engine stands still"
        assert len(engine.under_way) <= engine.ahead
        self.hear(events, live, lost)
        self.check_tokens()
        for request in [request for request in live if request.state == "finished"]:
            self.end(request)
        self.check_books()
        self.done["step"] += 1
        self.done["step ahead"] += len(engine.under_way)

    def hear(self, events: Events, live: list[Request], lost: set[Request]) -> None:
        """Who ends is told so once, and after that nothing."""
        last: Counter[Request] = Counter()
        for request, event in events:
            assert request in live and not last[request], "an event after the end"
            self.told[request] += [event.token_id] if event.token_id >= 0 else []
            last[request] += event.finish_reason is not None
        for request in live:
            generation, ended = request.generation, request.state == "finished"
            assert last[request] == (ended and (generation.token_limit > 0 or generation.finish_reason == "error"))
            assert ended or request not in lost
            assert request in lost or "MemoryError" not in (generation.error or "")

    def check_tokens(self) -> None:
        """A sequence is its prompt, what was told, and one placeholder if its row is under way."""
        pending = {row.request for plan, _ in self.engine.under_way for row in plan.rows if row.samples}
        for request in self.live:
            if request.state != "finished":
                known = [*request.generation.prompt_token_ids, *request.generation.token_ids]
                held = [PENDING] * (request in pending and request.generation.token_limit > 0)
                assert request.sequence.token_ids == known + held
                assert self.told[request] == request.generation.token_ids

    def end(self, request: Request, aborted: bool = False) -> None:
        """An end that nobody could foresee costs one row at most, any other end none."""
        super().end(request, aborted)
        made, generation = self.runner.made.pop(request, []), request.generation
        self.runner.stay.pop(request, None)
        wasted = len(made) - len(generation.token_ids) - (-1 in made)
        foreseen = generation.finish_reason == "length"
        failed = "MemoryError" in (generation.error or "")
        assert 0 <= wasted <= (0 if foreseen else self.engine.ahead + failed)
        self.done["wasted row"] += wasted


if __name__ == "__main__":
    main(AheadFuzz)
