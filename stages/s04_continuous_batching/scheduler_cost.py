"""For benchmarks: what a decode step costs on the host, with a runner that makes up its tokens."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import SampledToken
from stages.s01_forward.sampler import SamplingBatch
from stages.s01_forward.sampling_params import SamplingParams
from stages.s02_kv_cache.batch import Batch
from stages.s03_paged_kv.attention_plan import AttentionShape, make_plan
from stages.s03_paged_kv.context import block_tables, slot_mapping
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.plan import Plan, RowResult, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace

BLOCK_SIZE = 16
CPU = torch.device("cpu")
TOKEN = SampledToken(5)
MakeScheduler = Callable[[int, int, int], Scheduler]  # from blocks, rows and tokens of a step


def plain_scheduler(num_blocks: int, rows: int, tokens: int) -> Scheduler:
    """This stage's own."""
    return Scheduler(PagedCache(num_blocks, BLOCK_SIZE), SwapSpace(0), rows, tokens)


def made_up(plan: Plan) -> StepResult:
    """The same token for every row that samples."""
    return StepResult(tuple(RowResult((TOKEN,) if row.samples else ()) for row in plan.rows))


def step_costs(
    rows: int, steps: int, make: MakeScheduler = plain_scheduler, prompt_len: int = 512
) -> dict[str, list[float]]:
    """Seconds of each step with so many requests running, none of which ends: by part.

    schedule: from queues to a plan. update: from tokens to events, the answers' own bookkeeping included. tensors: what
    the runner derives from a plan, up to the attention kernel's plan and the sampler's columns, on the CPU.
    """
    limit = steps + 16
    scheduler = make(1 + rows * -(-(prompt_len + limit) // BLOCK_SIZE), rows, rows * (prompt_len + limit))
    params = SamplingParams(max_tokens=limit, ignore_eos=True)
    for row in range(rows):
        prompt = [(row * 7919 + place) % 50_000 for place in range(prompt_len - row % 16)]  # blocks fill in turns
        scheduler.add(Request(row, Generation(prompt, params, seed=row, token_limit=limit)))
    for _ in range(4):  # the prompts, and warm
        plan = scheduler.schedule()
        scheduler.update(plan, made_up(plan))

    shape = AttentionShape(16, 8, 128, BLOCK_SIZE, 2)
    costs: dict[str, list[float]] = {"schedule": [], "update": [], "schedule and update": [], "tensors": []}
    gc.collect()
    gc.freeze()  # what is there already is not looked at again
    try:
        for _ in range(steps):
            start = time.perf_counter()
            plan = scheduler.schedule()
            planned = time.perf_counter()
            result = made_up(plan)
            came = time.perf_counter()
            scheduler.update(plan, result)
            updated = time.perf_counter()
            costs["schedule"].append(planned - start)
            costs["update"].append(updated - came)
            costs["schedule and update"].append(planned - start + updated - came)
            costs["tensors"].append(tensor_seconds(plan, shape))
    finally:
        gc.unfreeze()
    return costs


def tensor_seconds(plan: Plan, shape: AttentionShape) -> float:
    """Seconds for what `Runner.execute` does before and after the model, but for copies to a device."""
    spans = [row.span for row in plan.rows]
    start = time.perf_counter()
    batch = Batch.of(spans, CPU)
    table = block_tables(spans)
    torch.tensor(slot_mapping(spans, shape.block_size))
    make_plan([span.num_new for span in spans], batch.seq_lens, table, shape)
    SamplingBatch.of([row.request.generation for row in plan.rows], CPU)
    return time.perf_counter() - start
