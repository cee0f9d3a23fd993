"""Streams over a real connection: what goes out and when, who leaves, who reads slowly, and how they end."""

import asyncio
import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server.api import ApiSettings
from stages.s09_server.loopback import PATIENCE, DryLoopback, Loopback
from stages.s09_server.puppet import Puppet

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(tiny) -> Tokenizer:
    return Tokenizer(tiny("qwen2"))


@pytest.fixture
def server(tokenizer) -> Iterator[Loopback]:
    """A puppet behind a real connection."""

    async def make():
        return Puppet(tokenizer, max_num_seqs=8)

    with Loopback(make, ApiSettings(("m",), request_timeout=20)) as server:
        yield server


@pytest.fixture(scope="module")
def dry(tiny) -> Iterator[DryLoopback]:
    """The real engine without weights: a step takes 2 ms, so a long answer takes half a second."""
    with DryLoopback(tiny("qwen2"), 2.0, kv_cache_mb=16, max_num_seqs=16) as server:
        yield server


def chat(**fields) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True} | fields


def ask(server: Loopback, body: dict, path: str = CHAT) -> socket.socket:
    count = len(server.llm.streams) if isinstance(server.llm, Puppet) else 0
    client = server.connect(path, json.dumps(body).encode())
    if isinstance(server.llm, Puppet):
        server.wait_until(lambda: len(server.llm.streams) > count)
    return client


def say(server: Loopback, *arguments, **keywords) -> None:
    server.call(lambda: server.llm.say(*arguments, **keywords))


def read_until(client: socket.socket, wanted: bytes) -> bytes:
    """What has come when it ends with these bytes."""
    data = bytearray()
    while not data.endswith(wanted):
        piece = client.recv(2**20)
        assert piece, f"closed after {bytes(data)!r}"
        data += piece
    return bytes(data)


def read_past(client: socket.socket, wanted: bytes) -> bytes:
    """What has come when these bytes are in it."""
    data = b""
    while wanted not in data:
        piece = client.recv(2**20)
        assert piece, f"closed after {data!r}"
        data += piece
    return data


def is_silent(client: socket.socket, seconds: float = 0.1) -> bool:
    client.settimeout(seconds)
    try:
        client.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        client.settimeout(PATIENCE)
    return False


def events(data: bytes) -> list[str]:
    """The lines of a stream, without HTTP's chunks around them."""
    place, pieces = data.index(b"\r\n\r\n") + 4, []
    while place < len(data):
        size, place = int(data[place : data.index(b"\r\n", place)], 16), data.index(b"\r\n", place) + 2
        pieces.append(data[place : place + size])
        place += size + 2
    text = b"".join(pieces)
    assert text.endswith(b"\n\n")
    lines = text.decode().split("\n\n")[:-1]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


END = b"0\r\n\r\n"  # of a response


class TestOrder:
    @pytest.mark.parametrize("usage", [False, True])
    def test_what_clients_expect(self, server, usage):
        body = chat(stream_options={"include_usage": True}) if usage else chat()
        with ask(server, body) as client:
            data = b""
            for text, told in (("A", b'"A"'), ("", b""), ('b "é"\n', b'"b '), ("c", END)):
                say(server, text, finish_reason="length" if text == "c" else None)
                data += read_past(client, told)
        *lines, done = events(data)
        assert done == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
        assert chunks[0]["object"] == "chat.completion.chunk"
        if usage:
            last = chunks.pop()
            assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
            assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        else:
            assert not any("usage" in chunk for chunk in chunks)
        choices = [chunk["choices"] for chunk in chunks]
        assert choices == [
            [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
            for delta, reason in [
                ({"role": "assistant", "content": ""}, None),
                ({"content": "A"}, None),
                ({"content": 'b "é"\n'}, None),
                ({"content": "c"}, None),
                ({}, "length"),
            ]
        ]

    def test_completions(self, server):
        with ask(server, {"model": "m", "prompt": "x", "stream": True}, COMPLETIONS) as client:
            say(server, "A")
            data = read_past(client, b'"A"')
            say(server, "b", finish_reason="stop")
            *lines, done = events(data + read_until(client, END))
        assert done == "[DONE]"
        assert [json.loads(line)["choices"] for line in lines] == [
            [{"index": 0, "text": "A", "logprobs": None, "finish_reason": None}],
            [{"index": 0, "text": "b", "logprobs": None, "finish_reason": "stop"}],
        ]

    def test_headers_go_out_with_the_first_news(self, server):
        with ask(server, chat()) as client:
            assert is_silent(client)
            say(server, "")  # a token, and no text yet
            head = read_until(client, b"\n\n\r\n").decode().lower()
        assert "200 ok" in head and "text/event-stream" in head and "no-cache" in head
        assert '"role":"assistant"' in head


class TestErrors:
    def test_before_the_stream_an_error_has_a_status(self, server):
        with ask(server, chat()) as client:
            say(server, finish_reason="error", error="the step failed")
            head, _, body = read_until(client, b"}}").partition(b"\r\n\r\n")
        assert b" 500 " in head and b"application/json" in head
        assert "the step failed" in json.loads(body)["error"]["message"]

    def test_in_the_stream_an_error_is_the_last_event(self, server):
        with ask(server, chat(n=2)) as client:
            say(server, "a", answer=1)
            data = read_past(client, b'"a"')
            say(server, finish_reason="error", error="the step failed")
            *lines, last = events(data + read_until(client, END))  # before the other answer's time is up
        error = json.loads(last)["error"]
        assert ("the step failed" in error["message"], error["type"]) == (True, "server_error")
        assert all("choices" in json.loads(line) for line in lines)
        assert server.call(lambda: server.llm.num_open) == 0  # the other answer, too

    def test_what_came_before_the_error_is_told(self, server):
        """News of two answers at once: text, and an end that is no good one."""

        def both():
            server.llm.say("b", answer=1)
            server.llm.say("c", finish_reason="error", error="the step failed")

        with ask(server, chat(n=2)) as client:
            say(server, "a", answer=1)
            data = read_past(client, b'"a"')
            server.call(both)
            *_, text, last = events(data + read_until(client, END))
        assert json.loads(text)["choices"][0]["delta"] == {"content": "b"}
        assert "the step failed" in json.loads(last)["error"]["message"]

    def test_the_engines_death(self, server):
        with ask(server, chat()) as client:
            say(server, "a")
            data = read_past(client, b'"a"')
            server.call(lambda: server.llm.die("out of memory"))
            *_, last = events(data + read_until(client, END))
        assert "out of memory" in json.loads(last)["error"]["message"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_time_is_up(self, tokenizer, stream):
        async def make():
            return Puppet(tokenizer)

        with Loopback(make, ApiSettings(("m",), request_timeout=0.2)) as server:
            with ask(server, chat(stream=stream)) as client:
                if stream:
                    say(server, "a")
                    *_, last = events(read_until(client, END))
                else:
                    head, _, last = read_until(client, b"}}").partition(b"\r\n\r\n")
                    assert b" 504 " in head
            assert json.loads(last)["error"]["code"] == "timeout"
            assert server.call(lambda: server.llm.num_open) == 0


class TestLeaving:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("heard", [False, True])
    def test_who_leaves_is_given_up_at_once(self, server, stream, heard):
        with ask(server, chat(stream=stream)) as client:
            if heard:
                say(server, "a")
                assert not stream or client.recv(65536)
        server.wait_until(lambda: server.llm.num_open == 0)
        assert server.service.metrics.finished["abort"] == 1
        server.call(server.llm.streams[0].abort)  # again: nothing happens
        with ask(server, chat()) as client:
            say(server, "b", finish_reason="stop")
            assert b"[DONE]" in read_until(client, END)

    def test_its_blocks_are_free_and_the_next_is_served(self, dry):
        """A client reads three events and closes; another asks at once."""
        with dry.slowly(), ask(dry, chat(ignore_eos=True)) as client:
            data = b""
            while data.count(b"data: ") < 3:
                data += client.recv(1024)
            assert dry.call(lambda: dry.llm.stats.kv_blocks_used) > 0
        with ask(dry, chat(max_tokens=5)) as client:
            assert b"[DONE]" in read_until(client, END)
        dry.wait_until(lambda: (dry.llm.num_open, dry.llm.stats.running) == (0, 0))
        assert dry.llm.stats.kv_blocks_used == 0

    def test_many_leave(self, dry):
        clients = [ask(dry, chat(ignore_eos=True, n=2)) for _ in range(6)]
        for number, client in enumerate(clients):
            if number % 2:
                client.recv(1024)
            client.close()
        dry.wait_until(lambda: dry.llm.num_open == 0)
        with ask(dry, chat(max_tokens=2)) as client:
            assert b"[DONE]" in read_until(client, END)
        assert (dry.llm.stats.running, dry.llm.stats.waiting, dry.llm.stats.kv_blocks_used) == (0, 0, 0)


class TestSlowReaders:
    def test_who_reads_nothing_holds_up_nobody(self, server):
        """12 MB for one who does not read, while another gets every word at once. Then the first reads all of it."""
        with ask(server, chat()) as slow, ask(server, chat()) as quick:
            first, second = server.llm.streams
            word = "x" * 100_000
            for number in range(120):
                say(server, word, stream=first)
                say(server, f"<{number}>", stream=second)
                read_past(quick, f"<{number}>".encode())
            assert server.call(lambda: len(first.pending)) > 0  # it waits in the stream, and not in a socket
            say(server, "", stream=first, finish_reason="stop")
            chunks = [json.loads(line) for line in events(read_until(slow, END))[:-1]]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == word * 120
        assert len(chunks) < 120  # what was late came in fewer, larger pieces

    def test_who_reads_nothing_and_leaves(self, server):
        with ask(server, chat()) as client:
            for _ in range(100):
                say(server, "x" * 100_000)
            assert not is_silent(client, PATIENCE)
        server.wait_until(lambda: server.llm.num_open == 0)


class TestWholeTexts:
    def test_all_that_is_pending_goes_out_at_once(self, server):
        """Five tokens came while nobody looked: one event."""

        def five():
            for text in "abcde":
                server.llm.say(text)

        with ask(server, chat()) as client:
            say(server, "")
            read_until(client, b"\n\n\r\n")
            server.call(five)
            read_past(client, b'"content":"abcde"')

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_as_without_a_stream(self, dry, path):
        body = chat(n=3, max_tokens=40)
        if path == COMPLETIONS:
            body = {"model": "m", "prompt": ["a", "b"], "n": 2, "max_tokens": 40, "stream": True}
        with httpx.Client(base_url=dry.url, timeout=20) as client:
            whole = client.post(path, json=body | {"stream": False}).json()
            lines = client.post(path, json=body).text.split("\n\n")[:-2]
        texts = dict.fromkeys(range(len(whole["choices"])), "")
        for line in lines:
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            texts[choice["index"]] += choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        for choice in whole["choices"]:
            assert texts[choice["index"]] == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
            assert texts[choice["index"]].startswith("This is a dry run")


def test_a_stream_of_many_at_once(dry):
    """16 streams at once, each whole."""

    async def one(client):
        response = await client.post(CHAT, json=chat(max_tokens=50))
        return [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]

    async def all_of_them():
        async with httpx.AsyncClient(base_url=dry.url, timeout=20) as client:
            return await asyncio.gather(*(one(client) for _ in range(16)))

    texts = {
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        for chunks in asyncio.run(all_of_them())
    }
    assert len(texts) == 1
