"""Where a step's time goes: the host's part by what it does, and the GPU's, in a run of its own beside the timed ones.

The host's: `schedule`, `launch` (the runner's `execute`: from a plan to started kernels), `wait` (until the tokens are
there), `update`, and what is outside of these. The GPU's: from a step's first operation to its last, by a pair of
events around `execute`; the events cost a microsecond each and wait for nothing. In an eager step that span holds the
gaps in which the GPU waits for launches, so the time of the kernels alone is told, too (`measure_kernels`, with the
profiler, last of all).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._C._autograd import DeviceType

from reference.bench.gpu_runs import replaced, run_workload
from reference.bench.harness import Measurement
from reference.bench.plots import stacked
from reference.bench.workloads import Workload
from reference.picture import Picture

PARTS = ("schedule", "launch", "wait", "update", "outside")
ANSWER = 256  # tokens of each answer in such a run, at most
PROFILED = 8  # steps


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
def busy_steps(llm: Any, first: int) -> Iterator[list[float]]:
    """[seconds in which kernels ran, kernels], of one step on average, from the step number `first` on, if profiled.

    Empty on a CPU. Kernels that overlap count once.
    """
    engine, number = llm.engine, 0
    result: list[float] = []
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def step(step: Callable[[], Any] = engine.step) -> Any:
        nonlocal number
        if number == first:
            torch.cuda.synchronize()
            profile.start()
        events = step()
        number += 1
        if number == first + PROFILED:
            torch.cuda.synchronize()
            profile.stop()
        return events

    with replaced(engine, step=step) if llm.device.type == "cuda" else nullcontext():
        yield result
    if number >= first + PROFILED:
        kernels = [each for each in profile.events() or () if each.device_type == DeviceType.CUDA]
        spans = [(each.time_range.start, each.time_range.end) for each in kernels]  # microseconds
        result += [union(spans) / PROFILED / 1e6, len(spans) / PROFILED]


def union(spans: Sequence[tuple[float, float]]) -> float:
    """The length of what intervals cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def measure_split(llm: Any, work: Workload) -> list[Measurement]:
    """Milliseconds of a step and of its parts: medians of the decode steps, and of the steps with prompts the GPU's.

    Where there are hardly any decodes, averages over all steps.
    """
    with split_steps(llm) as steps:
        run_workload(llm, work)
    launched, decodes = [step for step in steps if step.rows], [step for step in steps if step.decodes]
    if len(decodes) <= PROFILED:
        return _split(f"{work.name}, step", steps, lambda seconds: sum(seconds) / len(launched), len(launched))
    found = _split(f"{work.name}, decode step", decodes, _median, len(decodes))
    prompts = [step.gpu for step in launched if not step.decodes and step.gpu is not None]
    if prompts:
        name, note = f"{work.name}, step with prompts: GPU", f"of {len(prompts)} steps"
        found.append(Measurement.single(name, 1000 * _median(prompts), "ms", note=note))
    return found


def measure_kernels(llm: Any, work: Workload) -> list[Measurement]:
    """Milliseconds in which kernels ran, of a decode step near the end; nothing on a CPU, or of few steps."""
    with busy_steps(llm, max(0, max(work.output_lens) - 2 * PROFILED)) as busy:
        run_workload(llm, work)
    if not busy:
        return []
    note = f"{busy[1]:.0f} operations, mean of {PROFILED} steps"
    return [Measurement.single(f"{work.name}, decode step: kernels", 1000 * busy[0], "ms", note=note)]


def _split(
    name: str, steps: Sequence[StepTime], typical: Callable[[Sequence[float]], float], count: int
) -> list[Measurement]:
    times = {f"host, {part}": [step.parts[part] for step in steps] for part in PARTS}
    times["GPU"] = [step.gpu for step in steps if step.gpu is not None]
    whole = 1000 * typical([step.seconds for step in steps])
    return [
        Measurement.single(name, whole, "ms", note=f"of {count} steps"),
        *(Measurement.single(f"{name}: {part}", 1000 * typical(each), "ms") for part, each in times.items() if each),
    ]


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds))


def plot_split(found: Sequence[Measurement], title: str) -> Picture:
    """For each workload a bar of the host's parts, and below it the GPU's."""
    bars: dict[str, dict[str, float]] = {}
    for each in found:
        step, _, part = each.name.partition(": ")
        if part.startswith("host, "):
            bars.setdefault(f"{step}, host", {})[part.removeprefix("host, ")] = each.median
        elif part == "GPU" and f"{step}, host" in bars:
            bars[f"{step}, GPU"] = {"GPU": each.median}
    return stacked(bars, "ms", title)
