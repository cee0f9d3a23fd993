"""One request's answers on their way to its client: counted, timed, and given up the moment nobody wants them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.types import Receive

from stages.s01_forward.inputs import PromptRequest
from stages.s09_server.answer_stream import AnswerStream
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.errors import ApiError, engine_died
from stages.s09_server.messages import AnswerEvent
from stages.s09_server.metrics import Metrics


class Exchange:
    """Wraps an `AnswerStream`. `unended`: answers that have not ended."""

    def __init__(
        self,
        stream: AnswerStream,
        requests: Sequence[PromptRequest],
        metrics: Metrics,
        arrival: float,
        timeout: float | None,
        llm: AsyncLLM,
    ) -> None:
        self.stream, self.requests, self.metrics, self.llm = stream, requests, metrics, llm
        self.arrival, self.timeout = arrival, timeout
        self.num_answers = self.unended = sum(len(request.generations) for request in requests)
        self.last = [0.0] * self.num_answers  # when each was heard of last; 0: never
        self.generated = self.cached = 0  # tokens
        self.failure: ApiError | None = None
        self.given_up = False
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        metrics.prompt_tokens += self.prompt_tokens

    @contextlib.asynccontextmanager
    async def watched(self, receive: Receive) -> AsyncIterator[None]:
        """While this is open: once the client leaves, or its time is up, the engine hears of it at once."""
        watch = asyncio.create_task(self.watch(receive))
        loop, timer = asyncio.get_running_loop(), None
        if self.timeout is not None:
            timer = loop.call_later(self.arrival + self.timeout - time.perf_counter(), self.time_out)
        try:
            yield
        finally:
            watch.cancel()
            if timer is not None:
                timer.cancel()
            self.give_up()

    async def watch(self, receive: Receive) -> None:
        """The body has been read: the next thing to hear of the client is that it has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.give_up()

    def time_out(self) -> None:
        """Called by a timer."""
        self.failure = ApiError(504, f"the answer took more than {self.timeout} s", code="timeout")
        self.give_up()

    def give_up(self) -> None:
        """Nobody wants what has not ended. Counted at once, and once."""
        self.stream.abort()
        if not self.given_up:
            self.given_up = True
            self.metrics.finished["abort"] += self.unended

    async def next(self) -> list[AnswerEvent]:
        """News, of each answer at most one event; [] when all have ended or the client has gone.

        Raises ApiError for an answer that went wrong, after all that came before it was given out.
        """
        if self.failure is not None:
            raise self.failure
        events = await self.stream.next()
        now, metrics, last = time.perf_counter(), self.metrics, self.last
        for place, event in enumerate(events):
            count, before, answer = len(event.token_ids), last[event.answer], event.answer
            last[answer] = now
            if before:
                if count:
                    metrics.between_tokens.observe((now - before) / count, count)
            else:
                metrics.first_token.observe(now - self.arrival)
                if answer % self.answers_each == 0:
                    self.cached += event.num_cached_tokens
            self.generated += count
            metrics.generation_tokens += count
            if event.finish_reason is not None:
                self.finish(event, now)
                if self.failure is not None:
                    if not place:
                        raise self.failure
                    return events[:place]
        if not events and self.failure is not None:
            raise self.failure
        return events

    @property
    def left(self) -> int:
        """Answers of which there is more to hear; one that ended badly counts until `next` has raised why."""
        return self.unended + (self.failure is not None)

    @property
    def answers_each(self) -> int:
        """Answers to each prompt."""
        return len(self.requests[0].generations)

    def finish(self, event: AnswerEvent, now: float) -> None:
        """An answer has ended; if badly, so does its request, and the other answers with it."""
        self.unended -= 1
        self.metrics.finished[str(event.finish_reason)] += 1
        self.metrics.end_to_end.observe(now - self.arrival)
        if event.finish_reason in ("stop", "length"):
            return
        death = self.llm.death
        words = event.error or "the answer was given up"
        self.failure = engine_died(death) if death is not None else ApiError(500, words, code="answer_failed")

    def usage(self) -> dict[str, Any]:
        """Tokens, as token ids: what the prompts and the answers were, and what of the prompts was cached."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt_tokens + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
