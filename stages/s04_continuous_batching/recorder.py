"""For checks, benchmarks and notebooks: who computed what in each step of an engine, and who had to wait."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from stages.s04_continuous_batching.engine import Engine, Events
from stages.s04_continuous_batching.plan import Plan, StepResult

Kind = Literal["prefill", "chunk", "decode"]
State = Literal["prefill", "chunk", "decode", "preempted", "waiting", ""]


@dataclass(frozen=True)
class RecordedRow:
    """What one request computed: positions [start, start + computed). `reused` tokens before it were there already.

    prefill: all that was missing, in one row. chunk: a part of it. decode: the newest token.
    """

    request: int
    kind: Kind
    start: int
    computed: int
    reused: int  # of a prefix, a sibling's prompt, or K/V from host memory; told once, by the first row
    samples: bool


@dataclass(frozen=True)
class RecordedBatch:
    """One step. Requests are named by their ids."""

    seconds: float  # when its tokens were there, since the recording began
    rows: tuple[RecordedRow, ...]
    preempted: tuple[int, ...]
    waiting: tuple[int, ...]  # when the step had been planned, the preempted ones included
    tokens: tuple[int, ...]  # whose token came, once for each token


@contextmanager
def recorded_batches(engine: Engine) -> Iterator[list[RecordedBatch]]:
    """The steps that the engine makes inside the block, seen from outside; none that fails or is empty."""
    batches: list[RecordedBatch] = []
    scheduler, began = engine.scheduler, time.perf_counter()
    schedule, update = scheduler.schedule, scheduler.update
    complete: set[int] = set()  # requests whose last row ended with their newest token
    planned: dict[int, tuple[tuple[RecordedRow, ...], tuple[int, ...], tuple[int, ...]]] = {}

    def recorded_schedule() -> Plan:
        counts = {request: request.num_preemptions for request in scheduler.running}
        new = set(scheduler.waiting)
        plan = schedule()
        preempted = tuple(request.id for request, count in counts.items() if request.num_preemptions > count)
        complete.difference_update(preempted)
        rows = []
        for row in plan.rows:
            request, span = row.request, row.span
            reused = span.start if request in new else 0
            kind: Kind = "prefill" if row.samples and (request in new or span.start == 0) else "chunk"
            swapped_in = row.samples and span.num_new == 1 and span.start >= request.prompt_len
            if request.id in complete or swapped_in:
                kind = "decode"
            if row.samples:
                complete.add(request.id)
            rows.append(RecordedRow(request.id, kind, span.start, span.num_new, reused, row.samples))
        planned[id(plan)] = tuple(rows), preempted, tuple(request.id for request in scheduler.waiting)
        return plan

    def recorded_update(plan: Plan, result: StepResult) -> Events:
        events = update(plan, result)
        tokens = tuple(request.id for request, event in events if event.token_id >= 0)
        rows, preempted, waiting = planned.pop(id(plan))
        if rows or waiting:
            batches.append(RecordedBatch(time.perf_counter() - began, rows, preempted, waiting, tokens))
        return events

    scheduler.schedule, scheduler.update = recorded_schedule, recorded_update  # type: ignore[method-assign]
    try:
        yield batches
    finally:
        del scheduler.schedule, scheduler.update


def timeline(batches: Sequence[RecordedBatch]) -> tuple[dict[int, list[State]], dict[int, list[int]]]:
    """Per request, for each step: what it did, and how many tokens it computed. As `reference.draw.batch_timeline`."""
    names = sorted({name for batch in batches for name in (*batch.waiting, *(row.request for row in batch.rows))})
    states: dict[int, list[State]] = {name: [""] * len(batches) for name in names}
    computed: dict[int, list[int]] = {name: [0] * len(batches) for name in names}
    for step, batch in enumerate(batches):
        for name in batch.waiting:
            states[name][step] = "waiting"
        for name in batch.preempted:
            states[name][step] = "preempted"
        for row in batch.rows:
            states[row.request][step], computed[row.request][step] = row.kind, row.computed
    return states, computed


def computed_and_reused(batches: Sequence[RecordedBatch]) -> dict[int, tuple[int, int]]:
    """Per request, tokens that were computed for it (recomputed ones again) and tokens that it found."""
    totals: dict[int, tuple[int, int]] = {}
    for row in (row for batch in batches for row in batch.rows):
        computed, reused = totals.get(row.request, (0, 0))
        totals[row.request] = computed + row.computed, reused + row.reused
    return totals


def token_gaps(batches: Sequence[RecordedBatch], request: int) -> list[tuple[float, float]]:
    """(when, seconds since the one before) of each of a request's tokens but its first: its inter-token latencies."""
    times = [batch.seconds for batch in batches for name in batch.tokens if name == request]
    return [(now, now - before) for before, now in zip(times, times[1:], strict=False)]
