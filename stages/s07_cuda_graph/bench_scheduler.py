"""What a decode step costs on the host without a model: `python -m stages.s07_cuda_graph.bench_scheduler`.

Three ways, with the plain paged cache and with the prefix cache: row by row as in the stages before, row by row with
placeholders, and as a group. The result is `s07_scheduler` in reference/results.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from reference.bench.harness import RESULTS, Result
from stages.s02_kv_cache.bench import save
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.bench import microseconds
from stages.s04_continuous_batching.plan import Plan, StepResult
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.scheduler_cost import BLOCK_SIZE, TOKEN, made_up, step_costs
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s05_chunked_prefill.scheduler import ChunkedScheduler
from stages.s06_prefix_cache.prefix_cache import PrefixCache
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler
from stages.s07_cuda_graph.device_state import DeviceState
from stages.s07_cuda_graph.slots import Slots
from stages.s07_cuda_graph.steady import GroupPlan, group_result
from stages.s07_cuda_graph.steady_scheduler import SteadyScheduler

WAYS = {
    "stage 05, row by row": ChunkedScheduler,
    "placeholders, row by row": AheadScheduler,
    "a group": SteadyScheduler,
}
CACHES = {"paged cache": PagedCache, "prefix cache": PrefixCache}


def answer(plan: Plan) -> StepResult:
    """The same token for every row, as the runner hands it out."""
    return group_result([TOKEN.token_id] * len(plan.rows)) if isinstance(plan, GroupPlan) else made_up(plan)


def edits(rows: int, tokens: int) -> Callable[[Plan], object]:
    """What the runner of this stage derives from a plan: what has changed."""
    state = DeviceState(rows, -(-tokens // BLOCK_SIZE), 1, torch.device("cpu"))
    slots = Slots(state, BLOCK_SIZE)

    def follow(plan: Plan) -> None:
        slots.follow_group(plan) if isinstance(plan, GroupPlan) else slots.follow(plan)
        state.take_edits()

    return follow


def make(way: type[ChunkedScheduler], cache: type[PagedCache], blocks: int, rows: int, tokens: int) -> Scheduler:
    return way(cache(blocks, BLOCK_SIZE), SwapSpace(0), rows, tokens)


def measure(counts: Sequence[int], steps: int, prompt_len: int = 512) -> Result:
    """Microseconds on the host per decode step, with tokens out of thin air instead of a model."""
    result = Result(
        "s07_scheduler",
        "While nobody comes or goes a step does not ask each row what it wants: a few counters per row are left, and "
        "what blocks cost, which begin and fill in turns.",
    )
    for count in counts:
        for cache_name, cache in CACHES.items():
            for name, way in WAYS.items():
                prepare = edits(count, prompt_len + steps + 16)
                costs = step_costs(count, steps, partial(make, way, cache), prepare, answer, prompt_len)
                for part, seconds in costs.items():
                    label = "edits" if part == "tensors" else part
                    result.measurements.append(microseconds(f"{count} running, {cache_name}, {name}, {label}", seconds))
    most, both = counts[-1], "schedule and update"
    before, after = (result[f"{most} running, paged cache, {way}, {both}"].median for way in (list(WAYS)[0], "a group"))
    result.wins = f"With {most} rows scheduling and update take {before / after:.1f} times less than in stage 05."
    result.loses = "A step in which somebody comes is planned row by row, and the group is formed anew."
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows and steps: does it run? Keeps nothing")
    parser.add_argument("--out", type=Path, help="folder for the result (default: reference/results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        out = options.out or (Path(scratch) if options.quick else RESULTS)
        save(measure((4, 16), 20, prompt_len=64) if options.quick else measure((1, 16, 64, 256), 1000), out)


if __name__ == "__main__":
    main()
