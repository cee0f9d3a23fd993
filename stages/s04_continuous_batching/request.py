"""A request: a sequence on its way through the engine, and the answer that grows with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import TokenLogprob
from stages.s02_kv_cache.sequence import Sequence

State = Literal["waiting", "running", "finished"]


@dataclass(eq=False)
class Request:
    """Arrival, state and priority around a `Sequence`. Two requests are never equal, whatever they ask for."""

    id: int  # unique for the engine's life; what a client calls it is the client's affair
    generation: Generation
    priority: int = 0  # smaller goes first, then who came first
    sibling: Request | None = None  # an earlier answer to the same prompt, whose K/V of the prompt can be shared
    state: State = "waiting"
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])  # entry 0: nothing precedes it
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of its prompt, found in the cache when it started (stage 06)
    num_computed: int = 0  # tokens computed for it, recomputed ones counted again
    host_blocks: list[int] = field(default_factory=list)  # where its K/V waits while it is swapped out ...
    host_kv: int = 0  # ... and of how many tokens it is
    arrival: float = field(default_factory=time.perf_counter)  # when it was made, by this clock
    sequence: Sequence = field(init=False)

    def __post_init__(self) -> None:
        salt = self.generation.params.cache_salt
        self.sequence = Sequence(
            list(self.generation.prompt_token_ids), extra_key=() if salt is None else (("salt", salt),)
        )

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt, however many have been generated since."""
        return len(self.generation.prompt_token_ids)

    @property
    def needs_prompt_logits(self) -> bool:
        """Log-probabilities of the prompt are still to be computed, so none of it may be taken from a cache."""
        wanted = self.generation.params.prompt_logprobs is not None and self.generation.index == 0
        return wanted and len(self.prompt_logprobs) < self.prompt_len

    @property
    def max_kv(self) -> int:
        """Tokens whose K/V it may ever need; the last sampled one is never written."""
        return self.prompt_len + max(self.generation.token_limit - 1, 0)

    @property
    def tokens_left(self) -> int:
        """New tokens that may still come, after those that are known or on their way (stage 07)."""
        return self.prompt_len + self.generation.token_limit - self.sequence.num_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the more urgent, then the older. It keeps its place when it is preempted."""
        return self.priority, self.id
