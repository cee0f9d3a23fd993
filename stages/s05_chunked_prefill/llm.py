"""`LLM` with a budget of tokens per step."""

from __future__ import annotations

from typing import Any

from stages.s01_forward.sampling_params import check_int
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.llm import LLM as BatchingLLM
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s05_chunked_prefill.scheduler import ChunkedScheduler

DEFAULT_BUDGET, MAX_BUDGET = 2048, 2**20  # tokens of a step


class LLM(BatchingLLM):
    """Prompts are computed in chunks beside the decodes of others.

    max_num_batched_tokens: tokens of a step, 2,048 by default. max_chunk: tokens of one request per step, all of that
    by default.
    """

    def __init__(self, *args: Any, max_chunk: int | None = None, **options: Any) -> None:
        if max_chunk is not None:
            check_int("max_chunk", max_chunk, 1)
        self.max_chunk = max_chunk
        super().__init__(*args, **options)

    def token_budget(self, wanted: int | None) -> int:
        """Any budget will do that lets every running request decode."""
        budget = max(DEFAULT_BUDGET, self.max_num_seqs) if wanted is None else wanted
        check_int("max_num_batched_tokens", budget, self.max_num_seqs, MAX_BUDGET)
        return budget

    def make_scheduler(self, cache: PagedCache, swap: SwapSpace) -> Scheduler:
        """Who decides what is computed next."""
        return ChunkedScheduler(cache, swap, self.max_num_seqs, self.max_num_batched_tokens, self.max_chunk)
