"""Who sits in which slot of the device's state: the host's half of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.s01_forward.generation import Generation
from stages.s04_continuous_batching.plan import Plan, PlannedRow
from stages.s04_continuous_batching.request import Request
from stages.s07_cuda_graph.device_state import DUMMY_SLOT, DeviceState

if TYPE_CHECKING:  # which imports `needs_host`
    from stages.s07_cuda_graph.steady import Group, GroupPlan


def needs_host(generation: Generation) -> bool:
    """Must the host see an answer's logits between two steps? Bias, what is forbidden and log-probabilities are its
    affair.
    """
    params = generation.params
    scored = params.logprobs is not None or params.prompt_logprobs is not None
    return bool(scored or params.logit_bias or params.min_tokens or generation.constraint is not None)


@dataclass
class Seat:
    """A slot, and what the device knows of its request."""

    slot: int
    stay: int  # `num_preemptions` when it came: a request that was preempted since comes anew
    num_blocks: int = 0  # entries of its block table that were sent
    sampled: bool = False  # is its newest token in `last_token`?


class Slots:
    """Keeps the state on the device in step with the plans: edits for who joins and for new blocks, else nothing."""

    def __init__(self, state: DeviceState, block_size: int) -> None:
        self.state, self.block_size = state, block_size
        self.free = list(range(state.num_slots - 1, DUMMY_SLOT, -1))
        self.seats: dict[Request, Seat] = {}
        self.on_host: set[Request] = set()  # those of them whose steps the host waits for
        self.group: tuple[Group | None, list[int]] = None, []  # the newest group, and its slots

    def follow_group(self, plan: GroupPlan) -> list[int]:
        """As `follow`. A group keeps its slots; from its second step on only who begins a block is looked at."""
        group, slots = self.group
        if plan.group is not group:
            slots = self.follow(plan)
            self.group = plan.group, slots
            return slots
        for number in plan.begin:
            request = plan.group.members[number].request
            seat, table = self.seats[request], request.sequence.block_table
            self.state.edit_blocks(seat.slot, seat.num_blocks, table[seat.num_blocks :])
            seat.num_blocks = len(table)
        return slots

    def follow(self, plan: Plan) -> list[int]:
        """The slot of each row of a plan; the edits that it needs are staged.

        First, whoever has ended or stepped back (it is no longer "running") gives its slot back, and leaves `on_host`.
        Then, row by row: who is new, or was preempted since it came (`Seat.stay`), joins. Of its block table goes what
        was not sent yet, all of it if the plan copies blocks. A row that samples with one token takes it from the
        device: if no step of this stay has sampled so far, the token must be sent.
        """
        for request in [request for request in self.seats if request.state != "running"]:
            self.free.append(self.seats.pop(request).slot)
            self.on_host.discard(request)
        slots = []
        for row in plan.rows:
            seat = self.seats.get(row.request)
            if seat is None or seat.stay != row.request.num_preemptions:
                seat = self.join(row)
            table = row.span.block_table
            if plan.copies:  # a block in the middle may be another one now (copy-on-write)
                seat.num_blocks = 0
            if seat.num_blocks < len(table):
                self.state.edit_blocks(seat.slot, seat.num_blocks, table[seat.num_blocks :])
                seat.num_blocks = len(table)
            if row.samples:
                if not seat.sampled and row.span.num_new == 1:
                    self.state.edit("last_token", seat.slot, row.span.token_ids[row.span.start])
                seat.sampled = True
            slots.append(seat.slot)
        return slots

    def join(self, row: PlannedRow) -> Seat:
        """A slot for a request that has just been started, or started again."""
        request = row.request
        seat = self.seats.get(request) or Seat(self.free.pop(), 0)
        seat.stay, seat.num_blocks, seat.sampled = request.num_preemptions, 0, False
        self.seats[request] = seat
        on_host = needs_host(request.generation)
        self.state.edit("length", seat.slot, row.span.start)
        self.state.edit_sampling(seat.slot, request.generation, on_host)
        if on_host:
            self.on_host.add(request)
        return seat
