"""The steps of a run: what the host did in each and how long the GPU took, or what the profiler saw on the GPU."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType

from reference.bench.gpu_runs import replaced
from reference.bench.kernel_kinds import Ran

PARTS = ("schedule", "launch", "wait", "update", "outside")


@dataclass(frozen=True)
class StepTime:
    """One step, from the end of the one before to its own end. With overlap it launches a step and ends another."""

    rows: int  # of what it launched
    tokens: int
    seconds: float
    parts: dict[str, float]  # seconds of each of PARTS
    gpu: float | None  # seconds; None on a CPU

    @property
    def decodes(self) -> bool:
        """Nothing but decodes were launched."""
        return 0 < self.rows == self.tokens


class TimedHandle:
    """A step under way, whose `wait` is timed."""

    def __init__(self, handle: Any, wait: Callable[[], Any]) -> None:
        self.handle, self.wait = handle, wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)


@contextmanager
def split_steps(llm: Any) -> Iterator[list[StepTime]]:
    """The steps inside the block; complete when the block has ended."""
    engine, scheduler, runner = llm.engine, llm.engine.scheduler, llm.engine.runner
    spent: dict[str, float] = defaultdict(float)
    launched: list[tuple[Any, list[torch.cuda.Event]]] = []  # by the step that runs: its plan, and both events
    found: list[tuple[float, dict[str, float], list[tuple[Any, list[torch.cuda.Event]]]]] = []
    on_gpu, end = llm.device.type == "cuda", time.perf_counter()

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[part] += time.perf_counter() - start

        return call

    launch = timed("launch", runner.execute)

    def execute(plan: Any) -> Any:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        for event in events[:1]:
            event.record()
        handle = launch(plan)
        for event in events[1:]:
            event.record()
        launched.append((plan, events))
        return TimedHandle(handle, timed("wait", handle.wait))

    def step(step: Callable[[], Any] = engine.step) -> Any:
        nonlocal end
        spent.clear()
        events = step()
        now = time.perf_counter()
        parts = {part: spent[part] for part in PARTS}
        parts["outside"] = now - end - sum(parts.values())
        found.append((now - end, parts, launched[:]))
        launched.clear()
        end = now
        return events

    result: list[StepTime] = []
    books = {name: timed(name, getattr(scheduler, name)) for name in ("schedule", "update")}
    with replaced(scheduler, **books), replaced(runner, execute=execute), replaced(engine, step=step):
        yield result
    if on_gpu:
        torch.cuda.synchronize()
    for seconds, parts, some in found:  # counted now: a plan may make its rows only when somebody asks for them
        rows, tokens = sum(len(plan.rows) for plan, _ in some), sum(plan.num_tokens for plan, _ in some)
        gpu = sum(events[0].elapsed_time(events[1]) for _, events in some) / 1000 if on_gpu and some else None
        result.append(StepTime(rows, tokens, seconds, parts, gpu))


@contextmanager
def profiled_steps(llm: Any, first: int, count: int | None) -> Iterator[list[Any]]:
    """[what ran on the GPU, in how many steps] of the steps from number `first` on; empty on a CPU.

    count: None: to the end of the block.
    """
    engine, runner = llm.engine, llm.engine.runner
    result: list[Any] = []
    if llm.device.type != "cuda":
        yield result
        return
    number = launched = 0
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    running = False
    execute, step = runner.execute, engine.step

    def counted(plan: Any) -> Any:
        nonlocal launched
        launched += running and len(plan.rows) > 0
        return execute(plan)

    def watched() -> Any:
        nonlocal number, running
        if number == first:
            torch.cuda.synchronize()
            profile.start()
            running = True
        events = step()
        number += 1
        if count is not None and number == first + count:
            torch.cuda.synchronize()
            profile.stop()
            running = False
        return events

    with replaced(engine, step=watched), replaced(runner, execute=counted):
        yield result
    if running:
        torch.cuda.synchronize()
        profile.stop()
    ran = [
        Ran(each.time_range.start, each.time_range.end, each.name)
        for each in profile.events() or ()
        if each.device_type == DeviceType.CUDA
    ]
    if ran and launched:
        result += [ran, launched]
