"""For checks: a runner without a model. Each slot remembers whose K/V it holds, and each row must find its own.

The K/V of a token depends on all tokens before it, so a slot remembers a mark made of the whole prefix. The token that
a row gives is made from the mark it reads last: a row that reads wrong K/V would also answer wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Literal

from stages.s01_forward.generation import Generation
from stages.s01_forward.outputs import SampledToken, TokenLogprob
from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.plan import Handle, Plan, PlannedRow, RowResult, StepResult
from stages.s04_continuous_batching.request import Request

Block = list[int | None]  # one mark per slot; None: never written
FailAt = Literal["start", "copied", "written"]
EOS, VOCAB = 0, 64


def mark_after(mark: int, token_id: int) -> int:
    """What the K/V of a token is made of: the token and everything before it."""
    return hash((mark, token_id))


def first_mark(request: Request) -> int:
    """Requests with different salts never share, so the same tokens give other marks. The same in every process."""
    return zlib.crc32(repr(request.sequence.extra_key).encode())


def choose(mark: int, generation: Generation) -> SampledToken:
    """The token after a prefix: any, the end token at times, an error now and then."""
    value = abs(hash((mark, generation.seed)))
    if value % 499 == 0:
        return SampledToken(-1, error="no token can be chosen")
    return SampledToken(value % VOCAB)


def single_run(request: Request) -> tuple[list[int], str]:
    """Tokens and finish reason of the request if it were alone in the world."""
    mark = first_mark(request)
    tokens: list[int] = []
    for token_id in request.generation.prompt_token_ids:
        mark = mark_after(mark, token_id)
    while len(tokens) < request.generation.token_limit:
        token = choose(mark, request.generation)
        if token.error:
            return tokens, "error"
        tokens.append(token.token_id)
        if token.token_id == EOS:
            return tokens, "stop"
        mark = mark_after(mark, token.token_id)
    return tokens, "length"


class FakeRunner:
    """`check` sees every plan before anything is done. `fail_at`: where the next step raises a MemoryError."""

    def __init__(self, cache: PagedCache, num_host_blocks: int, check: Callable[[Plan], object]) -> None:
        size = self.block_size = cache.block_size
        self.device: list[Block] = [[None] * size for _ in range(cache.pool.num_blocks)]
        self.host: list[Block] = [[None] * size for _ in range(num_host_blocks)]
        self.check = check
        self.marks: dict[Request, list[int]] = {}
        self.fail_at: FailAt | None = None

    def execute(self, plan: Plan) -> Handle:
        """Move blocks, write every row's marks, read them all back, and answer."""
        self.check(plan)
        self.may_fail("start")
        copy(plan.swap_out, self.device, self.host)
        copy(plan.swap_in, self.host, self.device)
        copy(plan.copies, self.device, self.device)
        self.may_fail("copied")
        for row in plan.rows:
            self.write(row)
        self.may_fail("written")
        return Handle(StepResult(tuple(self.result(row) for row in plan.rows)))

    def may_fail(self, point: FailAt) -> None:
        if self.fail_at == point:
            self.fail_at = None
            raise MemoryError("a rigged failure")

    def marks_of(self, request: Request) -> list[int]:
        """One mark per known token."""
        marks, token_ids = self.marks.setdefault(request, []), request.sequence.token_ids
        for token_id in token_ids[len(marks) :]:
            marks.append(mark_after(marks[-1] if marks else first_mark(request), token_id))
        return marks

    def write(self, row: PlannedRow) -> None:
        """The K/V of the new tokens, into the slots that the block table names."""
        marks, table, size = self.marks_of(row.request), row.span.block_table, self.block_size
        for position in range(row.span.start, row.span.end):
            self.device[table[position // size]][position % size] = marks[position]

    def result(self, row: PlannedRow) -> RowResult:
        """Read every position from the first to the newest, as attention does."""
        span, request = row.span, row.request
        stored = [mark for block in span.block_table for mark in self.device[block]][: span.end]
        expected = self.marks_of(request)[: span.end]
        assert stored == expected, f"request {request.id} reads K/V that is not its own"
        tokens: tuple[SampledToken, ...] = ()
        if row.samples and request.generation.token_limit > 0:
            tokens = (choose(expected[-1], request.generation),)
        return RowResult(tokens, prompt_logprobs(row))


def copy(pairs: tuple[BlockCopy, ...], source: list[Block], target: list[Block]) -> None:
    """Whole blocks, one after the other."""
    for old, new in pairs:
        target[new] = list(source[old])


def prompt_logprobs(row: PlannedRow) -> tuple[TokenLogprob, ...]:
    """An entry for each prompt token that follows those computed here, unless it is known."""
    request = row.request
    if not request.needs_prompt_logits:
        return ()
    first = max(row.span.start + 1, len(request.prompt_logprobs))
    following = request.sequence.token_ids[first : min(row.span.end + 1, request.prompt_len)]
    return tuple(TokenLogprob(token_id, -1.0, 1, ()) for token_id in following)
