"""SIGTERM and Ctrl-C: the first asks for an end, the second for one at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

SIGNALS = [signal.SIGINT, signal.SIGTERM]
if sys.platform == "win32":
    SIGNALS.append(signal.SIGBREAK)
KILLED = 130  # exit code, as of shells


class Signals:
    """`first` and `second` are events of the running loop. While this is open, nothing else hears the signals."""

    def __init__(self) -> None:
        self.loop, self.count = asyncio.get_running_loop(), 0
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # no other thread hears signals
            self.before = {number: signal.signal(number, self.hear) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two instructions of the program: it only counts."""
        self.count += 1
        if self.count > 2:  # somebody insists
            os._exit(KILLED)
        self.loop.call_soon_threadsafe((self.first if self.count == 1 else self.second).set)

    @property
    def exit_code(self) -> int:
        """0 for an end that was waited for."""
        return KILLED if self.second.is_set() else 0
