"""`python -m stages.s04_continuous_batching.fuzz_scheduler`: random requests through the engine, without a model.

One world after the other: a pool, limits and a swap space of random sizes, and requests that come, go and fail at
random. Every rule of the books is checked at every step, every answer against that of a single run. No torch needed.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from typing import ClassVar

from stages.s01_forward.generation import Generation
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.block_pool import DUMMY
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Engine
from stages.s04_continuous_batching.fake_runner import EOS, VOCAB, FakeRunner, single_run
from stages.s04_continuous_batching.plan import Plan
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace


class SchedulerFuzz:
    """Later stages bring their own scheduler and cache, and say what changes."""

    whole: ClassVar[bool] = True  # a request computes all its new tokens in one step; from stage 05 on, a part

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()  # how often each thing happened

    def make_cache(self, num_blocks: int, block_size: int) -> PagedCache:
        return PagedCache(num_blocks, block_size)

    def make_scheduler(self, cache: PagedCache, swap: SwapSpace, max_num_seqs: int, budget: int) -> Scheduler:
        return Scheduler(cache, swap, max_num_seqs, budget)

    def make_engine(self, num_host_blocks: int) -> tuple[FakeRunner, Engine]:
        runner = FakeRunner(self.cache, num_host_blocks, self.check_plan)
        return runner, Engine(self.scheduler, runner)

    def idle(self, request: Request) -> bool:
        """Is nothing left to compute for a running request? From stage 07 on, until its last token is known."""
        return False

    # ---- a world and its end -----------------------------------------------------------------------------------------

    def run(self, steps: int) -> Counter[str]:
        """At least so many steps. Raises AssertionError or RuntimeError at the first fault."""
        while self.done["step"] < steps:
            self.begin()
            for _ in range(min(self.rng.randint(20, 400), steps - self.done["step"])):
                self.come_and_go()
                self.step()
            self.drain()
        return self.done

    def begin(self) -> None:
        """A new world, from one that holds a single small request to one with room for all."""
        rng = self.rng
        num_blocks, size, seqs = rng.randint(2, 30), rng.choice((1, 2, 3, 4, 8)), rng.randint(1, 12)
        longest = (num_blocks - 1) * size
        budget = max(seqs, rng.choice((longest, rng.randint(1, 2 * longest))))
        self.cache = self.make_cache(num_blocks, size)
        swap = SwapSpace(rng.choice((0, rng.randint(1, num_blocks), 4 * num_blocks)))
        self.scheduler = self.make_scheduler(self.cache, swap, seqs, budget)
        self.runner, self.engine = self.make_engine(swap.num_blocks)
        self.longest = min(longest, budget) if self.whole else longest
        self.live: list[Request] = []
        self.told: dict[Request, list[int]] = {}  # token ids of the events, by request
        self.known = [self.tokens(rng.randint(1, self.longest)) for _ in range(4)]  # prompts that begin alike
        self.arrivals, self.fault_rate = rng.choice((0.05, 0.3, 0.8)), rng.choice((0.0, 0.01, 0.1))
        self.priorities = rng.choice(((0,), (0, 0, 0, 1, -1)))
        self.done["world"] += 1

    def drain(self) -> None:
        """Nobody new: all that is there ends, and all is free again."""
        left = 1 + len(self.live) * sum(request.max_kv + 1 for request in self.live)
        while self.engine.has_work:
            assert left > 0, "the requests do not end"
            left -= 1
            self.step()
        assert not self.live
        assert self.cache.pool.num_free == self.cache.pool.num_blocks - 1
        assert len(self.scheduler.swap.free) == self.scheduler.swap.num_blocks

    # ---- what happens ------------------------------------------------------------------------------------------------

    def come_and_go(self) -> None:
        """Between two steps: arrivals, aborts of what waits, runs or has ended, and one that can never fit."""
        rng = self.rng
        while rng.random() < self.arrivals and len(self.live) < 16:
            self.arrive()
        if rng.random() < 0.02:
            self.arrive_too_long()
        if self.live and rng.random() < 2 * self.fault_rate:
            request = rng.choice(self.live)
            for _ in range(rng.randint(1, 2)):
                self.engine.abort(request)
            assert request.generation.finish_reason == ("abort" if request.generation.token_limit else "length")
            self.end(request, aborted=True)
            self.done["abort"] += 1
            self.check_books()

    def arrive(self) -> None:
        """One prompt, new or known in part or whole, and one to three answers to it."""
        rng = self.rng
        length = rng.randint(1, rng.choice((self.longest, min(6, self.longest), min(6, self.longest))))
        prompt = (rng.choice(self.known)[: rng.choice((length, self.longest))] + self.tokens(length))[:length]
        room = self.longest - length + 1  # the last token is never written
        limit = rng.choice((0, 1, min(room, rng.randint(1, 8)), rng.randint(1, room), rng.randint(1, room), room, room))
        answers = self.answers(prompt, limit, n=rng.choice((1, 1, 2, 3)))
        first: Request | None = None
        for generation in answers:
            request = self.engine.add_request(generation, priority=generation.params.priority, sibling=first)
            self.live.append(request)
            self.told[request] = []
            first = first or request
            self.done["request"] += 1

    def arrive_too_long(self) -> None:
        """One token more than the pool, or a step, can ever hold, or no prompt at all: refused, nothing is changed."""
        before = (list(self.scheduler.waiting), list(self.scheduler.running))
        length = self.rng.randint(0, self.longest + 1)
        (generation,) = self.answers(self.tokens(length), self.longest - length + 2, n=1)
        try:
            self.engine.add_request(generation)
        except ValueError as error:
            assert (str(self.longest + 1) if length else "empty") in str(error)
        else:
            raise AssertionError("a request that can never fit was taken")
        assert (self.scheduler.waiting, self.scheduler.running) == before
        self.done["refused"] += 1

    def answers(self, prompt: list[int], limit: int, n: int) -> list[Generation]:
        params = SamplingParams(
            max_tokens=limit,
            n=n,
            priority=self.rng.choice(self.priorities),
            prompt_logprobs=0 if limit == 0 or self.rng.random() < 0.1 else None,
            cache_salt=self.rng.choice((None, None, "x", "y")),
        )
        return [
            Generation(prompt, params, seed=self.rng.getrandbits(60), token_limit=limit, eos_token_ids=[EOS], index=i)
            for i in range(n)
        ]

    def tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(VOCAB), k=count)

    # ---- a step and what must hold -----------------------------------------------------------------------------------

    def step(self) -> None:
        self.before = (list(self.scheduler.running), list(self.scheduler.waiting))
        self.swapped = {request: request.host_kv for request in self.scheduler.waiting if request.host_blocks}
        self.runner.fail_at = fails = (
            self.rng.choice(("start", "copied", "written")) if self.rng.random() < self.fault_rate else None
        )
        try:
            events = self.engine.step()
        except MemoryError:
            events = self.engine.failed
            assert [request for request, _ in events] == [row.request for row in self.plan.rows]
            self.done["failed step"] += 1
        else:
            assert fails is None
            sampled = [row.request for row in self.plan.rows if row.samples and row.request.generation.token_limit]
            assert [request for request, _ in events] == sampled
        for request, event in events:
            self.told[request] += [event.token_id] if event.token_id >= 0 else []
            assert event.finish_reason == request.generation.finish_reason
        for request in [request for request in self.live if request.state == "finished"]:
            self.end(request)
        self.check_books()
        self.done["step"] += 1

    def check_plan(self, plan: Plan) -> None:
        """When the step is planned and nothing is computed yet: limits, turns, and who writes where."""
        self.plan, pool = plan, self.cache.pool
        requests = [row.request for row in plan.rows]
        idle = [request for request in self.scheduler.running if request not in requests and self.idle(request)]
        running = [request for request in self.scheduler.running if request not in idle]
        assert len(set(requests)) == len(requests) <= len(running) <= self.scheduler.max_num_seqs - len(idle)
        assert set(requests) <= set(running)
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert plan.rows or idle or not self.engine.has_work
        assert not running or running[0] in requests, "the oldest waits"
        assert not self.whole or len(requests) == len(running)
        for row in plan.rows:
            sequence, span = row.request.sequence, row.span
            assert span.start < span.end == sequence.num_kv <= sequence.num_tokens
            assert not self.whole or row.samples
            assert row.samples == (span.end == sequence.num_tokens)
            assert span.start == self.swapped.get(row.request, span.start), "K/V was kept and is computed again"
            written = sequence.block_table[span.start // self.cache.block_size :]
            assert all(pool.ref_counts[block] == 1 for block in written), "somebody else's K/V is overwritten"
        filled = [block for request in requests if request in self.swapped for block in request.sequence.block_table]
        assert {block for _, block in plan.swap_in} <= set(filled), "K/V comes back for nobody"
        was_running, was_waiting = self.before
        stayed = [request.state == "running" for request in was_running]
        assert stayed == sorted(stayed, reverse=True), "a preempted request went before one that runs on"
        admitted = [request.state == "running" for request in was_waiting if not self.stands_aside(request)]
        assert admitted == sorted(admitted, reverse=True), "a request was overtaken"
        self.done["preemption"] += stayed.count(False)
        self.done["swap out"] += bool(plan.swap_out)
        self.done["swap in"] += bool(plan.swap_in)
        self.done["copy"] += len(plan.copies)
        self.done["wait"] += admitted.count(False)
        self.check_books()

    def stands_aside(self, request: Request) -> bool:
        """May later ones be admitted before it?"""
        return False

    def check_books(self) -> None:
        """Every block and host block is free or owned by those that name it; queues are in order."""
        scheduler, pool = self.scheduler, self.cache.pool
        pool.check()
        owners = Counter(block for request in self.live for block in request.sequence.block_table)
        owned = {block: count for block, count in enumerate(pool.ref_counts) if count and block != DUMMY}
        assert DUMMY not in owners
        assert owners == owned
        assert pool.num_free + len(owned) + 1 == pool.num_blocks
        host = [*scheduler.swap.free, *(block for request in scheduler.waiting for block in request.host_blocks)]
        assert sorted(host) == list(range(scheduler.swap.num_blocks))
        for queue, state in ((scheduler.running, "running"), (scheduler.waiting, "waiting")):
            assert [request.order for request in queue] == sorted(request.order for request in queue)
            assert all(request.state == state for request in queue)
        assert {*scheduler.running, *scheduler.waiting} == set(self.live)
        for request in scheduler.waiting:
            assert not request.sequence.block_table and request.sequence.num_kv == 0
        for request in scheduler.running:
            assert not request.host_blocks
            assert len(request.sequence.block_table) >= self.cache.blocks_for(request.sequence.num_kv)

    def end(self, request: Request, aborted: bool = False) -> None:
        """An answer has ended: what was told of it is what a single run gives, or how that begins."""
        generation, (tokens, reason) = request.generation, single_run(request)
        self.live.remove(request)
        self.runner.marks.pop(request, None)
        assert not request.sequence.block_table and not request.host_blocks
        assert self.told.pop(request) == generation.token_ids
        assert len(generation.token_ids) <= generation.token_limit
        if aborted or "MemoryError" in (generation.error or ""):
            assert generation.token_ids == tokens[: len(generation.token_ids)]
            return
        assert (generation.token_ids, generation.finish_reason) == (tokens, reason)
        if generation.params.prompt_logprobs is not None and generation.index == 0:
            told = [entry.token_id for entry in request.prompt_logprobs if entry]
            assert told == generation.prompt_token_ids[1:]
        self.done[reason] += 1


def main(fuzz: type[SchedulerFuzz] = SchedulerFuzz) -> None:
    """The command line of every stage's fuzz."""
    parser = argparse.ArgumentParser(description="Random requests through the scheduler, every rule checked.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    done = fuzz(arguments.seed).run(arguments.steps)
    print(f"no fault in {done.pop('step')} steps: {', '.join(f'{n} x {kind}' for kind, n in sorted(done.items()))}")


if __name__ == "__main__":
    main()
