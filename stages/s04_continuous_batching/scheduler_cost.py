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
SHAPE = AttentionShape(16, 8, 128, BLOCK_SIZE, 2)
MakeScheduler = Callable[[int, int, int], Scheduler]  # from blocks, rows and tokens of a step


def plain_scheduler(num_blocks: int, rows: int, tokens: int) -> Scheduler:
    """This stage's own."""
    return Scheduler(PagedCache(num_blocks, BLOCK_SIZE), SwapSpace(0), rows, tokens)


def made_up(plan: Plan) -> StepResult:
    """The same token for every row that samples."""
    return StepResult(tuple(RowResult((TOKEN,) if row.samples else ()) for row in plan.rows))


def tensors_of(plan: Plan) -> None:
    """What `Runner.execute` does before and after the model, but for copies to a device."""
    spans = [row.span for row in plan.rows]
    batch = Batch.of(spans, CPU)
    table = block_tables(spans)
    torch.tensor(slot_mapping(spans, BLOCK_SIZE))
    make_plan([span.num_new for span in spans], batch.seq_lens, table, SHAPE)
    SamplingBatch.of([row.request.generation for row in plan.rows], CPU)


def step_costs(
    rows: int,
    steps: int,
    make: MakeScheduler = plain_scheduler,
    prepare: Callable[[Plan], object] = tensors_of,
    answer: Callable[[Plan], StepResult] = made_up,
    prompt_len: int = 512,
) -> dict[str, list[float]]:
    """Seconds of each step with so many requests running, none of which ends: by part.

    schedule: from queues to a plan. tensors: what the runner derives from it, up to the attention kernel's plan and the
    sampler's columns, on the CPU. update: from tokens to events, the answers' own bookkeeping included.
    """
    limit = steps + 16
    scheduler = make(1 + rows * -(-(prompt_len + limit) // BLOCK_SIZE), rows, rows * (prompt_len + limit))
    params = SamplingParams(max_tokens=limit, ignore_eos=True)
    for row in range(rows):
        prompt = [(row * 7919 + place) % 50_000 for place in range(prompt_len - row % 16)]  # blocks fill in turns
        scheduler.add(Request(row, Generation(prompt, params, seed=row, token_limit=limit)))

    costs: dict[str, list[float]] = {"schedule": [], "update": [], "schedule and update": [], "tensors": []}
    gc.collect()
    gc.freeze()  # what is there already is not looked at again
    try:
        for step in range(-4, steps):  # the prompts, and warm
            start = time.perf_counter()
            plan = scheduler.schedule()
            planned = time.perf_counter()
            prepare(plan)
            prepared = time.perf_counter()
            result = answer(plan)
            came = time.perf_counter()
            scheduler.update(plan, result)
            updated = time.perf_counter()
            if step >= 0:
                costs["schedule"].append(planned - start)
                costs["update"].append(updated - came)
                costs["schedule and update"].append(planned - start + updated - came)
                costs["tensors"].append(prepared - planned)
    finally:
        gc.unfreeze()
    return costs
