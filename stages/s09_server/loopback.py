"""For checks of the API over a real connection: an app on a free port of this machine, served by a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import uvicorn

from stages.s09_server import engine_process
from stages.s09_server.api import make_app
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.listening import bind, parser
from stages.s09_server.service import ApiSettings, Service

Result = TypeVar("Result")
PATIENCE = 15.0  # seconds, for anything; what a server does in its own good time must take longer


class QuickServer(uvicorn.Server):
    """uvicorn, which otherwise looks ten times a second whether it is to end, and takes its time then."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Until told."""
        await self.on_tick(0)
        await self.ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The check is over: nobody waits for what it has left open."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=1)


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
        self.server = QuickServer(uvicorn.Config(app, log_config=None, lifespan="off", **parser()))
        self.loop.call_soon(self.ready.set)
        await self.server.serve([self.listener])
        if hasattr(self.llm, "close"):
            await self.llm.close()

    def call(self, function: Callable[[], Result]) -> Result:
        """The result of a function that is called in the server's event loop."""

        async def run() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until a condition holds, looked at in the server's loop. Raises TimeoutError."""
        began = time.perf_counter()
        while not self.call(condition):
            if time.perf_counter() - began > PATIENCE:
                raise TimeoutError(f"after {PATIENCE} s it does not hold")
            time.sleep(0.002)

    def connect(self, path: str, body: bytes, *headers: str) -> socket.socket:
        """A connection that has asked something, and reads as it likes."""
        client = socket.create_connection(self.address, timeout=PATIENCE)
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
        self.loop.call_soon_threadsafe(self.server.ended.set)
        self.thread.join(20)
        self.listener.close()


class DryLoopback(Loopback):
    """A dry run, and its engine at hand.

    folder: of a model. step_ms, options: as `EngineSettings` has them.
    """

    engine: Any

    def __init__(self, folder: Path, step_ms: float, settings: ApiSettings | None = None, **options: Any) -> None:
        wanted = EngineSettings(str(folder), {"device": "cpu"} | options, dry_run=True, dry_run_step_ms=step_ms)
        make_llm = engine_process.make_llm

        def make(settings: EngineSettings) -> Any:
            made = make_llm(settings)
            self.engine = made.engine
            return made

        async def start() -> AsyncLLM:
            with mock.patch.object(engine_process, "make_llm", make):
                return await AsyncLLM.start(wanted, in_process=True)

        super().__init__(start, settings)

    @contextlib.contextmanager
    def slowly(self, seconds: float = 0.02) -> Iterator[None]:
        """A step takes so long: no answer ends before a check has done what it does in the middle of one."""
        runner = self.engine.runner
        usual, runner.step_seconds = runner.step_seconds, seconds
        try:
            yield
        finally:
            runner.step_seconds = usual
