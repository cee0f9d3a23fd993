"""Server-sent events: an answer as it grows. https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stages.s09_server.errors import ApiError, error_object
from stages.s09_server.exchange import Exchange
from stages.s09_server.messages import AnswerEvent

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect what is meant to flow
]


class Chunks(ABC):
    """How one endpoint writes its stream. All but the text is the same in every chunk, so it is encoded once.

    head: from `head_of`. usage: was it asked for?
    """

    def __init__(self, exchange: Exchange, head: dict[str, Any], usage: bool) -> None:
        self.exchange, self.usage = exchange, usage
        self.head = b"data: " + encode(head)[:-1] + b',"choices":['
        self.tail = b"]" + (b',"usage":null' if usage else b"") + b"}\n\n"

    @abstractmethod
    def chunk(self, event: AnswerEvent) -> bytes:
        """An event of the engine as none, one or several events of the stream."""

    def of_choice(self, choice: dict[str, Any]) -> bytes:
        """A chunk that is encoded whole."""
        return self.head + encode(choice) + self.tail

    def end(self) -> bytes:
        """What comes before the last line, when all answers have ended: the usage, if it was asked for."""
        return self.head + b'],"usage":' + encode(self.exchange.usage()) + b"}\n\n" if self.usage else b""


def head_of(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """What a response, or each chunk of a stream, begins with. Nothing inside goes by the id."""
    return {"id": f"{prefix}-{secrets.token_hex(16)}", "object": kind, "created": int(time.time()), "model": model}


class EventStream(Response):
    """The response to a request with `stream: true`.

    It begins with the engine's first news: whatever goes wrong before has a status of its own. All that is pending goes
    out in one write. A client that reads slowly holds up this method alone: `send` waits until its socket has room, and
    the engine's news are merged meanwhile.
    """

    def __init__(self, exchange: Exchange, chunks: Chunks) -> None:
        self.exchange, self.chunks = exchange, chunks
        self.status_code, self.background = 200, None
        self.raw_headers = HEADERS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until all answers have ended, or the client has gone."""
        exchange, chunk = self.exchange, self.chunks.chunk
        async with exchange.watched(receive):
            events = await exchange.next()  # an error is an answer with its own status still
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                while exchange.left and events:
                    if body := b"".join(map(chunk, events)):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                    events = await exchange.next()
                last = b"".join(map(chunk, events)) + self.chunks.end() + DONE
            except ApiError as error:  # the status has gone out long ago
                last = error_event(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that could not go on."""
    return b"data: " + encode(error_object(error)) + b"\n\n"
