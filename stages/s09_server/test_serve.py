"""A server from its start to its end: drained, killed, restarted. As users have it, and in this process."""

import asyncio
import json
import signal
import socket
import sys
import time

import httpx
import openai
import psutil
import pytest

from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server import engine_watch, loop_link, serve
from stages.s09_server.answer_stream import EngineDied
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.config import ServeConfig
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.listening import bind, url_of
from stages.s09_server.serve import Server
from stages.s09_server.service import ApiSettings
from stages.s09_server.signals import Signals

LONG = {"model": "m", "prompt": "Once", "max_tokens": 150, "stream": True, "ignore_eos": True}
LONG |= {"stream_options": {"include_usage": True}}
RIGGED = LONG | {"prompt": [5]}  # for an engine without a tokenizer


def config(tiny, step_ms=2.0, **options):
    engine = EngineSettings(str(tiny("llama")), {"kv_cache_mb": 4}, dry_run=True, dry_run_step_ms=step_ms)
    return ServeConfig(engine, ApiSettings(("m",)), port=0, **options)


class Running:
    """A `Server` in this event loop, its exit code to come, and a client."""

    def __init__(self, settings: ServeConfig) -> None:
        self.settings = settings

    async def __aenter__(self):
        self.llm = await AsyncLLM.start(self.settings.engine, in_process=self.settings.in_process)
        listener = bind("127.0.0.1", 0)
        listener.listen()
        self.signals = Signals()
        self.server = Server(self.settings, self.llm, listener, self.signals)
        self.code = asyncio.create_task(self.server.run())
        url = url_of(listener)
        self.client = httpx.AsyncClient(base_url=url, timeout=20, verify=False)  # it would read certificates, in vain
        return self

    async def __aexit__(self, *_):
        self.code.cancel()
        await asyncio.wait([self.code])
        await self.client.aclose()

    async def read(self, began: asyncio.Event, body: dict) -> list[str]:
        """All events of a long answer, as text."""
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            began.set()  # with the engine's first news
            return [line async for line in response.aiter_lines() if line]

    async def begin(self, body: dict = LONG) -> asyncio.Task[list[str]]:
        """A long answer, which has begun."""
        began = asyncio.Event()
        reading = asyncio.create_task(self.read(began, body))
        await began.wait()
        return reading

    async def llm_is_done(self) -> None:
        """The engine has begun, and ended, all that it was asked for; the clients may not have read it."""
        while not self.llm.stats.tokens or self.llm.num_open:
            await asyncio.sleep(0.01)

    def signal(self) -> None:
        """As Ctrl-C does."""
        self.signals.hear(signal.SIGINT, None)

    async def begin_to_drain(self) -> None:
        """The first signal, and it has been heard."""
        self.signal()
        while not self.server.service.draining:
            await asyncio.sleep(0.01)


def run(settings, scenario):
    """A coroutine with a running server; nothing takes longer than a minute."""

    async def main():
        async with asyncio.timeout(60), Running(settings) as running:
            await scenario(running)

    asyncio.run(main())


# ---- as users have it ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(launched):
    with launched["processes"] as it:
        yield it


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it


def test_it_says_where_it_is(server):
    assert server.lines[0] == f"story is served at {server.url}"
    server.wait_for("This is a dry run")
    assert "Traceback" not in server.output


def test_the_file_and_the_command_line(client):
    assert [model.id for model in client.models.list()] == ["story", "m"]
    assert client.models.retrieve("m").max_model_len == 250


def test_openai_client(client):
    messages = [{"role": "user", "content": "Hello"}]
    told = client.chat.completions.create(model="story", messages=messages).choices[0]
    assert told.message.content.startswith("This is a dry run: ")
    assert told.finish_reason == "stop"
    stream = client.chat.completions.create(model="story", messages=messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == told.message.content


def test_chat_at_a_server(server, tiny):
    from typer.testing import CliRunner

    from stages.cli import app

    words = len(Tokenizer(tiny("llama")).encode("This is a dry run"))
    result = CliRunner().invoke(
        app, ["chat", "--url", server.url, "--max-tokens", str(words)], input="Hello\n\nAgain\n"
    )
    assert (result.exit_code, result.stdout) == (0, "This is a dry run\nThis is a dry run\n")
    assert result.stderr.count("--max-tokens") == 2  # both were cut
    result = CliRunner().invoke(app, ["chat", "other", "--url", f"{server.url}/v1"], input="Hello\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: 404: the model 'other' is not served here" in result.stderr


def children(server, module):
    return [p for p in psutil.Process(server.process.pid).children(True) if module in " ".join(p.cmdline())]


@pytest.fixture(scope="module")
def killed(server, client):
    """The engine is killed in the middle of an answer; returns what is told of it."""
    [engine] = children(server, "engine_process")
    stream = client.completions.create(
        model="m", prompt="Once", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    engine.kill()
    with pytest.raises(openai.APIError) as told:
        list(stream)
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(model="m", prompt="Once")
    return told.value, refused.value


def test_who_asks_a_killed_engine_is_told(killed):
    told, refused = killed
    assert "the engine has died" in str(told)
    assert refused.status_code == 503


# ---- in this process, while another engine is launched ---------------------------------------------------------------


def test_open_answers_end_and_new_ones_are_refused(tiny):
    async def scenario(it: Running):
        reading = await it.begin()
        await it.begin_to_drain()
        refused = await it.client.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) > 0
        assert (await it.client.get("/health")).status_code == 503
        events = await reading
        assert '"finish_reason":"length"' in events[-3]
        assert '"completion_tokens":150' in events[-2]
        assert events[-1] == "data: [DONE]"
        assert await it.code == 0

    run(config(tiny, in_process=True), scenario)


def test_what_is_open_for_too_long_ends_with_an_error(tiny):
    async def scenario(it: Running):
        reading = await it.begin()
        it.signal()
        assert '{"error":{"message":"the server is shutting down"' in (last := (await reading)[-1])
        assert '"code":"shutting_down"' in last
        assert await it.code == 0

    run(config(tiny, step_ms=100.0, drain_seconds=0.1, in_process=True), scenario)


def test_a_second_signal_ends_at_once(tiny):
    async def scenario(it: Running):
        reading = await it.begin()
        await it.begin_to_drain()
        it.signal()
        assert await it.code == 130
        assert "shutting down" in (await reading)[-1]

    run(config(tiny, step_ms=100.0, in_process=True), scenario)  # the answer would take 15 s


def test_a_client_that_does_not_read_is_cut_off(tiny, caplog, monkeypatch):
    monkeypatch.setattr(serve, "FLUSH_SECONDS", 0.2)

    async def scenario(it: Running):
        body = json.dumps({**LONG, "n": 64, "logprobs": 5}).encode()
        _, writer = await asyncio.open_connection(*it.server.listener.getsockname(), limit=1000)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        await it.llm_is_done()
        it.signal()
        assert await it.code == 0
        writer.close()

    run(config(tiny, step_ms=0.0, drain_seconds=0.1, in_process=True), scenario)
    assert [record.exc_info for record in caplog.records if record.levelname == "ERROR"] == []


def test_half_a_request_is_not_waited_for(tiny, monkeypatch):
    """But who sends the rest while others are answered is answered, too."""
    monkeypatch.setattr(serve, "FLUSH_SECONDS", 0.2)

    async def half(it: Running):
        """A connection with half a request, and the other half."""
        body = json.dumps(LONG | {"stream": False, "stream_options": None, "max_tokens": 3}).encode()
        reader, writer = await asyncio.open_connection(*it.server.listener.getsockname())
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body[:9])
        await writer.drain()
        return reader, writer, body[9:]

    async def scenario(it: Running):
        reader, writer, rest = await half(it)
        _, silent, _ = await half(it)
        while len(it.server.http.server_state.tasks) < 2:
            await asyncio.sleep(0.01)
        reading = await it.begin()
        await it.begin_to_drain()
        writer.write(rest)
        assert b" 200 OK" in await reader.readline()
        assert (await reading)[-1] == "data: [DONE]"
        assert await it.code == 0
        writer.close()
        silent.close()

    run(config(tiny, drain_seconds=1000.0, in_process=True), scenario)


def test_without_an_engine_the_server_says_so_and_ends(capsys, monkeypatch):
    """A process, and kill -9. It would say so for a minute; Ctrl-C."""
    monkeypatch.setattr(loop_link, "ENGINE", "stages.s09_server.rigged_engine")
    monkeypatch.setattr(serve, "DEATH_SECONDS", 60.0)

    async def scenario(it: Running):
        reading = await it.begin(RIGGED)
        it.llm.link.link.process.kill()
        assert '{"error":{"message":"the engine has died' in (await reading)[-1]
        health = await it.client.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
        assert (await it.client.post("/v1/completions", json=RIGGED)).status_code == 503
        while "this server ends" not in "".join(said):
            await asyncio.sleep(0.01)
            said.append(capsys.readouterr().err)
        it.signal()
        assert await it.code == 1

    said = []
    run(ServeConfig(EngineSettings("serves"), ApiSettings(("m",)), port=0), scenario)
    assert "error: the engine died: the engine process ended with exit code" in "".join(said)


def test_an_engine_that_never_lives_is_given_up(tiny, monkeypatch, capsys):
    attempts = []

    async def launch():
        attempts.append(time.monotonic())
        raise EngineDied("no memory")

    monkeypatch.setattr(engine_watch, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(serve, "DEATH_SECONDS", 0.1)

    async def scenario(it: Running):
        monkeypatch.setattr(it.llm, "launch", launch)
        it.llm.died(EngineDied("struck down"))
        assert await it.code == 1

    run(config(tiny, in_process=True, on_engine_death="restart"), scenario)
    waits = [later - earlier for earlier, later in zip(attempts, attempts[1:], strict=False)]
    assert len(attempts) == engine_watch.MAX_RESTARTS
    assert waits[-1] >= 0.15  # the fifth wait: 16 times the first, by a clock that may be coarse
    assert "the engine does not start: no memory; 5 engines in a row did not live" in capsys.readouterr().err


def test_a_signal_while_the_engine_starts(tiny):
    async def main():
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        with bind("127.0.0.1", 0) as listener:
            return await serve.serve(config(tiny, in_process=True), listener)

    before = signal.getsignal(signal.SIGINT)
    assert asyncio.run(main()) == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is in use by another program; .* --port"):
            bind("127.0.0.1", port)


def test_hosts_that_are_none():
    with pytest.raises(ValueError, match="host 'no such host' is not known"):
        bind("no such host", 0)
    with pytest.raises(ValueError, match="192.0.2.1 is not an address of this machine"):
        bind("192.0.2.1", 0)


def test_addresses_for_a_client_of_this_machine():
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


# ---- and as users have it, to the end --------------------------------------------------------------------------------


def test_all_in_one_process(launched):
    with launched["one process"] as server:
        assert psutil.Process(server.process.pid).children() == []
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert client.completions.create(model="m", prompt="Once", max_tokens=3).usage.completion_tokens == 3
    assert server.process.returncode == 0 or sys.platform == "win32"


def test_a_killed_engine_comes_back(killed, server, client):
    server.wait_for("the engine is back")
    assert client.completions.create(model="m", prompt="Once", max_tokens=3).usage.completion_tokens == 3
    assert len(children(server, "engine_process")) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a program could hear")
def test_sigterm_lets_answers_end(server, client):
    """The last of this file: the server is gone after it."""
    processes = [psutil.Process(server.process.pid), *children(server, "")]
    stream = client.completions.create(
        model="m", prompt="Once", max_tokens=150, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(r"open answers \(1\)")
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(model="m", prompt="Once")
    assert refused.value.response.headers["retry-after"]
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert server.process.wait(60) == 0
    assert not psutil.wait_procs(processes, timeout=30)[1]
    assert "Traceback" not in server.output
