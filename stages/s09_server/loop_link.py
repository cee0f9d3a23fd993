"""The way from an event loop to an engine and back: what threads hear is done in the loop, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from stages.s09_server.children import ENGINE, TEXT
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.link import ChildLink
from stages.s09_server.thread_link import ThreadLink


class LoopLink:
    """A `ChildLink` or a `ThreadLink`. Nothing is heard after `close`, whatever was on its way."""

    def __init__(
        self,
        settings: EngineSettings,
        on_frame: Callable[[bytes], object],
        on_death: Callable[[str], object],
        *,
        in_process: bool,
        text_process: bool,
    ) -> None:
        self.loop, self.closed = asyncio.get_running_loop(), False
        news = self.later(on_frame), self.later(on_death)
        self.link: ChildLink | ThreadLink
        if in_process:
            self.link = ThreadLink(settings, *news)
        else:
            self.link = ChildLink(TEXT if text_process else ENGINE, settings, *news)

    def later(self, function: Callable[[Any], object]) -> Callable[[Any], None]:
        """For a thread: has the event loop call it soon."""

        def hear(value: Any) -> None:
            if not self.closed:
                function(value)

        def call(value: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody there to hear it
                self.loop.call_soon_threadsafe(hear, value)

        return call

    def send(self, frame: bytes) -> None:
        """To the engine, if it is there."""
        self.link.send(frame)

    async def close(self) -> None:
        """End the engine."""
        self.closed = True
        await asyncio.to_thread(self.link.close)
