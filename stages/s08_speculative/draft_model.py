"""Guessing by a smaller model that reads the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor, nn

from stages.s01_forward.model import Model
from stages.s01_forward.sampler import SamplingBatch, choose
from stages.s02_kv_cache.batch import Batch
from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s02_kv_cache.kv_store import KVStore
from stages.s02_kv_cache.sequence import Sequence
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.context import PagedContext
from stages.s03_paged_kv.ops import PagedOps
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.span import Span
from stages.s08_speculative.proposer import Draft
from stages.s08_speculative.verify import OTHER_DRAWS, adjust_all, distributions, prefixes

CATCH_UP = 2048  # tokens of one forward pass over what the draft model has not read yet


class DraftModelProposer:
    """The draft model has K/V of its own, in the same blocks: it reads each request's block table.

    drawn: guesses are drawn, and their distributions kept, for the ratio rule; else each is the token that the draft
    model would choose with the request's own noise, which the model then often chooses too.
    """

    def __init__(
        self, model: Model, ops: PagedOps, store: KVStore, shape: AttentionShape, cache: PagedCache, drawn: bool
    ) -> None:
        self.model, self.ops, self.store, self.shape, self.cache, self.drawn = model, ops, store, shape, cache, drawn
        # Its preemptions then, how many of its tokens have K/V here, and the guesses after them that have.
        self.read: dict[Request, tuple[int, int, list[int]]] = {}

    @torch.inference_mode()
    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        """See `Proposer.propose`. Requests for whose guesses there are no blocks get none."""
        requests = [request for request, count in wanted.items() if self.make_room(request, count, len(wanted))]
        guesses: dict[Request, list[int]] = {request: [] for request in requests}
        probs: dict[Request, list[Tensor]] = {request: [] for request in requests}
        for place in range(max((wanted[request] for request in requests), default=0)):
            rows = [request for request in requests if wanted[request] > place]
            logits = self.logits(rows, guesses)  # [R, V]
            for request, token, p in zip(rows, *self.choose(logits, rows, guesses), strict=True):
                guesses[request].append(token)
                probs[request].append(p)
        return {
            request: Draft(tuple(guesses[request]), torch.stack(probs[request]) if self.drawn else None)
            for request in requests
            if guesses[request]
        }

    def make_room(self, request: Request, count: int, spare: int) -> bool:
        """Blocks for the newest token and the guesses, if `spare` remain; the target's step takes them over."""
        sequence, cache = request.sequence, self.cache
        missing = cache.blocks_for(sequence.num_tokens + count) - len(sequence.block_table)
        if missing > 0 and missing + spare > cache.pool.num_free:
            return False
        shared = cache.pool.is_shared(sequence.block_table[-1])  # copied by the step itself, which comes later
        return not shared and cache.reserve(sequence, sequence.num_tokens + count) is not None

    def logits(self, requests: Rows[Request], guesses: Mapping[Request, list[int]]) -> Tensor:
        """After each request's tokens and guesses: all that the draft model has not read is computed first."""
        while True:
            chunks = [self.chunk(request, guesses[request]) for request in requests]
            batch = Batch.of(chunks, self.store.data.device)
            ctx = PagedContext.of(chunks, batch, self.store, self.ops, self.shape)
            with torch.cuda.device_of(batch.input_ids):  # the GPU on which Triton's kernels run
                hidden = self.model(batch.input_ids, batch.positions, ctx)
            for request, chunk in zip(requests, chunks, strict=True):
                count = min(request.sequence.num_tokens, chunk.num_tokens)
                self.read[request] = request.num_preemptions, count, chunk.token_ids[count : chunk.num_tokens]
            if all(chunk.num_tokens == len(chunk.token_ids) for chunk in chunks):
                return self.model.logits(hidden[batch.last_tokens])

    def chunk(self, request: Request, guesses: list[int]) -> Span:
        """What comes after the tokens that were read and still stand; the last token at least."""
        token_ids = [*request.sequence.token_ids, *guesses]
        stay, count, read = self.read.get(request, (0, 0, []))
        if stay != request.num_preemptions:  # its blocks are others
            count, read = 0, []
        stand = takewhile(lambda pair: pair[0] == pair[1], zip(read, token_ids[count:], strict=False))
        known = min(count + len(list(stand)), len(token_ids) - 1)
        sequence = Sequence(token_ids, block_table=request.sequence.block_table)
        return Span(sequence, known, min(known + CATCH_UP, len(token_ids)))

    def choose(
        self, logits: Tensor, requests: Rows[Request], guesses: Mapping[Request, list[int]]
    ) -> tuple[list[int], list[Tensor]]:
        """A guess for each request, and the distribution [V] that it comes from."""
        salt = OTHER_DRAWS + 2 if self.drawn else 0
        rows = [prefixes(request.generation, guesses[request], salt)[-1] for request in requests]
        tokens = choose(adjust_all(logits, rows), SamplingBatch.of(rows, logits.device)).tolist()
        probs = distributions(logits, rows) if self.drawn else logits
        return tokens, list(probs)

    def copy_blocks(self, pairs: Rows[BlockCopy]) -> None:
        """The draft model's K/V moves with the model's."""
        self.store.copy_blocks(pairs)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.read.pop(request, None)


def first_layers(model: Model, count: int) -> Model:
    """A model of the first `count` layers and the same embedding, norm and head: no weight is copied."""
    if not 1 <= count < model.config.num_layers:
        raise ValueError(f"a draft of {count} layers; the model has {model.config.num_layers}, and it must be fewer")
    draft = Model(replace(model.config, num_layers=count), device="meta", ops=model.ops, max_len=len(model.cos))
    draft.layers = nn.ModuleList(list(model.layers)[:count])
    draft.embed_tokens, draft.norm, draft.lm_head = model.embed_tokens, model.norm, model.lm_head
    draft.cos, draft.sin = model.cos, model.sin
    return draft


def check_vocabulary(draft: Model, model: Model) -> None:
    """Raises ValueError if the two models do not speak of the same tokens."""
    ours, theirs = model.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ValueError(f"the draft model has {theirs} tokens, the model {ours}: guesses must be tokens of both")
