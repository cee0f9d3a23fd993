"""The load generator: sends requests when they are due and keeps what each met, for any OpenAI-compatible server.

Open loop: requests leave at times fixed before the start, whatever the server does, as users come. Closed loop: a
fixed number is under way, as in a batch job. Only an open loop shows what waiting costs: in a closed one, a slow
server is asked less.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp

from stages.s09_server.listening import event_loop_factory
from stages.s09_server.load_request import Trace, send
from stages.s09_server.load_target import Target

TICK = 0.01  # seconds between two looks at the loop's delay


@dataclass(frozen=True)
class Run:
    """All traces of a load, and how well the client kept up.

    Attributes:
        seconds: From the first request's due time to the last response's end, or to the interruption.
        loop_delays: How much later than asked the event loop woke, a sample every 10 ms, in seconds.
        cpu_seconds: Of this process, all threads.
        interrupted: The run was ended by hand; what was not complete counts as failed.
    """

    traces: list[Trace]
    seconds: float
    loop_delays: list[float]
    cpu_seconds: float
    interrupted: bool = False


def arrivals(count: int, rate: float, rng: Random) -> list[float]:
    """Seconds from the start at which `count` requests are due: a Poisson process of `rate` per second.

    The first is due at once; at an infinite rate, all are.
    """
    if not rate > 0:
        raise ValueError(f"the request rate must be above 0, got {rate}")
    due, now = [], 0.0
    for _ in range(count):
        due.append(now)
        now += rng.expovariate(rate) if math.isfinite(rate) else 0.0
    return due


async def warm_up(target: Target, bodies: Sequence[bytes]) -> None:
    """Requests before the clock starts, one after the other. ValueError if the server does not answer one."""
    async with target.session() as session:
        for body in bodies:
            trace = Trace(time.perf_counter())
            await send(session, target.url(target.endpoint), body, trace)
            if trace.error is not None:
                raise ValueError(f"a trial request failed, {trace.error}: {trace.detail or 'no more is known'}")


async def drive(
    target: Target,
    bodies: Sequence[bytes],
    due: Sequence[float],
    max_concurrency: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> Run:
    """Send each body when it is due, at most `max_concurrency` at a time; `done` is called after each response.

    Due times are absolute: when the client is late with one request, the next are not late for it.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise ValueError(f"max concurrency must be at least 1, got {max_concurrency}")
    gate = asyncio.Semaphore(max_concurrency or len(bodies) or 1)
    url = target.url(target.endpoint)
    delays: list[float] = []
    cpu, start = time.process_time(), time.perf_counter()
    traces = [Trace(start + after) for after in due]

    async def one(session: aiohttp.ClientSession, body: bytes, trace: Trace) -> None:
        async with gate:
            await send(session, url, body, trace)
        done()

    interrupted = False
    async with target.session() as session:
        watch = asyncio.ensure_future(_watch_loop(delays))
        tasks = []
        try:
            for body, trace in zip(bodies, traces, strict=True):
                if (wait := trace.due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                trace.woken = time.perf_counter()
                tasks.append(asyncio.ensure_future(one(session, body, trace)))
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            interrupted = True
            await _cancel(*tasks)
        await _cancel(watch)
    for trace in traces:
        if trace.end == 0.0:
            trace.fail("interrupted")
    end = time.perf_counter() if interrupted else max((trace.end for trace in traces), default=start)
    return Run(traces, end - start, delays, time.process_time() - cpu, interrupted)


async def _watch_loop(delays: list[float]) -> None:
    """Ask to be woken every `TICK`, and write down how much later it happens."""
    while True:
        wanted = time.perf_counter() + TICK
        await asyncio.sleep(TICK)
        delays.append(time.perf_counter() - wanted)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


def run_on_loop(coroutine: Any) -> Any:
    """`asyncio.run`, on the faster loop where there is one: it reads twice as many chunks a second."""
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        return runner.run(coroutine)
