"""`python -m stages.s05_chunked_prefill.fuzz_scheduler`: stage 04's random worlds, with prompts cut into chunks."""

from __future__ import annotations

from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.fuzz_scheduler import SchedulerFuzz, main
from stages.s04_continuous_batching.plan import Plan
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s05_chunked_prefill.scheduler import ChunkedScheduler, awaits_sibling


class ChunkedFuzz(SchedulerFuzz):
    """What changes: a row may compute a part, and decodes have the first claim on a step."""

    whole = False

    def make_scheduler(self, cache: PagedCache, swap: SwapSpace, max_num_seqs: int, budget: int) -> Scheduler:
        self.max_chunk = self.rng.choice((None, None, 1, 2, self.rng.randint(1, budget)))
        return ChunkedScheduler(cache, swap, max_num_seqs, budget, self.max_chunk)

    def stands_aside(self, request: Request) -> bool:
        """Who waits for a sibling's prompt."""
        return awaits_sibling(request)

    def check_plan(self, plan: Plan) -> None:
        """No chunk is too large, no decode waits, and no token of the budget is left while somebody could use it."""
        super().check_plan(plan)
        cap, scheduler = self.max_chunk or scheduler_budget(self.scheduler), self.scheduler
        planned = {row.request: row for row in plan.rows}
        assert all(row.span.num_new <= cap for row in plan.rows)
        for request in self.before[0]:
            if request.state == "running" and request not in planned:
                assert request.sequence.num_new > 1 or self.idle(request), "a decode waits"
        waits = [request for request in scheduler.running if request.sequence.num_new and not self.idle(request)]
        room = scheduler.max_num_batched_tokens - plan.num_tokens
        preempted = any(request.state == "waiting" for request in self.before[0])
        if not preempted:  # else some rows gave way to others after these had been given their share
            assert room == 0 or all(request in planned and planned[request].span.num_new == cap for request in waits)
        self.done["chunk"] += sum(not row.samples for row in plan.rows)
        self.done["chunk of one"] += sum(not row.samples and row.span.num_new == 1 for row in plan.rows)
        self.done["mixed step"] += len({row.samples for row in plan.rows}) == 2


def scheduler_budget(scheduler: Scheduler) -> int:
    """Without a cap a request may take the whole step."""
    return scheduler.max_num_batched_tokens


if __name__ == "__main__":
    main(ChunkedFuzz)
