"""From a plan to tensors, through the model, to tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stages.s01_forward.model import Model
from stages.s01_forward.outputs import NOT_FINITE, SampledToken, TokenLogprob
from stages.s01_forward.sampler import sample, token_logprobs, top_logprobs
from stages.s02_kv_cache.batch import Batch
from stages.s02_kv_cache.kv_store import KVStore
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.context import PagedContext
from stages.s03_paged_kv.ops import PagedOps
from stages.s04_continuous_batching.plan import Handle, Plan, PlannedRow, RowResult, StepResult


class Runner:
    """Owns the model's side of the cache. Knows nothing of queues; does what the plan says.

    host_store: where the K/V of preempted requests waits; empty if swapping is off.
    """

    def __init__(self, model: Model, ops: PagedOps, store: KVStore, shape: AttentionShape, host_store: KVStore) -> None:
        self.model, self.ops, self.store, self.shape, self.host_store = model, ops, store, shape, host_store
        self.device = store.data.device

    @torch.inference_mode()
    def execute(self, plan: Plan) -> Handle:
        """Move blocks, run the model over all rows at once, and sample for the rows that have no more to compute."""
        self.host_store.copy_blocks(plan.swap_out, source=self.store)
        self.store.copy_blocks(plan.swap_in, source=self.host_store)
        self.store.copy_blocks(plan.copies)
        if not plan.rows:
            return Handle(StepResult(()))

        spans = [row.span for row in plan.rows]
        batch = Batch.of(spans, self.device)
        ctx = PagedContext.of(spans, batch, self.store, self.ops, self.shape)
        with torch.cuda.device_of(batch.input_ids):  # the GPU on which Triton's kernels run
            hidden = self.model(batch.input_ids, batch.positions, ctx)  # [T, H]
        sampling = [i for i, row in enumerate(plan.rows) if row.samples and row.request.generation.token_limit > 0]
        tokens = {}
        if sampling:
            logits = self.model.logits(hidden[[batch.last_tokens[i] for i in sampling]])  # [N, V]
            tokens = dict(
                zip(sampling, sample(logits, [plan.rows[i].request.generation for i in sampling]), strict=True)
            )
        return Handle(
            StepResult(
                tuple(
                    row_result(self.model, tokens.get(i), row, hidden[start:end])
                    for i, (row, start, end) in enumerate(zip(plan.rows, batch.cu_q, batch.cu_q[1:], strict=False))
                )
            )
        )


def row_result(model: Model, token: SampledToken | None, row: PlannedRow, hidden: Tensor) -> RowResult:
    """A row's token, if it sampled, and its prompt's scores; a score that is NaN ends the request."""
    scores = prompt_logprobs(model, row, hidden)
    error = NOT_FINITE if any(math.isnan(score.logprob) for score in scores) else None
    return RowResult(() if token is None else (token,), scores, error)


def prompt_logprobs(model: Model, row: PlannedRow, hidden: Tensor) -> tuple[TokenLogprob, ...]:
    """Of the prompt tokens that follow those computed here, hidden [T of this row, H]; those known are left out."""
    request, count = row.request, row.request.generation.params.prompt_logprobs
    first = max(row.span.start, len(request.prompt_logprobs) - 1)
    last = min(row.span.end, request.prompt_len - 1)
    if count is None or not request.needs_prompt_logits or first >= last:
        return ()
    logprobs = token_logprobs(model.logits(hidden[first - row.span.start : last - row.span.start]))
    following = request.sequence.token_ids[first + 1 : last + 1]
    return tuple(top_logprobs(each, token_id, count) for each, token_id in zip(logprobs, following, strict=True))
