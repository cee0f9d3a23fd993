"""What the status page shows of an engine: requests, blocks, the newest steps. Seen from outside, while somebody looks.

Nothing here is on the engine's way while nobody asks: two of its methods are replaced by ones that take notes when
somebody does, and put back when nobody has asked for a while.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Literal, TypedDict

from stages.s04_continuous_batching.engine import Engine, Events
from stages.s04_continuous_batching.plan import Plan, PlannedRow
from stages.s04_continuous_batching.request import Request
from stages.s07_cuda_graph.steady import GroupPlan
from stages.s09_server.block_status import block_status, number_of

Kind = Literal["prefill", "chunk", "decode", "preempted"]  # as in the pictures of stage 04
Row = tuple[int, Kind, int]  # request, what it did, tokens that were computed for it

MOST_STEPS, MOST_ROWS, MOST_WAITING, MOST_REQUESTS = 120, 96, 32, 200  # that are told: an answer has a bounded size
QUIET = 10.0  # seconds without a question, then nobody takes notes any more


class StepRecord(TypedDict):
    """One step. `at`: when it was over, in seconds since the engine began. `rows` and `waiting` hold the first few."""

    number: int
    at: float
    seconds: float
    tokens: int
    rows: list[Row]
    waiting: list[int]


class RequestStatus(TypedDict):
    """A request that has not ended. `kv_tokens` of its tokens are in the cache, or on their way there."""

    id: int
    state: str
    prompt_tokens: int
    output_tokens: int
    token_limit: int
    kv_tokens: int
    blocks: int
    cached_tokens: int
    preemptions: int
    age: float


class Watch:
    """Tells of an engine. `status` is for between two steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.began = engine, time.perf_counter()
        self.asked = 0.0  # when somebody last did
        self.watching = False
        self.number = 0  # of steps that were noted
        self.steps: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        self.planned: tuple[int, list[Row], list[int]] = (0, [], [])  # tokens, rows and who waits, in the newest plan

    def status(self) -> dict[str, object]:
        """What can be shown now, with the newest of the noted steps. The next steps will be noted."""
        self.asked = now = time.perf_counter()
        if not self.watching:
            self.start()
        scheduler, cache = self.engine.scheduler, self.engine.scheduler.cache
        return {
            "uptime": now - self.began,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "block_size": cache.block_size,
            "blocks": block_status(cache, scheduler.running),
            "requests": [self.request_status(request, now) for request in self.newest_requests()],
            "steps": list(self.steps),
        }

    # ---- requests ----------------------------------------------------------------------------------------------------

    def newest_requests(self) -> Iterable[Request]:
        """Those that run, then those that wait, as far as an answer goes; each in the order in which it is served."""
        scheduler = self.engine.scheduler
        running = scheduler.running[:MOST_REQUESTS]
        return [*running, *scheduler.waiting[: MOST_REQUESTS - len(running)]]

    def request_status(self, request: Request, now: float) -> RequestStatus:
        """A row of the table."""
        return {
            "id": number_of(request),
            "state": request.state,
            "prompt_tokens": request.prompt_len,
            "output_tokens": len(request.generation.token_ids),
            "token_limit": request.generation.token_limit,
            "kv_tokens": request.sequence.num_kv,
            "blocks": len(request.sequence.block_table),
            "cached_tokens": request.num_cached_tokens,
            "preemptions": request.num_preemptions,
            "age": now - request.arrival,
        }

    # ---- steps -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take notes from the next step on. What was noted before a pause says nothing about now."""
        self.watching = True
        self.steps.clear()
        engine, scheduler = self.engine, self.engine.scheduler
        schedule, step = scheduler.schedule, engine.step

        def noted_schedule() -> Plan:
            ran = list(scheduler.running)
            plan = schedule()
            self.planned = plan.num_tokens, rows_of(plan, ran), [number_of(r) for r in scheduler.waiting[:MOST_WAITING]]
            return plan

        def noted_step() -> Events:
            began = time.perf_counter()
            if began - self.asked > QUIET:
                self.stop()
                return step()
            events = step()
            self.note(began, time.perf_counter())
            return events

        scheduler.schedule, engine.step = noted_schedule, noted_step  # type: ignore[method-assign]

    def stop(self) -> None:
        """Take no more notes."""
        self.watching = False
        vars(self.engine.scheduler).pop("schedule", None)
        vars(self.engine).pop("step", None)

    def note(self, began: float, now: float) -> None:
        """A step that did not fail and computed something; some only read the tokens of the one before."""
        tokens, rows, waiting = self.planned
        if tokens:
            self.number += 1
            at, seconds = now - self.began, now - began
            step = StepRecord(number=self.number, at=at, seconds=seconds, tokens=tokens, rows=rows, waiting=waiting)
            self.steps.append(step)


def rows_of(plan: Plan, ran: list[Request]) -> list[Row]:
    """What each request did: prompts first, so that none is left out where there are too many. `ran`: until now."""
    if isinstance(plan, GroupPlan):  # stage 07: all rows are alike, and none was made
        return [(number_of(member.request), "decode", 1) for member in plan.group.members[:MOST_ROWS]]
    known = set(ran)
    rows: list[Row] = [(number_of(request), "preempted", 0) for request in ran if request.state == "waiting"]
    decodes: list[Row] = []
    for row in plan.rows:
        kind = kind_of(row, known)
        (decodes if kind == "decode" else rows).append((number_of(row.request), kind, row.span.num_new))
    return [*rows, *decodes][:MOST_ROWS]


def kind_of(row: PlannedRow, ran: set[Request]) -> Kind:
    """decode: the newest token, and guesses. prefill: all that was missing, in one row. chunk: a part of it."""
    span = row.span
    if span.start >= row.request.prompt_len and span.num_new == 1 + len(row.drafts):
        return "decode"
    return "prefill" if row.samples and row.request not in ran else "chunk"
