"""The group: requests of which every step wants the same, so that a step is planned and told for all of them at once.

While nobody comes or goes, a decode step makes every sequence one token longer, whatever the tokens are. So the
scheduler need not ask each request what it wants: requests that just decode form a group, and a step moves their
counters. Who begins a block, who fills one and who comes to its end follows from how many steps the group has made: a
calendar, written when the group is formed, has the numbers of those members. Rows and their results are the same for
all; they are made only for who asks: a check, a recording, a member to whom something unusual happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Any, NamedTuple

from stages.s01_forward.outputs import NOT_FINITE, SampledToken, TokenEvent
from stages.s02_kv_cache.sequence import Sequence as Tokens
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Events
from stages.s04_continuous_batching.plan import Plan, PlannedRow, RowResult, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.span import Span
from stages.s07_cuda_graph.ahead_scheduler import PENDING
from stages.s07_cuda_graph.on_demand import OnDemand
from stages.s07_cuda_graph.slots import needs_host

NO_CHOICE = -1  # in place of a token id: none could be chosen


class Member(NamedTuple):
    """What a step needs of a request, looked up once."""

    request: Request
    sequence: Tokens
    token_ids: list[int]  # of the sequence
    answer: list[int]  # token ids of the answer alone
    push: Callable[[int], str] | None  # from a token to the text that became certain
    prompt: int  # which prompt of its call, and which of the answers to it
    number: int
    limit: int  # the sequence's length with its last token
    plain: bool  # does it want tokens, and the host only to read them?

    @classmethod
    def of(cls, request: Request) -> Member:
        """A request's."""
        answer, sequence = request.generation, request.sequence
        push = answer.stream.push if answer.stream else None
        limit, plain = request.prompt_len + answer.token_limit, answer.token_limit > 0 and not needs_host(answer)
        ids, names = (sequence.token_ids, answer.token_ids), (answer.request, answer.index)
        return cls(request, sequence, *ids, push, *names, limit, plain)


class Group:
    """Members whose next step is one token, in the order in which they are served. Who comes or goes makes another."""

    def __init__(self, members: list[Member], block_size: int) -> None:
        self.members, self.block_size, self.steps = members, block_size, 0
        # As columns: a step walks over them in less time than over the members and their attributes.
        requests, self.sequences, self.known, answers, pushes, prompts, numbers, limits, _ = zip(*members, strict=True)
        self.columns = requests, self.known, answers, pushes, prompts, numbers
        lengths = list(map(len, self.known))
        self.phases: list[list[int]] = [[] for _ in range(block_size)]  # members by their length, modulo block_size
        for number, length in enumerate(lengths):
            self.phases[length % block_size].append(number)
        left = list(map(int.__sub__, limits, lengths))
        self.steps_left = min(left)  # then the first have all their tokens, known or pending:
        self.first_to_end = [number for number, steps in enumerate(left) if steps == self.steps_left]
        generations = [request.generation for request in requests]
        self.ends = frozenset([NO_CHOICE]).union(*{generation.stop_token_ids for generation in generations})
        self.watched = [number for number, each in enumerate(generations) if each.params.stop]  # for a stop string
        self.has_text = any(pushes)
        self.common: int | None = None  # `common_prefix.common_blocks`, once it was asked for

    def at(self, phase: int) -> list[int]:
        """Members whose length is a multiple of the block size plus `phase` now."""
        return self.phases[(phase - self.steps) % self.block_size]

    def step(self, cache: PagedCache) -> GroupPlan:
        """One token more for everybody; the blocks that it takes must be there."""
        begin = self.at(1)
        # What `cache.reserve` would do for each of them, were it not known that nothing is shared and one block is new.
        size, growing = self.block_size, [(self.sequences[number], self.known[number]) for number in begin]
        tables = [sequence.block_table for sequence, known in growing if len(known) > size * len(sequence.block_table)]
        for table, block in zip(tables, cache.pool.allocate(len(tables)) or (), strict=True):
            table.append(block)
        lengths = list(map(len, self.known))
        for sequence, token_ids, length in zip(self.sequences, self.known, lengths, strict=True):
            sequence.num_kv = length
            token_ids.append(PENDING)
        rows = OnDemand(len(lengths), lambda number: self.row(number, lengths[number]))
        full = self.at(0)
        self.steps, self.steps_left = self.steps + 1, self.steps_left - 1
        end = () if self.steps_left else self.first_to_end
        return GroupPlan(rows, group=self, lengths=lengths, begin=begin, full=full, end=end)

    def row(self, number: int, length: int) -> PlannedRow:
        """What a member computes when it is so long."""
        request = self.members[number].request
        return PlannedRow(request, Span(request.sequence, length - 1, length), True)

    def may_end(self, plan: GroupPlan, token_ids: list[int]) -> set[int]:
        """Members that end with these tokens, or may end by their text."""
        numbers = {*self.watched, *plan.end}
        if not self.ends.isdisjoint(token_ids):
            numbers.update(number for number, token_id in enumerate(token_ids) if token_id in self.ends)
        return numbers

    def not_running(self) -> set[int]:
        """Members that have ended, or stepped back, since the group was formed."""
        return {number for number, member in enumerate(self.members) if member.request.state != "running"}

    def take(self, lengths: list[int], token_ids: list[int], but: set[int]) -> Events:
        """Each member takes its token, as in `Scheduler.update`, but those who are named: nobody ends here."""
        columns: list[Sequence[Any]] = [*self.columns, lengths, token_ids]
        if but:
            others = [number not in but for number in range(len(lengths))]
            columns = [list(compress(column, others)) for column in columns]
        requests, known, answers, pushes, prompts, numbers, ends, tokens = columns
        for request, ids, answer, end, token in zip(requests, known, answers, ends, tokens, strict=True):
            ids[end] = token
            answer.append(token)
            request.num_computed += 1
        texts: Iterable[str] = repeat("")
        if self.has_text:
            texts = [push(token) if push else "" for push, token in zip(pushes, tokens, strict=True)]
        events = zip(prompts, numbers, tokens, texts, repeat(None), strict=False)
        return list(zip(requests, map(tuple.__new__, repeat(TokenEvent), events), strict=False))


@dataclass(frozen=True, kw_only=True)
class GroupPlan(Plan):
    """One token for each member. `lengths`: of their sequences, with this step; the others: numbers of members."""

    group: Group
    lengths: list[int]
    begin: list[int]  # a block
    full: list[int]  # is their block
    end: Sequence[int]  # with this token at the latest

    @property
    def num_tokens(self) -> int:
        """One of each member."""
        return len(self.lengths)

    @property
    def has_drafts(self) -> bool:
        """None: no row need be made to say so."""
        return False


@dataclass(frozen=True, kw_only=True)
class GroupResult(StepResult):
    """The members' tokens."""

    token_ids: list[int]


def group_result(token_ids: list[int]) -> GroupResult:
    """What a step of a group gave."""
    return GroupResult(OnDemand(len(token_ids), lambda number: row_result(token_ids[number])), token_ids=token_ids)


def row_result(token_id: int) -> RowResult:
    """A token from the device, for a row that nobody wants scores of."""
    return RowResult((SampledToken(token_id, error=NOT_FINITE if token_id == NO_CHOICE else None),))
