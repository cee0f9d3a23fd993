"""For checks of the API over a real connection: an app on a free port of this machine, served by a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import uvicorn

from stages.s09_server.api import make_app
from stages.s09_server.listening import bind
from stages.s09_server.service import ApiSettings, Service

Result = TypeVar("Result")


class Loopback:
    """Ready when the `with` block begins, and gone after it.

    make_llm: makes the engine in the server's event loop: an `AsyncLLM`, or what stands in for one.
    """

    def __init__(self, make_llm: Callable[[], Awaitable[Any]], settings: ApiSettings | None = None) -> None:
        self.make_llm, self.settings = make_llm, settings or ApiSettings(("m",))
        self.listener = bind("127.0.0.1", 0)
        self.listener.listen()
        self.address = self.listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)

    async def serve(self) -> None:
        """Until told to end."""
        self.loop = asyncio.get_running_loop()
        self.llm = await self.make_llm()
        app = make_app(self.llm, self.settings)
        self.service: Service = app.state.service
        self.server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        self.loop.call_soon(self.ready.set)
        await self.server.serve([self.listener])
        if hasattr(self.llm, "close"):
            await self.llm.close()

    def call(self, function: Callable[[], Result]) -> Result:
        """The result of a function that is called in the server's event loop."""

        async def run() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 5.0) -> float:
        """How many seconds it took until a condition held, looked at in the server's loop. Raises TimeoutError."""
        began = time.perf_counter()
        while not self.call(condition):
            if time.perf_counter() - began > seconds:
                raise TimeoutError(f"after {seconds} s it does not hold")
            time.sleep(0.005)
        return time.perf_counter() - began

    def connect(self, path: str, body: bytes, *headers: str) -> socket.socket:
        """A connection that has asked something, and reads as it likes."""
        client = socket.create_connection(self.address, timeout=10)
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
        if not any(line.lower().startswith(("transfer-encoding", "content-length")) for line in headers):
            lines.append(f"Content-Length: {len(body)}")
        client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return client

    def __enter__(self) -> Loopback:
        self.thread.start()
        if not self.ready.wait(60):
            raise RuntimeError("the server does not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.listener.close()
