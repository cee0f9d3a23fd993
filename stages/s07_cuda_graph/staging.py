"""Host memory that the GPU reads and writes while the host goes on: a ring, so that nothing is overwritten too soon."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DEPTH = 3  # steps under way at most two, and one that is being put together
Event = torch.cuda.Event | torch.cpu.Event  # that of a CPU has always happened


class Ring:
    """`DEPTH` pinned buffers of int32, used in turn; each waits for the GPU to be done with its last use."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.turn, gpu = 0, device.type == "cuda"
        self.buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=gpu) for _ in range(DEPTH)]
        self.events: list[Event] = [torch.cuda.Event() if gpu else torch.cpu.Event() for _ in range(DEPTH)]

    def next(self) -> tuple[Tensor, Event]:
        """A buffer that is free, and the event to record when the GPU has been given all work on it."""
        self.turn = (self.turn + 1) % DEPTH
        self.events[self.turn].synchronize()
        return self.buffers[self.turn], self.events[self.turn]

    def send(self, parts: list[np.ndarray]) -> tuple[Tensor, Event]:
        """The parts, one after the other, in such a buffer."""
        buffer, event = self.next()
        sent = buffer[: sum(map(len, parts))]
        np.concatenate(parts, out=sent.numpy())
        return sent, event
