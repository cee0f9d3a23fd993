"""What a long queue costs the host, without a model: `python -m reference.bench waiting`.

A decode step of the whole stage 07 while others wait: behind a full batch, or before a first in the queue for whom no
blocks are left. And what one more in the queue costs: to add, to abort, in bytes. The result is `speed_waiting`.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial
from pathlib import Path

import torch

from reference.bench.harness import RESULTS, Measurement, Result
from reference.bench.report import markdown_table
from stages.s01_forward.generation import Generation
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s02_kv_cache.sequence import Sequence
from stages.s04_continuous_batching.bench import microseconds
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.scheduler_cost import BLOCK_SIZE, step_costs
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s06_prefix_cache.prefix_cache import PrefixCache
from stages.s07_cuda_graph.bench_scheduler import answer, edits
from stages.s07_cuda_graph.steady_scheduler import SteadyScheduler

RUNNING, PROMPT, STEPS = 256, 512, 500
QUEUES = (0, 1000, 10_000)
LATER = 1  # the priority of those who wait, so that they are not the ones who run


def asked(number: int, length: int) -> Request:
    """A request for so many tokens of a prompt unlike any other, and one token more."""
    prompt = [50_000 + (number * 7919 + place) % 50_000 for place in range(length)]  # unlike those who run, too
    return Request(10**6 + number, Generation(prompt, SamplingParams(), seed=number, token_limit=1), priority=LATER)


def with_queue(waiting: int, seats: bool, blocks: int, rows: int, tokens: int) -> Scheduler:
    """A scheduler in which so many wait behind `rows` others. seats: there are free ones, but no blocks for them."""
    cache = PrefixCache(blocks, BLOCK_SIZE)
    scheduler = SteadyScheduler(cache, SwapSpace(0), rows + seats * waiting, tokens)
    for number in range(waiting):
        scheduler.add(asked(number, PROMPT))
    if seats:
        reserve, theirs = cache.reserve, {id(request.sequence) for request in scheduler.waiting}

        def none_for_them(sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
            return None if id(sequence) in theirs else reserve(sequence, num_tokens)

        vars(cache)["reserve"] = none_for_them
    return scheduler


def queue_costs(waiting: int) -> list[Measurement]:
    """Microseconds to add one more request to a queue and to abort one in its middle, and bytes of one that waits."""
    scheduler = with_queue(waiting, False, 1 + PROMPT, 1, 8192)
    seconds: dict[str, list[float]] = {"add": [], "abort in the middle": []}
    for number in range(100):
        request = asked(waiting + number, PROMPT)
        for name, call in {"add": scheduler.add, "abort in the middle": scheduler.abort}.items():
            who = request if name == "add" else scheduler.waiting[len(scheduler.waiting) // 2]
            start = time.perf_counter()
            call(who)
            seconds[name].append(time.perf_counter() - start)
    return [microseconds(f"{waiting:,} waiting: {name}", each) for name, each in seconds.items()]


def waiting_bytes(requests: int) -> float:
    """Host memory of a waiting request with its prompt of PROMPT ids."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = [asked(number, PROMPT) for number in range(requests)]
        return (tracemalloc.get_traced_memory()[0] - before) / len(kept)
    finally:
        tracemalloc.stop()


def measure(queues: Several[int] = QUEUES, running: int = RUNNING, steps: int = STEPS) -> Result:
    """All of it, in microseconds."""
    result = Result(
        "speed_waiting",
        "Nobody looks beyond the first in the queue, and behind a full batch not even at that one: a step costs the "
        "same whether nobody waits or ten thousand do. Adding keeps the queue in order by bisection.",
    )
    ways: dict[str, Callable[..., Scheduler]] = {}
    for waiting in queues:
        ways[f"{waiting:,} waiting"] = partial(with_queue, waiting, False)
    ways[f"{queues[1]:,} waiting, seats but no blocks"] = partial(with_queue, queues[1], True)
    for name, make in ways.items():
        prepare = edits(running, PROMPT + steps + 16)
        costs = step_costs(running, steps, make, prepare, answer, PROMPT)
        for part in ("schedule", "update"):
            result.measurements.append(microseconds(f"{running} running, {name}: {part}", costs[part]))
    for waiting in queues[1:]:
        result.measurements += queue_costs(waiting)
    note = f"its {PROMPT} ids twice: what was asked, and the sequence that grows"
    result.measurements.append(
        Measurement.single("host memory of a waiting request", waiting_bytes(queues[1]), "B", note=note)
    )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(prog="python -m reference.bench waiting", description=__doc__)
    parser.add_argument("--queues", type=int, nargs="+", default=QUEUES, help="requests that wait; the first: few")
    parser.add_argument("--running", type=int, default=RUNNING, help="requests that decode")
    parser.add_argument("--steps", type=int, default=STEPS, help="that are timed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args(arguments)
    if len(options.queues) < 2 or min(options.queues) < 0 or options.queues[1] < 1:
        parser.error(f"--queues wants two lengths or more, the second at least 1, got {options.queues}")
    torch.set_num_threads(1)
    print(markdown_table(measure(options.queues, options.running, options.steps).save(options.out)))


if __name__ == "__main__":
    main()
