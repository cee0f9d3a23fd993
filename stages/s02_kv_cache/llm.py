"""`LLM` with a KV cache: several sequences at once, and one new token each per step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.s01_forward.frontend import BaseLLM
from stages.s01_forward.inputs import PromptRequest
from stages.s01_forward.llm import score_prompt
from stages.s01_forward.outputs import TokenEvent
from stages.s01_forward.sampler import sample
from stages.s01_forward.sampling_params import check_float, check_int
from stages.s02_kv_cache.batch import Batch, Row
from stages.s02_kv_cache.context import CachedContext
from stages.s02_kv_cache.contiguous_cache import ContiguousCache
from stages.s02_kv_cache.kv_store import DEFAULT_KV_MB, KVStore, tokens_held, tokens_that_fit
from stages.s02_kv_cache.sequence import Sequence


class LLM(BaseLLM):
    """Answers run in waves of up to `max_num_seqs`; a wave lasts as long as its longest answer.

    kv_cache_mb: the cache's budget in units of 2^20 bytes, 2,048 by default, when `max_model_len` is lowered if it must
    be. All of it that `max_num_seqs` pages of `max_model_len` tokens need is taken at once.
    """

    def __init__(
        self, model: str | Path = "demo", *, max_num_seqs: int = 8, kv_cache_mb: float | None = None, **options: Any
    ) -> None:
        check_int("max_num_seqs", max_num_seqs, 1)
        check_float("kv_cache_mb", DEFAULT_KV_MB if kv_cache_mb is None else kv_cache_mb, 0, open_low=True)
        super().__init__(model, **options)
        if kv_cache_mb is None:
            kv_cache_mb = DEFAULT_KV_MB
            self.shorten(tokens_held(kv_cache_mb, self.config, self.dtype))
        tokens = tokens_that_fit(kv_cache_mb, self.config, self.dtype, self.max_model_len)
        self.cache = ContiguousCache(min(max_num_seqs, tokens // self.max_model_len), self.max_model_len)
        self.store = KVStore(
            self.config, self.cache.num_pages, self.max_model_len, device=self.device, dtype=self.dtype
        )

    def run(self, requests: Rows[PromptRequest]) -> Iterator[TokenEvent]:
        for request in requests:
            score_prompt(self.model, request)
        rows = (
            Row(request, generation, Sequence(list(request.prompt_token_ids)))
            for request in requests
            for generation in request.generations
            if generation.finish_reason is None
        )
        # Pages may be in the hands of another stream, read in turns with this one.
        while wave := list(itertools.islice(rows, max(1, len(self.cache.free_pages)))):
            yield from self.run_wave(wave)

    def run_wave(self, wave: list[Row]) -> Iterator[TokenEvent]:
        """Step all rows until each has ended; pages go back as soon as their answer is complete, or on an error."""
        try:
            running = wave
            while running:
                logits = self.step([row.sequence for row in running])  # [R, V]
                for row, token in zip(running, sample(logits, [row.generation for row in running]), strict=True):
                    event = row.generation.append(token)
                    row.sequence.token_ids.append(token.token_id)
                    row.request.note_time()
                    yield event
                    if event.finish_reason is not None:
                        self.cache.release(row.sequence)
                running = [row for row in running if row.generation.finish_reason is None]
        finally:
            for row in wave:
                self.cache.release(row.sequence)

    def step(self, sequences: Rows[Sequence]) -> Tensor:
        """Compute every sequence's new tokens; the logits [R, V] of the newest."""
        for sequence in sequences:
            if self.cache.reserve(sequence, sequence.num_tokens) is None:
                raise RuntimeError(
                    f"no page is free: all {self.cache.num_pages} are held by streams that were begun before; "
                    "read them to their end or close them"
                )
        batch = Batch.of(sequences, self.device)
        with torch.inference_mode():
            ctx = CachedContext(self.store, batch, [sequence.block_table[0] for sequence in sequences])
            hidden = self.model(batch.input_ids, batch.positions, ctx)  # [T, H]
            logits = self.model.logits(hidden[batch.last_tokens])
        for sequence in sequences:
            self.cache.commit(sequence, sequence.num_tokens)
        return logits
