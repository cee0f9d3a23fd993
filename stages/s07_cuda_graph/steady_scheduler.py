"""The scheduler that lets a group go its way while nothing happens, and plans row by row when something does."""

from __future__ import annotations

from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Events
from stages.s04_continuous_batching.plan import Plan, StepResult
from stages.s04_continuous_batching.request import Request
from stages.s04_continuous_batching.scheduler import Step
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s07_cuda_graph.ahead_scheduler import AheadScheduler
from stages.s07_cuda_graph.steady import Group, GroupPlan, GroupResult, Member


class SteadyScheduler(AheadScheduler):
    """The same plans and the same events as `AheadScheduler`, for a fraction of the work.

    group: all that run, if each of them just decodes, or None. Whatever a group cannot do (a prompt to compute, a block
    to copy, somebody to preempt) is planned the ordinary way, and another group is looked for before the next step.
    """

    def __init__(
        self,
        cache: PagedCache,
        swap: SwapSpace,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_chunk: int | None = None,
    ) -> None:
        super().__init__(cache, swap, max_num_seqs, max_num_batched_tokens, max_chunk)
        self.group: Group | None = None
        self.members: dict[Request, Member] = {}  # of those that ran when the last group was looked for

    def schedule(self) -> Plan:
        """As before. A plan of the group, unless somebody new joins it."""
        group = self.group if self.group and self.group.steps_left else self.gather()
        self.group = None
        if group is None or len(group.at(1)) > self.cache.pool.num_free:
            return super().schedule()
        plan, step = group.step(self.cache), Step(num_tokens=len(group.members))
        self.admit_waiting(step)
        if step.rows:
            return Plan((*plan.rows, *step.rows), (), tuple(step.swap_in), tuple(step.copies))
        self.group = group
        return plan

    def gather(self) -> Group | None:
        """All that run and have tokens to come, if each of them just decodes."""
        known, cache = self.members, self.cache
        self.members = {request: known.get(request) or Member.of(request) for request in self.running}
        # A request for scores alone has its last token from the start, and its prompt is still to be computed.
        members = [m for m in self.members.values() if len(m.token_ids) != m.limit or not m.plain]
        just_decode = members and all(just_decodes(member, cache) for member in members)
        return Group(members, cache.block_size) if just_decode else None

    def finish(self, request: Request) -> None:
        """Who has ended leaves the group."""
        super().finish(request)
        self.group = None

    def preempt(self, request: Request, step: Step) -> None:
        """So does who steps back."""
        super().preempt(request, step)
        self.group = None

    def update(self, plan: Plan, result: StepResult) -> Events:
        """As before. Members to whom something happens are looked at one by one, with the rows that they would have."""
        if not isinstance(plan, GroupPlan) or not isinstance(result, GroupResult):
            return super().update(plan, result)
        group, events = plan.group, Events()
        unusual = group.may_end(plan, result.token_ids)
        if group is not self.group:
            unusual |= group.not_running()
        if unusual:
            numbers = sorted(unusual)
            rows, results = [plan.rows[number] for number in numbers], [result.rows[number] for number in numbers]
            events = super().update(Plan(rows), StepResult(results))
        for number in plan.full:
            if number not in unusual:
                self.cache.commit(group.members[number].sequence, plan.lengths[number])
        return events + group.take(plan.lengths, result.token_ids, but=unusual)


def just_decodes(member: Member, cache: PagedCache) -> bool:
    """Does it want nothing but its next token, written where nobody else reads?"""
    sequence, start = member.sequence, len(member.token_ids) - 1
    if sequence.num_kv != start or not member.plain:
        return False
    block, place = divmod(start, cache.block_size)
    return place == 0 or not cache.pool.is_shared(sequence.block_table[block])
