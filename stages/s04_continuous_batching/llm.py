"""`LLM` on an engine: all answers are queued at once, and the scheduler decides who computes when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

from stages.s01_forward.frontend import BaseLLM
from stages.s01_forward.inputs import PromptRequest
from stages.s01_forward.outputs import TokenEvent
from stages.s01_forward.sampling_params import check_float, check_int
from stages.s02_kv_cache.kv_store import KVStore, kv_bytes_per_token, tokens_held, tokens_that_fit
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.ops import PagedOps, paged_ops
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Engine
from stages.s04_continuous_batching.interrupts import held_back
from stages.s04_continuous_batching.memory import kv_budget_mb
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.runner import Runner
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace

MAX_SEQS, MAX_SWAP_MB = 2**16, 2**20  # the books have a line for each row and for each of the host's blocks


class LLM(BaseLLM):
    """Requests join and leave the batch at every step.

    max_num_seqs: answers computed at once. max_num_batched_tokens: tokens of one step; by default what the longest
    sequence needs. kv_cache_mb: the cache's budget in units of 2^20 bytes; by default what `memory_share` of a GPU
    leaves. swap_mb: host memory for the K/V of preempted answers; 0: compute it again.
    """

    ops: PagedOps

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        kv_cache_mb: float | None = None,
        memory_share: float = 0.9,
        block_size: int = 16,
        swap_mb: float = 0,
        **options: Any,
    ) -> None:
        check_int("max_num_seqs", max_num_seqs, 1, MAX_SEQS)
        check_int("block_size", block_size, 1)
        check_float("swap_mb", swap_mb, 0, MAX_SWAP_MB)
        super().__init__(model, **options)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = self.token_budget(max_num_batched_tokens)
        budget = kv_budget_mb(
            self.model,
            kv_cache_mb=kv_cache_mb,
            memory_share=memory_share,
            num_tokens=self.max_num_batched_tokens,
            num_rows=max_num_seqs,
            reserved=self.reserved_bytes(),
        )
        budget *= self.kv_share()
        blocks = {"block_size": block_size, "spare_blocks": 1}  # the spare one is the dummy
        if kv_cache_mb is None:
            self.shorten(tokens_held(budget, self.config, self.dtype, **blocks))
        tokens = tokens_that_fit(budget, self.config, self.dtype, self.max_model_len, **blocks)
        used = max_num_seqs * -(-self.max_model_len // block_size)  # blocks; more could never be used
        self.engine = self.build_engine(1 + min(used, tokens // block_size), block_size, swap_mb)
        self.inboxes: dict[Request, deque[TokenEvent]] = {}

    def token_budget(self, wanted: int | None) -> int:
        """Tokens of one step. In this stage a prompt is computed whole, so every prompt must fit."""
        budget = max(2048, self.max_model_len) if wanted is None else wanted
        check_int("max_num_batched_tokens", budget, self.max_model_len)
        return budget

    def kv_share(self) -> float:
        """How much of the KV budget is the model's own: all, until there is a second model (stage 08)."""
        return 1.0

    def reserved_bytes(self) -> int:
        """What the engine takes of a GPU beside weights, activations and cache."""
        return 0

    def build_engine(self, num_blocks: int, block_size: int, swap_mb: float) -> Engine:
        """The cache's books and its memory; the scheduler over the one, the runner over the other."""
        config, where = self.config, {"device": self.device, "dtype": self.dtype}
        swap = SwapSpace(int(swap_mb * 2**20) // (block_size * kv_bytes_per_token(config, self.dtype)))
        host_store = KVStore(config, swap.num_blocks, block_size, device="cpu", dtype=self.dtype)
        store = KVStore(config, num_blocks, block_size, **where)
        return self.make_engine(self.make_scheduler(self.make_cache(num_blocks, block_size), swap), store, host_store)

    def make_engine(self, scheduler: Scheduler, store: KVStore, host_store: KVStore) -> Engine:
        """The scheduler over the books, the runner over the memory."""
        config, block_size = self.config, store.data.shape[3]
        shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, block_size, self.dtype.itemsize)
        return Engine(scheduler, Runner(self.model, self.ops, store, shape, host_store))

    def make_cache(self, num_blocks: int, block_size: int) -> PagedCache:
        """The books of the blocks."""
        return PagedCache(num_blocks, block_size)

    def make_scheduler(self, cache: PagedCache, swap: SwapSpace) -> Scheduler:
        """Who decides what is computed next."""
        return Scheduler(cache, swap, self.max_num_seqs, self.max_num_batched_tokens)

    def make_ops(self) -> PagedOps:
        """Triton's where there is a GPU for it."""
        return paged_ops(self.device)

    def run(self, requests: Rows[PromptRequest]) -> Iterator[TokenEvent]:
        """Queue everything, then step until all of it has ended. Closing the stream early aborts the rest.

        Several streams may be read in turns: whoever steps the engine fills the others' inboxes too.
        """
        inbox: deque[TokenEvent] = deque()
        mine: list[Request] = []
        try:
            for request in requests:
                with held_back():
                    mine += self.add(request, inbox)
            while inbox or any(entry.state != "finished" for entry in mine):
                if inbox:
                    event = inbox.popleft()
                    requests[event.request].note_time()
                    yield event
                else:
                    self.step()
        finally:
            with held_back():
                for entry in mine:
                    self.forget(entry, requests[entry.generation.request])

    def forget(self, entry: Request, request: PromptRequest) -> None:
        """End an answer that nobody waits for any longer; what it learned of its prompt goes to the caller."""
        self.engine.abort(entry)
        del self.inboxes[entry]
        if entry.generation.index == 0:
            request.num_cached_tokens = entry.num_cached_tokens
            if request.params.prompt_logprobs is not None and not entry.needs_prompt_logits:
                request.prompt_logprobs = entry.prompt_logprobs

    @held_back()
    def step(self) -> None:
        """Step the engine; each event goes to the inbox of its stream. An error is raised in this stream only."""
        try:
            events = self.engine.step()
        except BaseException:
            events = self.engine.failed
            raise
        finally:
            for entry, event in events:
                self.inboxes[entry].append(event)

    def add(self, request: PromptRequest, inbox: deque[TokenEvent]) -> list[Request]:
        """Queue the answers to one prompt; the first computes the prompt, the others share it."""
        entries: list[Request] = []
        for generation in request.generations:
            sibling = entries[0] if entries else None
            entry = self.engine.add_request(generation, priority=request.params.priority, sibling=sibling)
            self.inboxes[entry] = inbox
            entries.append(entry)
        return entries
