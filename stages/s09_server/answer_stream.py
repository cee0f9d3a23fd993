"""What one caller hears of its answers, and how fast it hears it is the caller's own affair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from stages.s09_server.messages import AnswerEvent

STARTING, CLOSING = "the engine is being started", "the server is shutting down"  # why there is no engine, and no fault


class EngineDied(RuntimeError):
    """The engine has ended, or could not start; the text says why. `fault`: is it ours, not a wrong option's?"""

    def __init__(self, why: str, fault: bool = True) -> None:
        super().__init__(why)
        self.fault = fault


class AnswerStream:
    """What becomes of the answers to one call. A reader who is late finds all that he has missed, merged."""

    def __init__(self, numbers: range, forget: Callable[[AnswerStream], object]) -> None:
        self.numbers, self.forget = numbers, forget  # of its answers; what to call when nobody needs it any more
        self.pending: list[AnswerEvent] = []
        self.ended: set[int] = set()
        self.waiter: asyncio.Future[None] | None = None

    @property
    def left(self) -> int:
        """Answers that have not ended."""
        return len(self.numbers) - len(self.ended)

    def put(self, event: AnswerEvent) -> None:
        """News; wakes the reader."""
        self.pending.append(event)
        if event.finish_reason is not None:
            self.ended.add(event.answer)
            if not self.left:
                self.forget(self)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def next(self) -> list[AnswerEvent]:
        """Waits for news: one event for each answer that has some. An empty list: all answers have ended.

        Only one task may wait at a time; a second one gets a RuntimeError.
        """
        if self.waiter is not None and not self.waiter.done():
            raise RuntimeError("another task waits for this stream's news")
        while not self.pending and self.left:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        self.waiter = None
        pending, self.pending = self.pending, []
        return pending if len(pending) < 2 else merged(pending)

    def abort(self) -> None:
        """Give up; what it holds is free within a step. Again, or after the end: nothing happens."""
        self.forget(self)
        self.ended.update(range(len(self.numbers)))
        self.pending.clear()
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def unfinished(self, error: str) -> list[AnswerEvent]:
        """How the answers end that will not be finished."""
        numbers = [number for number in range(len(self.numbers)) if number not in self.ended]
        return [
            AnswerEvent(self.numbers.start, number, [], "", finish_reason="error", error=error) for number in numbers
        ]


def merged(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """One event for each answer, in the order of their first."""
    by_answer: dict[int, list[AnswerEvent]] = {}
    for event in events:
        by_answer.setdefault(event.answer, []).append(event)
    return [news[0] if len(news) == 1 else merge(news) for news in by_answer.values()]


def merge(news: Sequence[AnswerEvent]) -> AnswerEvent:
    """Several events of one answer as one."""
    first, last = news[0], news[-1]
    return AnswerEvent(
        first.stream,
        first.answer,
        [token for event in news for token in event.token_ids],
        "".join(event.text for event in news),
        [score for event in news for score in event.logprobs],
        last.finish_reason,
        last.stop_reason,
        last.error,
        first.num_cached_tokens,
        first.prompt_logprobs,
    )
