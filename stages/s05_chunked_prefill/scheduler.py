"""The same scheduler, with prompts cut into chunks: a step never computes more than its budget of tokens."""

from __future__ import annotations

from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Scheduler, Step
from stages.s04_continuous_batching.swap import SwapSpace


class ChunkedScheduler(Scheduler):
    """Sarathi-Serve's scheduling (Agrawal et al. 2024): decodes first, then chunks of prompts into what is left.

    max_chunk: tokens that one request may compute per step at most, so that a long prompt leaves room for others.
    """

    def __init__(
        self,
        cache: PagedCache,
        swap: SwapSpace,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_chunk: int | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}; {max_num_seqs} running requests "
                "(max_num_seqs) decode one token each per step"
            )
        super().__init__(cache, swap, max_num_seqs, max_num_batched_tokens)
        self.max_chunk = max_chunk or max_num_batched_tokens

    def share_of(self, request: Request, step: Step) -> int:
        """Prefill and decode are one thing: known tokens without K/V, as many as the budget still allows."""
        return min(request.sequence.num_new, self.max_num_batched_tokens - step.num_tokens, self.max_chunk)

    def in_turn(self) -> list[Request]:
        """Decodes first: a reader waits for each of their tokens."""
        return sorted(self.running, key=lambda request: request.sequence.num_new > 1)

    def admit_waiting(self, step: Step) -> None:
        """As before, but who waits for a sibling's prompt stands aside meanwhile: in chunks that takes many steps."""
        aside: list[Request] = []
        super().admit_waiting(step)
        while self.waiting and len(self.running) < self.max_num_seqs and awaits_sibling(self.waiting[0]):
            aside.append(self.waiting.pop(0))
            super().admit_waiting(step)
        self.waiting[:0] = aside

    def check_budget(self, request: Request) -> None:
        """Any length can be computed in chunks."""

    def preempt(self, request: Request, step: Step) -> None:
        """A decode that was planned already may have to make room for an older request's chunk."""
        step.drop(request)
        super().preempt(request, step)


def awaits_sibling(request: Request) -> bool:
    """Is the prompt's K/V, which it will share, still to be planned for an earlier answer to the same prompt?"""
    sibling = request.sibling
    if sibling is None or sibling.state != "running" or request.host_blocks:
        return False
    return sibling.sequence.num_kv < request.prompt_len - 1
