"""A server for tests of the load generator: each answer comes as a script says, to the millisecond and the byte."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

EVENTS = b"Content-Type: text/event-stream; charset=utf-8\r\n"


@dataclass(frozen=True)
class Script:
    """One response.

    Attributes:
        pieces: (seconds to wait, bytes to send) each; the first wait is before the headers.
        whole: The response is ended as HTTP says; otherwise the connection is cut.
    """

    pieces: Sequence[tuple[float, bytes]]
    status: int = 200
    headers: bytes = EVENTS
    whole: bool = True


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(piece: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish_reason}])


def delta(finish_reason: str | None = None, **content: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": content, "finish_reason": finish_reason}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


DONE = b"data: [DONE]\n\n"


def answer(tokens: int, first: float = 0.0, gap: float = 0.0) -> Script:
    """`tokens` chunks of a token each, the first after `first` seconds, the others `gap` after one another."""
    pieces = [(gap if number else first, text(" a")) for number in range(tokens)]
    return Script([*pieces, (0.0, text("", "length") + usage(3, tokens) + DONE)])


@dataclass
class ScriptedServer:
    """Use it as a context: inside, `url` answers. It runs on a thread of its own, so it does not wait for its client.

    As an asynchronous context it runs in its client's event loop.

    Attributes:
        script: From a request's body to its response.
        bodies: Of all requests so far; `keys` are their Authorization headers.
        most_open: The most requests that were under way at a time.
    """

    script: Callable[[dict[str, Any]], Script]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""
    open: int = 0
    most_open: int = 0

    def __enter__(self) -> ScriptedServer:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(ready))
        self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._stop = asyncio.Event()
        async with self:
            ready.set()
            await self._stop.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def __aenter__(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the test is over
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its response; False when the connection must not be used again."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(content or b"{}")
        if first.startswith("GET"):
            body = {"path": first.split()[1]}
        self.bodies.append(body)
        self.keys.append(headers.get("authorization"))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._respond(self.script(body), writer)
        finally:
            self.open -= 1

    async def _respond(self, script: Script, writer: asyncio.StreamWriter) -> bool:
        head = f"HTTP/1.1 {script.status} -\r\n".encode() + script.headers + b"Transfer-Encoding: chunked\r\n\r\n"
        for wait, piece in script.pieces:
            await asyncio.sleep(wait)
            writer.write(head + b"%x\r\n%s\r\n" % (len(piece), piece))
            head = b""
            await writer.drain()
        if script.whole:
            writer.write(head + b"0\r\n\r\n")
        return script.whole
