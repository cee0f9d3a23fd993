"""The loop with a lag of one step: the GPU computes step N + 1 while the host reads the tokens of step N."""

from __future__ import annotations

from collections import deque

from stages.s01_forward.generation import Generation
from stages.s04_continuous_batching.engine import Engine, Events, PlanRunner, StepHandle
from stages.s04_continuous_batching.plan import Plan
from stages.s04_continuous_batching.request import Request
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler
from stages.s07_cuda_graph.slots import needs_host


class OverlapEngine(Engine):
    """`ahead`: steps that may be under way while the next is planned: 1, or 0 for one after the other.

    While there is a request whose tokens depend on what the host knows, steps go one after the other.
    """

    def __init__(self, scheduler: AheadScheduler, runner: PlanRunner, ahead: int = 1) -> None:
        super().__init__(scheduler, runner)
        self.ahead = ahead
        self.under_way: deque[tuple[Plan, StepHandle]] = deque()
        self.host_bound: set[Request] = set()
        self.stumbled = False  # the last step could not be started, so nobody has read the one before

    @property
    def has_work(self) -> bool:
        """Is there anything to step for? A step whose rows were all aborted is still to be read."""
        return self.scheduler.has_work or bool(self.under_way)

    def add_request(self, generation: Generation, *, priority: int = 0, sibling: Request | None = None) -> Request:
        """As `Engine.add_request`."""
        request = super().add_request(generation, priority=priority, sibling=sibling)
        if needs_host(generation):
            self.host_bound.add(request)
        return request

    def step(self) -> Events:
        """Start a step, and hand out the tokens of the one before. Errors as in `Engine.step`."""
        self.failed = []
        lag = self.lag()
        events: Events = []
        # 0: the plan needs all tokens. So after a start that failed: who was preempted for it may come back now.
        self.read(0 if self.stumbled else lag, events)
        self.stumbled = False
        try:
            plan = self.plan()
        except BaseException:
            self.failed = events  # tokens that have just come are not lost with it
            raise
        if plan.rows or plan.swap_out:
            try:
                self.under_way.append((plan, self.runner.execute(plan)))
            except BaseException as error:
                self.stumbled = True
                self.failed = events + self.fail(plan, f"{type(error).__name__}: {error}")
                raise
        self.read(lag if plan.rows else 0, events)
        return events

    def lag(self) -> int:
        """Steps that may be under way when the next is planned."""
        self.host_bound = {request for request in self.host_bound if request.state != "finished"}
        return 0 if self.host_bound else self.ahead

    def plan(self) -> Plan:
        """The next step."""
        return self.scheduler.schedule()

    def read(self, lag: int, events: Events) -> None:
        """Wait for all steps but the last `lag`; `events` gets their tokens. If one failed, so have those after it.

        Then none is left under way, `failed` has all events, also those from before, and the error goes on.
        """
        while len(self.under_way) > lag:
            plan, handle = self.under_way.popleft()
            try:
                result = handle.wait()
            except BaseException as error:
                for lost in (plan, *(later for later, _ in self.under_way)):
                    events += self.fail(lost, f"{type(error).__name__}: {error}")
                self.under_way.clear()
                self.failed = events
                raise
            events += self.scheduler.update(plan, result)
