"""Stage 07's slots, for rows with guesses: the device counts those that fall as well, and the host puts it right."""

from __future__ import annotations

from stages.s04_continuous_batching.plan import Plan
from stages.s04_continuous_batching.request import Request
from stages.s07_cuda_graph.device_state import DeviceState
from stages.s07_cuda_graph.slots import Slots


class GuessSlots(Slots):
    """`guessed`: those whose last row carried guesses."""

    def __init__(self, state: DeviceState, block_size: int) -> None:
        super().__init__(state, block_size)
        self.guessed: set[Request] = set()

    def follow(self, plan: Plan) -> list[int]:
        """As before. What a row with guesses leaves on the device holds up to its start; the rest is sent again."""
        slots = super().follow(plan)
        self.guessed &= self.seats.keys()  # of the others nothing is known any more
        if not self.guessed and not plan.has_drafts:
            return slots
        for row, slot in zip(plan.rows, slots, strict=True):
            if row.request in self.guessed:
                self.state.edit("length", slot, row.span.start)
                self.guessed.remove(row.request)
            if row.drafts:
                seat = self.seats[row.request]
                seat.sampled = False  # only the host knows which of the samples is the newest token
                seat.num_blocks = row.span.start // self.block_size  # from here on blocks may go back, and others come
                self.guessed.add(row.request)
        return slots
