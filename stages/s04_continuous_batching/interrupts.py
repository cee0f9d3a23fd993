"""Read later: Ctrl-C waits for the end of a step. In the middle of one, the books of blocks are half written."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, a first Ctrl-C is only noted, and its handler is called at the end; a second one is not held back.

    Only the main thread hears signals, so in any other nothing happens; nor if the handler is none of Python's.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(came) == 1:
            handler(*came[0])
