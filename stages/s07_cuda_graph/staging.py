"""Host memory that the GPU reads and writes while the host goes on: a ring, so that nothing is overwritten too soon."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DEPTH = 3  # steps under way at most two, and one that is being put together


class Ring:
    """`DEPTH` pinned buffers of int32, used in turn; each waits for the GPU to be done with its last use."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.on_gpu, self.turn = device.type == "cuda", 0
        self.buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=self.on_gpu) for _ in range(DEPTH)]
        self.events = [torch.cuda.Event() if self.on_gpu else None for _ in range(DEPTH)]

    def next(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """A buffer that is free, and the event to record when the GPU has been given all work on it."""
        self.turn = (self.turn + 1) % DEPTH
        event = self.events[self.turn]
        if event is not None:
            event.synchronize()
        return self.buffers[self.turn], event


class Mailbox:
    """Sends arrays to one place on the device, in order of the stream, without a wait."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.ring = Ring(capacity, device)
        self.there = torch.empty(capacity, dtype=torch.int32, device=device)

    def send(self, parts: list[np.ndarray]) -> Tensor:
        """The parts, one after the other, int32 on the device; valid until the next call's work."""
        count = sum(map(len, parts))
        buffer, event = self.ring.next()
        np.concatenate(parts, out=buffer.numpy()[:count])
        self.there[:count].copy_(buffer[:count], non_blocking=True)
        if event is not None:
            event.record()
        return self.there
