"""A server from its start to its end: the engine, the HTTP server, signals, and what is done when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from dataclasses import replace

import msgspec
import uvicorn

from stages.s01_forward.config import ModelConfig
from stages.s01_forward.hub import resolve_model
from stages.s09_server.answer_stream import EngineDied
from stages.s09_server.api import make_app
from stages.s09_server.async_llm import TOKENIZERS, AsyncLLM
from stages.s09_server.config import ServeConfig
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.engine_watch import watch_engine
from stages.s09_server.listening import bind, event_loop_factory, parser, url_of
from stages.s09_server.service import Service
from stages.s09_server.signals import Signals

TICK = 0.05  # seconds between two looks at what has no event of its own
FLUSH_SECONDS = 2.0  # for the last bytes of what has ended
DEATH_SECONDS = 1.0  # so long a server without an engine says so, before it ends
KEEP_ALIVE_SECONDS = 65  # longer than common clients and proxies keep a connection: none is closed under a request

log = logging.getLogger("stepinfer.server")


def run_server(config: ServeConfig) -> int:
    """Serve until told to end; the exit code: 0, 1 (the engine died), 2 (the caller's mistake), 130 (ended at once)."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("stepinfer").setLevel(logging.INFO)
    if config.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    try:
        engine = with_folder(config.engine)
        listener = bind(config.host, config.port)
    except (ValueError, OSError) as error:
        return fail(str(error), 2)
    with listener, asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        return runner.run(serve(replace(config, engine=engine), listener))


def with_folder(engine: EngineSettings) -> EngineSettings:
    """A model that is not there is told before seconds are spent on processes."""
    if engine.model == "demo":
        return engine
    folder = resolve_model(engine.model, progress=sys.stderr.isatty())
    ModelConfig.from_dir(folder)
    return msgspec.structs.replace(engine, model=str(folder))


def fail(message: str, code: int) -> int:
    """Say what is wrong, in one line; returns the exit code."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


async def serve(config: ServeConfig, listener: socket.socket) -> int:
    """From the engine's start to the last answer."""
    if not config.in_process:
        # The tokenizer needs it once the engine is ready; meanwhile there is nothing else to do, for seconds.
        threading.Thread(target=importlib.import_module, args=(TOKENIZERS,), daemon=True).start()
    with Signals() as signals:
        starting = asyncio.create_task(
            AsyncLLM.start(config.engine, in_process=config.in_process, text_process=config.text_process)
        )
        await first_of(starting, signals.first.wait())
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return signals.exit_code
        try:
            llm = await starting
        except EngineDied as error:
            return fail(str(error), 1 if error.fault else 2)
        try:
            listener.listen(2048)
        except OSError as error:
            await llm.close()
            return fail(f"port {config.port} of {config.host} was taken meanwhile: {error}", 2)
        return await Server(config, llm, listener, signals).run()


class HttpServer(uvicorn.Server):
    """uvicorn, which leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


class Server:
    """An engine that is ready, and a socket that listens."""

    def __init__(self, config: ServeConfig, llm: AsyncLLM, listener: socket.socket, signals: Signals) -> None:
        self.config, self.llm, self.listener, self.signals = config, llm, listener, signals
        app = make_app(llm, config.api)
        self.service: Service = app.state.service
        self.http = HttpServer(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=config.access_log,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                **parser(),
            )
        )

    async def run(self) -> int:
        """Until there is nothing more to serve."""
        gc.collect()
        gc.freeze()  # the modules, the tokenizer: they need not be looked at again and again
        serving = asyncio.create_task(self.http.serve(sockets=[self.listener]))
        engine_lost = asyncio.create_task(watch_engine(self.llm, self.config.on_engine_death))
        self.tell_address()
        try:
            await first_of(serving, engine_lost, self.signals.first.wait())
            if engine_lost.done():
                code = fail(f"{engine_lost.result()}; this server ends", 1)
                await first_of(asyncio.sleep(DEATH_SECONDS), self.signals.first.wait())
            else:
                await self.drain()
                code = self.signals.exit_code
        finally:
            engine_lost.cancel()
            await asyncio.wait([engine_lost])
            await self.llm.close()  # what is still open ends here
            await self.end_http(serving)
        return code

    async def end_http(self, serving: asyncio.Task[None]) -> None:
        """Let the last bytes go out; who does not read them is cut off."""
        self.http.should_exit = True
        await asyncio.wait([serving], timeout=0.2 if self.signals.second.is_set() else FLUSH_SECONDS)
        for connection in list(self.http.server_state.connections):
            connection.transport.abort()
        await serving

    def tell_address(self) -> None:
        """What the person who started it wants to know."""
        url, name = url_of(self.listener), self.service.model_name
        stepinfer = os.environ.get("STEPINFER_COMMAND", "stepinfer")
        key = "" if self.config.api.api_key is None else " --api-key KEY"
        lines = [
            f"{name} is served at {url}",
            f"  status page, and a chat to try: {url}/",
            f"  for OpenAI clients:             {url}/v1, model {name}",
            f"  in another terminal:            {stepinfer} chat --url {url}{key}",
        ]
        if self.config.engine.dry_run:
            lines.append("  This is a dry run: without weights, every answer is the same.")
        if self.config.host not in ("127.0.0.1", "localhost", "::1") and self.config.api.api_key is None:
            lines.append("  Whoever reaches this address can use it: --api-key asks for a key.")
        sys.stdout.write("\n".join([*lines, ""]))  # at once: a script may read the first line and go
        sys.stdout.flush()

    async def drain(self) -> None:
        """Nothing new is taken; what is open may go on for a while."""
        self.service.draining = True
        deadline = time.monotonic() + self.config.drain_seconds
        if self.busy:
            log.info(
                "shutting down: no new requests; open answers (%d) have %g s to end; Ctrl-C ends them now",
                self.llm.num_open,
                self.config.drain_seconds,
            )
        while self.busy and self.llm.alive and time.monotonic() < deadline and not self.signals.second.is_set():
            await asyncio.sleep(TICK)

    @property
    def busy(self) -> bool:
        """Is anything computed, or on its way to a client? Who has not sent all of a request is not waited for."""
        cycles = [getattr(connection, "cycle", None) for connection in self.http.server_state.connections]
        asked = [cycle for cycle in cycles if cycle is not None and not cycle.more_body]
        return bool(self.llm.num_open) or any(not cycle.response_complete for cycle in asked)


async def first_of(*things: Awaitable[object]) -> None:
    """Returns when the first of them has happened. Tasks go on; what is no task is given up."""
    tasks = [asyncio.ensure_future(thing) for thing in things]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, thing in zip(tasks, things, strict=True):
        if task is not thing:
            task.cancel()
