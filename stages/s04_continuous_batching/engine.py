"""The engine: requests in, events out, one step at a time."""

from __future__ import annotations

import itertools
from typing import Protocol

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import TokenEvent
from stages.s04_continuous_batching.plan import Plan, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler

Events = list[tuple[Request, TokenEvent]]


class StepHandle(Protocol):
    """A step that was started: `Handle`, or one that is still under way (stage 07)."""

    def wait(self) -> StepResult:
        """The step's result; returns when it is there."""


class PlanRunner(Protocol):
    """Who computes what was planned: `Runner`, or a stand-in without a model."""

    def execute(self, plan: Plan) -> StepHandle:
        """Start the step."""


class Engine:
    """The loop of every serving engine: schedule, execute, update. Not thread-safe: one thread steps it."""

    def __init__(self, scheduler: Scheduler, runner: PlanRunner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.ids = itertools.count()
        self.failed: Events = []  # how the requests of the last step that failed were ended

    @property
    def has_work(self) -> bool:
        """Is there anything to step for?"""
        return self.scheduler.has_work

    def add_request(self, generation: Generation, *, priority: int = 0, sibling: Request | None = None) -> Request:
        """Queue an answer to be generated. Raises ValueError for one that could never run."""
        request = Request(next(self.ids), generation, priority, sibling)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request and free what it holds; to abort one that has ended does nothing."""
        self.scheduler.abort(request)

    def step(self) -> Events:
        """One step of all that fits into it.

        If it fails, the error is raised after every request of the step was ended with it; `failed` has their events.
        All other requests go on with the next step.
        """
        self.failed = []
        plan = self.scheduler.schedule()
        try:
            result = self.runner.execute(plan).wait()
        except BaseException as error:  # an interrupt, too, leaves K/V unwritten that the scheduler counts on
            self.failed = self.fail(plan, f"{type(error).__name__}: {error}")
            raise
        return self.scheduler.update(plan, result)

    def fail(self, plan: Plan, error: str) -> Events:
        """End a step's requests. K/V that was on its way to host memory may not have arrived: compute it again."""
        on_their_way = {host_block for _, host_block in plan.swap_out}
        for request in self.scheduler.waiting:
            if not on_their_way.isdisjoint(request.host_blocks):
                self.scheduler.swap.release(request)
        # Who has ended before was told so; its row was computed in vain (stage 07).
        rows = [row.request for row in plan.rows if row.request.state != "finished"]
        events = [(request, request.generation.fail(error)) for request in rows]
        for request, _ in events:
            self.scheduler.abort(request)
        return events
