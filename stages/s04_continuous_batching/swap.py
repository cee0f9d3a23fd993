"""Read later: host memory for the K/V of preempted requests, as an alternative to computing it again."""

from __future__ import annotations

from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s04_continuous_batching.request import Request


class SwapSpace:
    """A stack of free host blocks. Only ids: the runner moves the bytes."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.free = num_blocks, list(range(num_blocks))

    def take(self, request: Request) -> list[BlockCopy] | None:
        """Host blocks for all that the request holds, as (device, host) pairs; None if there are not enough."""
        table = request.sequence.block_table
        if not table or len(table) > len(self.free):
            return None
        request.host_blocks = [self.free.pop() for _ in table]
        request.host_kv = request.sequence.num_kv
        return list(zip(table, request.host_blocks, strict=True))

    def release(self, request: Request) -> None:
        """The request's host blocks are free again."""
        self.free.extend(request.host_blocks)
        request.host_blocks = []
