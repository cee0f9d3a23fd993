"""One streamed request of the load generator: what is sent, when each piece of the answer came, how it ended.

Events of a stream are as in https://html.spec.whatwg.org/multipage/server-sent-events.html, their JSON as in OpenAI's
completions and chat completions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

SHOWN = 300  # characters of a server's complaint


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        """False for a chunk that only opens the answer or only ends it."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode = msgspec.json.Decoder(Chunk).decode


@dataclass
class Trace:
    """What one request met. Times are seconds of `time.perf_counter`.

    Attributes:
        due: When it was to be sent.
        woken: When the client turned to it; from there it may still wait for its turn, in a closed loop.
        sent: When it was sent.
        times: When each chunk that says something came. What comes in one read has one time.
        last: When the last chunk of a choice came, the finish reason included.
        end: When the response was complete.
        usage: The server's count of tokens, None if it told none.
        error: What kind of failure, None if the answer is complete; `detail` is the first words about it.
    """

    due: float
    woken: float = 0.0
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    last: float = 0.0
    end: float = 0.0
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""

    @property
    def output_tokens(self) -> int:
        """By the server's count; chunks, if it does not count."""
        return len(self.times) if self.usage is None else self.usage.completion_tokens

    @property
    def ttft(self) -> float:
        """Time to first token: until the first chunk that says something, or, if none does, until the last."""
        return (self.times[0] if self.times else self.last) - self.sent

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: between neighbouring chunks, however many tokens they carry."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token or none."""
        tokens = self.output_tokens
        return (self.last - self.sent - self.ttft) / (tokens - 1) if tokens > 1 else None

    @property
    def e2el(self) -> float:
        """End-to-end latency."""
        return self.end - self.sent

    def fail(self, kind: str, detail: object = "") -> None:
        self.error, self.detail = kind, str(detail)[:SHOWN]


class EventReader:
    """Cuts the bytes of an event stream into the data of its events, wherever the network has cut them."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def events(self, read: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif line in (b"", b"\r") and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data


async def send(session: aiohttp.ClientSession, url: str, body: bytes, trace: Trace) -> None:
    """Send `body`, read the whole stream into `trace`. What goes wrong is written there and not raised."""
    trace.sent = time.perf_counter()
    try:
        async with session.post(url, data=body, allow_redirects=False) as response:
            if response.status != 200:
                trace.fail(f"HTTP {response.status}", await response.text(errors="replace"))
            elif response.content_type != "text/event-stream":
                trace.fail("not an event stream", await response.text(errors="replace"))
            else:
                await _read(response, trace)
    except TimeoutError:
        trace.fail("timeout")
    except aiohttp.ClientConnectorError as error:
        trace.fail("cannot connect", error)
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
        trace.fail("closed early", error)
    except aiohttp.ClientError as error:
        trace.fail(type(error).__name__, error)
    trace.end = time.perf_counter()


async def _read(response: aiohttp.ClientResponse, trace: Trace) -> None:
    reader = EventReader()
    async for read in response.content.iter_any():
        now = time.perf_counter()
        for data in reader.events(read):
            if data != b"[DONE]":
                _take(data, now, trace)
    if trace.error is None and trace.finish_reason is None:
        trace.fail("closed early", "the stream ended without a finish reason")


def _take(data: bytes, now: float, trace: Trace) -> None:
    """Enter one event into the trace."""
    try:
        chunk = decode(data)
    except msgspec.DecodeError as error:
        trace.fail("malformed event", f"{error}: {data.decode(errors='replace')}")
        return
    if chunk.error is not None:
        trace.fail("error event", chunk.error)
    trace.usage = chunk.usage or trace.usage
    for choice in chunk.choices:
        trace.last = now
        if choice.says_something:
            trace.times.append(now)
        if choice.finish_reason is not None:
            trace.finish_reason = choice.finish_reason
            if choice.finish_reason in ("error", "abort"):
                trace.fail(f"finish_reason {choice.finish_reason}")
