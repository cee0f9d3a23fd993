"""Who computes what in the next step. Plain Python on counts and block ids: no tensors, so it can be fuzzed."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from stages.s01_forward.outputs import SampledToken, TokenEvent
from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.plan import Plan, PlannedRow, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.span import Span
from stages.s04_continuous_batching.swap import SwapSpace


class Scheduler:
    """Iteration-level scheduling (Orca, Yu et al. 2022): the batch is put together anew before every step.

    max_num_seqs: rows of a step. max_num_batched_tokens: tokens of a step; every prompt must fit (until stage 05).
    swap: host memory for the K/V of preempted requests; those that find no room there are computed again.
    """

    def __init__(self, cache: PagedCache, swap: SwapSpace, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.cache, self.swap = cache, swap
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: list[Request] = []  # in order: the more urgent and the older first
        self.running: list[Request] = []  # likewise
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Is any request not finished?"""
        return bool(self.waiting or self.running)

    # ---- requests come and go ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, with the numbers, for one that could never run."""
        self.check_fits(request)
        insert(self.waiting, request)

    def check_fits(self, request: Request) -> None:
        """Refuse what the pool cannot hold, or no step can compute, even with nobody else there."""
        if not request.prompt_len:
            raise ValueError("the prompt is empty: there is no token to start from")
        blocks, there_are = self.cache.blocks_for(request.max_kv), self.cache.pool.num_blocks - 1
        if blocks > there_are:
            raise ValueError(
                f"the request may need {request.max_kv} tokens of K/V, {blocks} blocks of {self.cache.block_size}; "
                f"there are {there_are}: raise the KV budget, or lower max_tokens"
            )
        self.check_budget(request)

    def check_budget(self, request: Request) -> None:
        """After a preemption all its tokens are computed in one step."""
        if request.max_kv > self.max_num_batched_tokens:
            raise ValueError(
                f"the request may need to compute {request.max_kv} tokens in one step; "
                f"max_num_batched_tokens is {self.max_num_batched_tokens}"
            )

    def abort(self, request: Request) -> None:
        """End a request now, wherever it is. One that has ended already is left as it is."""
        if request.state != "finished":
            request.generation.finish_reason = request.generation.finish_reason or "abort"
            self.finish(request)

    def finish(self, request: Request) -> None:
        """Take a request out and free all it holds, at once."""
        (self.running if request.state == "running" else self.waiting).remove(request)
        request.state = "finished"
        self.cache.release(request.sequence)
        self.swap.release(request)

    # ---- one step ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Decide the next step and take the blocks for it. `num_kv` advances here; `update` brings the tokens."""
        step = Step()
        for request in self.in_turn():
            # An earlier one may have preempted it.
            if request.state == "running" and not self.plan_decode(request, step):
                self.continue_running(request, step)
        if not step.preempted:  # else what was just taken away would be handed out to somebody new
            self.admit_waiting(step)
        return Plan(tuple(step.rows), tuple(step.swap_out), tuple(step.swap_in), tuple(step.copies))

    def in_turn(self) -> list[Request]:
        """The running requests in the order in which they are served: the more urgent and the older first."""
        return list(self.running)

    def plan_decode(self, request: Request, step: Step) -> bool:
        """Most rows of most steps: one token is new, and its block has begun and is nobody else's.

        `continue_running` would plan the same row, in four calls and twice the time. False for any other row.
        """
        sequence, cache = request.sequence, self.cache
        start, end = sequence.num_kv, len(sequence.token_ids)
        if end - start != 1 or start % cache.block_size == 0 or step.num_tokens >= self.max_num_batched_tokens:
            return False
        if cache.pool.is_shared(sequence.block_table[start // cache.block_size]):
            return False
        span = tuple.__new__(Span, (sequence, start, end))  # `Span(...)`, without the Python function in between
        step.rows.append(tuple.__new__(PlannedRow, (request, span, True, ())))
        step.num_tokens += 1
        sequence.num_kv = end
        return True

    def continue_running(self, request: Request, step: Step) -> None:
        """One more token of a running request; where blocks lack, whoever comes last makes room."""
        count = self.share_of(request, step)
        while count and not self.try_row(request, count, step):
            victim = self.running[-1]
            self.preempt(victim, step)
            if victim is request:
                return

    def admit_waiting(self, step: Step) -> None:
        """New requests in order, while tokens, rows and blocks last. Nobody overtakes the first in the queue."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self.start(request, step):
                return
            self.waiting.pop(0)
            request.state = "running"
            insert(self.running, request)

    def start(self, request: Request, step: Step) -> bool:
        """Give a waiting request its first row (or the first after a preemption), if this step has room for it."""
        if step.num_tokens >= self.max_num_batched_tokens:
            return False
        sequence, sibling, moved = request.sequence, request.sibling, len(step.swap_in)
        if request.host_blocks:
            if not self.swap_in(request, step):
                return False
        elif sibling is not None and sibling.state == "running":
            if step.start_of(sibling) < request.prompt_len - 1:
                return False  # the K/V of the prompt is on its way; wait for it and share it
            # All but the prompt's last token, which must be computed for its logits.
            self.cache.fork_prefix(sibling.sequence, sequence, request.prompt_len - 1)
        elif not request.needs_prompt_logits:
            cached = self.cache.match(sequence)
            request.num_cached_tokens = request.num_cached_tokens if request.num_preemptions else cached
        count = self.share_of(request, step)
        if count and self.try_row(request, count, step):
            self.swap.release(request)
            return True
        self.cache.release(sequence)
        del step.swap_in[moved:]
        return False

    def share_of(self, request: Request, step: Step) -> int:
        """How many tokens the step computes for a request: all its new ones, or none if they do not fit (stage 05)."""
        new = request.sequence.num_new
        return new if step.num_tokens + new <= self.max_num_batched_tokens else 0

    def try_row(self, request: Request, count: int, step: Step) -> bool:
        """Plan `count` more tokens of a request; False, with nothing changed, if the blocks do not suffice."""
        sequence = request.sequence
        span = Span(sequence, sequence.num_kv, sequence.num_kv + count)
        copies = self.cache.reserve(sequence, span.end)
        if copies is None:
            return False
        step.copies += copies
        step.rows.append(PlannedRow(request, span, samples=span.end == sequence.num_tokens))
        step.num_tokens += count
        sequence.num_kv = span.end
        return True

    # ---- preemption --------------------------------------------------------------------------------------------------

    def preempt(self, request: Request, step: Step) -> None:
        """Take back a request's blocks. Its tokens stay, and it goes to where it belongs in the queue: to the front.

        Its K/V is kept in host memory if there is room, else computed again from all its tokens, prompt and output.
        """
        self.running.remove(request)
        step.swap_out += self.swap.take(request) or []
        self.cache.release(request.sequence)
        request.state = "waiting"
        request.num_preemptions += 1
        self.num_preemptions += 1
        step.preempted = True
        insert(self.waiting, request)

    def swap_in(self, request: Request, step: Step) -> bool:
        """Blocks for a swapped-out request, and the copies that fill them; False if there are not enough."""
        blocks = self.cache.pool.allocate(len(request.host_blocks))
        if blocks is None:
            return False
        request.sequence.block_table = blocks
        request.sequence.num_kv = request.host_kv
        step.swap_in += zip(request.host_blocks, blocks, strict=True)
        return True

    # ---- after the step ----------------------------------------------------------------------------------------------

    def update(self, plan: Plan, result: StepResult) -> list[tuple[Request, TokenEvent]]:
        """Hand out a step's tokens. A request that ends frees its blocks at once; an aborted one is passed over."""
        events: list[tuple[Request, TokenEvent]] = []
        for row, (tokens, prompt_logprobs, error) in zip(plan.rows, result.rows, strict=True):
            request, (sequence, start, end), samples, _ = row
            if request.state == "finished":
                continue
            generation = request.generation
            request.num_computed += end - start
            if error is not None:
                events.append((request, generation.fail(error)))
                self.abort(request)
                continue
            request.prompt_logprobs += prompt_logprobs
            taken = 0
            for token in tokens:
                self.take(row, token)
                taken += 1
                events.append((request, generation.append(token)))
                if generation.finish_reason is not None:
                    break
            if request.state == "running":  # the next step may be planned already (stage 07), and have preempted it
                self.cache.commit(sequence, self.written(row, taken))
            if samples and generation.finish_reason is not None:
                self.finish(request)
        return events

    def written(self, row: PlannedRow, taken: int) -> int:
        """Tokens whose K/V holds after a row that gave `taken` tokens: all of its own, unless it guessed (stage 08)."""
        return row.span.end

    def take(self, row: PlannedRow, token: SampledToken) -> None:
        """Append a sampled token to its sequence; the generation has a list of its own, of the answer alone."""
        row.request.sequence.token_ids.append(token.token_id)


@dataclass
class Step:
    """A plan in the making."""

    rows: list[PlannedRow] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    num_tokens: int = 0
    preempted: bool = False

    def drop(self, request: Request) -> None:
        """Take a request's row out again; the blocks it reserved stay its own."""
        for row in [row for row in self.rows if row.request is request]:
            self.rows.remove(row)
            self.num_tokens -= row.span.num_new
            request.sequence.num_kv = row.span.start

    def start_of(self, request: Request) -> int:
        """How many tokens of a request had their K/V before this step."""
        spans = [row.span for row in self.rows if row.request is request]
        return spans[0].start if spans else request.sequence.num_kv


def insert(queue: list[Request], request: Request) -> None:
    """Keep a queue in order: by priority, then by age."""
    bisect.insort(queue, request, key=lambda other: other.order)
