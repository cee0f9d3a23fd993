"""What a load met, in figures: latencies, throughput, goodput, failures, and whether the client was good enough.

The words are those of `vllm bench serve`. TTFT is from sending to the first text. ITL is the time between chunks, which
is the time between tokens where a chunk carries one; tokens per chunk are told. TPOT is the time of an answer after its
first token, by the server's count of further tokens. E2EL is from sending to the end of the response.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stages.s09_server.load import Run
from stages.s09_server.load_request import Trace

NAMES = ("ttft", "itl", "tpot", "e2el")
PERCENTILES = (50.0, 90.0, 99.0)
LATE = 0.01  # seconds by which the client may be late at the 99th percentile before it is told
BUSY = 0.9  # share of a core


@dataclass(frozen=True)
class Spread:
    """Seconds: mean, percentiles by their number, longest, and how many they are of."""

    mean: float
    percentiles: dict[float, float]
    longest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float]) -> Spread | None:
        """None of no values."""
        if not values:
            return None
        found = np.percentile(values, percentiles)
        named = {at: float(value) for at, value in zip(percentiles, found, strict=True)}
        return cls(float(np.mean(values)), named, max(values), len(values))


@dataclass(frozen=True)
class Report:
    """Attributes:
    completed, failed: Requests. Latencies and tokens are of the completed ones; `seconds` is the whole run's.
    errors: How many of each kind, and the first words about one of them.
    latencies: By name as in `NAMES`.
    counted: The server told its count of tokens for every answer; otherwise tokens are chunks.
    good: Completed requests that met every goal; None if there was no goal.
    lateness: By how much requests left after their due time.
    """

    completed: int
    failed: int
    seconds: float
    errors: dict[str, tuple[int, str]]
    latencies: dict[str, Spread | None]
    prompt_tokens: int
    output_tokens: int
    chunks: int
    counted: bool
    good: int | None
    goals: dict[str, float]
    lateness: Spread | None
    loop_delay: Spread | None
    client_cpu: float  # share of a core
    interrupted: bool

    def per_second(self, amount: float) -> float:
        return amount / self.seconds if self.seconds > 0 else 0.0

    @property
    def warnings(self) -> list[str]:
        """What the reader must know before believing the figures."""
        said = []
        for spread, who in ((self.lateness, "requests left"), (self.loop_delay, "the client's loop woke")):
            if spread is not None and (late := spread.percentiles[99.0]) > LATE:
                said.append(f"{who} up to {1e3 * late:.0f} ms late (p99): this client adds to what it measures")
        if self.client_cpu > BUSY:
            said.append(f"the client used {100 * self.client_cpu:.0f} % of a core: it may be the bottleneck")
        if not self.counted and self.completed:
            said.append("the server told no usage: tokens are counted as chunks")
        if self.interrupted:
            said.append("the run was interrupted")
        return said


def summarise(run: Run, goals: Mapping[str, float], percentiles: Sequence[float] = PERCENTILES) -> Report:
    """`goals`: seconds at most, by name as in `NAMES`; for itl, of the longest gap of an answer."""
    done = [trace for trace in run.traces if trace.error is None]
    kinds = Counter(trace.error for trace in run.traces if trace.error is not None)
    words = {trace.error: trace.detail for trace in reversed(run.traces) if trace.error is not None}
    values = {
        "ttft": [trace.ttft for trace in done],
        "itl": [gap for trace in done for gap in trace.gaps],
        "tpot": [trace.tpot for trace in done if trace.tpot is not None],
        "e2el": [trace.e2el for trace in done],
    }
    own = (50.0, 99.0)
    return Report(
        completed=len(done),
        failed=len(run.traces) - len(done),
        seconds=run.seconds,
        errors={kind: (count, words[kind]) for kind, count in kinds.most_common()},
        latencies={name: Spread.of(values[name], percentiles) for name in NAMES},
        prompt_tokens=sum(trace.usage.prompt_tokens for trace in done if trace.usage),
        output_tokens=sum(trace.output_tokens for trace in done),
        chunks=sum(len(trace.times) for trace in done),
        counted=all(trace.usage is not None for trace in done),
        good=sum(met(trace, goals) for trace in done) if goals else None,
        goals=dict(goals),
        lateness=Spread.of([trace.woken - trace.due for trace in run.traces if trace.woken], own),
        loop_delay=Spread.of(run.loop_delays, own),
        client_cpu=run.cpu_seconds / run.seconds if run.seconds > 0 else 0.0,
        interrupted=run.interrupted,
    )


def met(trace: Trace, goals: Mapping[str, float]) -> bool:
    """Whether an answer kept all goals. One without a second token keeps every goal of itl and tpot."""
    reached = {
        "ttft": trace.ttft,
        "itl": max(trace.gaps, default=0.0),
        "tpot": trace.tpot or 0.0,
        "e2el": trace.e2el,
    }
    return all(reached[name] <= most for name, most in goals.items())


def read_goals(given: Sequence[str]) -> dict[str, float]:
    """["ttft:200", "itl:50"], in milliseconds, as seconds by name. ValueError for any other form."""
    goals = {}
    for goal in given:
        name, _, most = goal.partition(":")
        try:
            goals[name] = float(most) / 1000
        except ValueError:
            goals[name] = -1.0
        if name not in NAMES or not 0 < goals[name] < math.inf:
            number = "a finite number of milliseconds above 0"
            raise ValueError(f"a goal is one of {', '.join(NAMES)}, a colon and {number}, got {goal!r}")
    return goals


def read_percentiles(given: str) -> list[float]:
    """`50,99.9` as numbers. ValueError for anything but numbers from 0 to 100."""
    try:
        asked = [float(each) for each in given.split(",")]
    except ValueError:
        asked = [-1.0]
    if not all(0 <= each <= 100 for each in asked):
        raise ValueError(f"percentiles are numbers from 0 to 100 with commas between, got {given!r}")
    return asked
