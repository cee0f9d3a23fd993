"""For checks of what is measured: an event loop whose time stands still while there is something to do.

Then it jumps to what is due next. So nothing takes longer than it was told to, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

GRACE = 0.002  # seconds of the world's time in which what was sent to a socket of this machine arrives


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """`now`: its time, in seconds; a check may put it forward, which is as if all had been held up for as long."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(JumpingSelector(self))

    def time(self) -> float:
        """Seconds."""
        return self.now


class JumpingSelector(selectors.BaseSelector):
    """The system's own, but where it would wait for the next thing that is due, the loop's time jumps to it."""

    def __init__(self, loop: FakeTimeLoop) -> None:
        self.loop, self.real = loop, selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What has come from sockets, or nothing, and it is later."""
        ready = self.real.select(timeout if timeout is None else min(timeout, GRACE))
        if not ready and timeout:
            self.loop.now += timeout
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """As the system's own."""
        return self.real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """As the system's own."""
        return self.real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """As the system's own."""
        return self.real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """As the system's own."""
        return self.real.get_map()

    def close(self) -> None:
        """As the system's own."""
        self.real.close()
