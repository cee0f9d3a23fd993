"""`LLM` on blocks: memory is taken as answers grow, and the answers to one prompt share what they have in common."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.s01_forward.frontend import BaseLLM
from stages.s01_forward.generation import Generation
from stages.s01_forward.inputs import PromptRequest
from stages.s01_forward.llm import score_prompt
from stages.s01_forward.outputs import TokenEvent
from stages.s01_forward.sampler import sample
from stages.s01_forward.sampling_params import check_float, check_int
from stages.s02_kv_cache.batch import Batch, Row
from stages.s02_kv_cache.kv_store import DEFAULT_KV_MB, KVStore, tokens_held, tokens_that_fit
from stages.s02_kv_cache.sequence import Sequence
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.context import PagedContext
from stages.s03_paged_kv.ops import PagedOps, paged_ops
from stages.s03_paged_kv.paged_cache import PagedCache

Wave = list[tuple[PromptRequest, list[Generation]]]


class LLM(BaseLLM):
    """Answers run in waves of as many as the blocks can carry to their end, `max_num_seqs` at most.

    kv_cache_mb: the cache's budget in units of 2^20 bytes, 2,048 by default, when `max_model_len` is lowered if it must
    be. block_size: tokens per block; on a GPU 16, 32 or 64.
    """

    ops: PagedOps

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        max_num_seqs: int = 64,
        kv_cache_mb: float | None = None,
        block_size: int = 16,
        **options: Any,
    ) -> None:
        check_int("max_num_seqs", max_num_seqs, 1)
        check_int("block_size", block_size, 1)
        check_float("kv_cache_mb", DEFAULT_KV_MB if kv_cache_mb is None else kv_cache_mb, 0, open_low=True)
        super().__init__(model, **options)
        self.max_num_seqs = max_num_seqs
        blocks: dict[str, int] = {"block_size": block_size, "spare_blocks": 1}  # the spare one is the dummy
        if kv_cache_mb is None:
            kv_cache_mb = DEFAULT_KV_MB
            self.shorten(tokens_held(kv_cache_mb, self.config, self.dtype, **blocks))
        tokens = tokens_that_fit(kv_cache_mb, self.config, self.dtype, self.max_model_len, **blocks)
        needed = max_num_seqs * -(-self.max_model_len // block_size)  # blocks; more could never be used
        self.cache = PagedCache(1 + min(needed, tokens // block_size), block_size)
        self.unpromised = self.cache.pool.num_free  # blocks that no wave counts on
        self.store = KVStore(self.config, self.cache.pool.num_blocks, block_size, device=self.device, dtype=self.dtype)
        self.shape = AttentionShape(
            self.config.num_heads, self.config.num_kv_heads, self.config.head_dim, block_size, self.dtype.itemsize
        )

    def make_ops(self) -> PagedOps:
        """Triton's where there is a GPU for it."""
        return paged_ops(self.device)

    def run(self, requests: Rows[PromptRequest]) -> Iterator[TokenEvent]:
        self.check_room(requests)
        for request in requests:
            score_prompt(self.model, request)
        for wave, blocks in self.waves(requests):
            self.unpromised -= blocks
            try:
                yield from self.run_wave(wave)
            finally:
                self.unpromised += blocks

    def blocks_of(self, request: PromptRequest, generation: Generation) -> tuple[int, int]:
        """(shared, own): full blocks of the prompt, held once for all its answers, and those of this answer alone."""
        prompt = len(request.prompt_token_ids)
        shared = prompt // self.cache.block_size
        # The last token is never written: nothing comes after it.
        return shared, self.cache.blocks_for(prompt + generation.token_limit - 1) - shared

    def check_room(self, requests: Rows[PromptRequest]) -> None:
        """Refuse what streams that were begun before leave no room for, before anything is computed."""
        pairs = [(request, each) for request in requests for each in request.generations if not each.finish_reason]
        needed = max((sum(self.blocks_of(*pair)) for pair in pairs), default=0)
        if needed > self.unpromised:
            raise RuntimeError(
                f"an answer may need {needed} blocks, and streams that were begun before leave {self.unpromised}: "
                "read them to their end or close them"
            )

    def waves(self, requests: Rows[PromptRequest]) -> Iterator[tuple[Wave, int]]:
        """Group answers so that each wave fits the pool even if every answer grows to its limit.

        Yields a wave and the blocks that it may come to hold. Another stream, read in turns with this one, may be in
        the middle of its own wave: what that one may still take is not free either.
        """
        wave: Wave = []
        count = blocks = 0
        for request in requests:
            for generation in request.generations:
                if generation.finish_reason is not None:
                    continue
                shared, own = self.blocks_of(request, generation)
                joins = bool(wave) and wave[-1][0] is request
                full = count == self.max_num_seqs or blocks + own + (0 if joins else shared) > self.unpromised
                if wave and full:
                    yield wave, blocks
                    wave, count, blocks, joins = [], 0, 0, False
                self.check_room([request])  # a stream may have been begun since
                if joins:
                    wave[-1][1].append(generation)
                else:
                    wave.append((request, [generation]))
                count += 1
                blocks += own + (0 if joins else shared)
        if wave:
            yield wave, blocks

    def run_wave(self, wave: Wave) -> Iterator[TokenEvent]:
        """Prefill each prompt once, fork it for its further answers, then step all rows until each has ended."""
        prompts = [Sequence(list(request.prompt_token_ids)) for request, _ in wave]
        rows: list[Row] = []
        try:
            logits = self.step(prompts)  # [prompts, V]
            for sequence, (request, generations) in zip(prompts, wave, strict=True):
                forks = [sequence, *(self.cache.fork(sequence) for _ in generations[1:])]
                rows += [Row(request, *pair) for pair in zip(generations, forks, strict=True)]
            logits = logits.repeat_interleave(torch.tensor([len(gens) for _, gens in wave], device=self.device), dim=0)
            running = list(rows)
            while running:
                for row, token in zip(running, sample(logits, [row.generation for row in running]), strict=True):
                    event = row.generation.append(token)
                    row.sequence.token_ids.append(token.token_id)
                    row.request.note_time()
                    yield event
                    if event.finish_reason is not None:
                        self.cache.release(row.sequence)
                running = [row for row in running if row.generation.finish_reason is None]
                if running:
                    logits = self.step([row.sequence for row in running])  # [R, V]
        finally:
            for sequence in [*prompts, *(row.sequence for row in rows)]:
                self.cache.release(sequence)

    def step(self, sequences: Rows[Sequence]) -> Tensor:
        """Compute every sequence's new tokens; the logits [R, V] of the newest."""
        for sequence in sequences:
            copies = self.cache.reserve(sequence, sequence.num_tokens)
            if copies is None:
                raise RuntimeError(f"a wave was started that {self.cache.pool.num_blocks - 1} blocks cannot carry")
            self.store.copy_blocks(copies)
        batch = Batch.of(sequences, self.device)
        # Triton's kernels run on the GPU that is PyTorch's current one: here, the engine's own.
        with torch.inference_mode(), torch.cuda.device_of(batch.input_ids):
            ctx = PagedContext.of(sequences, batch, self.store, self.ops, self.shape)
            hidden = self.model(batch.input_ids, batch.positions, ctx)  # [T, H]
            logits = self.model.logits(hidden[batch.last_tokens])
        for sequence in sequences:
            self.cache.commit(sequence, sequence.num_tokens)
        return logits
