"""The engine in a thread of this process: the same messages, and a debugger sees both sides."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import msgspec

from stages.s09_server.engine_process import EngineSettings, run_engine
from stages.s09_server.link import pack_settings
from stages.s09_server.messages import Stop, encode


class ThreadLink:
    """As `link.ChildLink`, without a socket."""

    def __init__(
        self, settings: EngineSettings, on_frame: Callable[[bytes], object], on_death: Callable[[str], object]
    ) -> None:
        self.inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        told = msgspec.json.decode(pack_settings(settings), type=EngineSettings)  # as a process would be

        def receive(wait: bool) -> bytes | None:
            try:
                return self.inbox.get(wait)
            except queue.Empty:
                return None

        def run() -> None:
            try:
                run_engine(told, receive, on_frame)
            finally:  # whatever happens, nobody waits for an engine that is gone
                on_death("the engine's thread has ended")

        self.thread = threading.Thread(target=run, name="engine", daemon=True)
        self.thread.start()

    def send(self, frame: bytes) -> None:
        """To the engine."""
        self.inbox.put(frame)

    def close(self, seconds: float = 5.0) -> None:
        """End the engine after its step. A thread cannot be ended by force: one that hangs is left behind."""
        self.inbox.put(encode(Stop()))
        self.thread.join(seconds)
