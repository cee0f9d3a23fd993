"""Who is let in, how much may be sent, and what is said to all others. Bodies go over a real connection."""

import asyncio
import contextlib
import importlib.util
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server import loopback
from stages.s09_server.api import ApiSettings, make_app
from stages.s09_server.errors import ErrorBody
from stages.s09_server.limits import MAX_HEAD, BodyLimit
from stages.s09_server.listening import parser
from stages.s09_server.loopback import Loopback
from stages.s09_server.puppet import LENGTH, Puppet
from stages.s09_server.service import LONG_TEXT
from stages.s09_server.token_routes import MANY_TOKENS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT = 2**20  # bytes
ANSWER = {"text": "hi", "finish_reason": "stop"}


@pytest.fixture(scope="module")
def tokenizer(tiny) -> Tokenizer:
    return Tokenizer(tiny("qwen2"))


@pytest.fixture(scope="module")
def server(tokenizer) -> Iterator[Loopback]:
    async def make():
        return Puppet(tokenizer, ANSWER)

    with Loopback(make, ApiSettings(("m",), max_body_mb=LIMIT / 2**20)) as server:
        yield server


def body_of(size: int) -> bytes:
    """A good request of so many bytes."""
    body = json.dumps({"model": "m", "prompt": "x", "user": ""}).encode()
    return body[:-2] + b"u" * (size - len(body)) + body[-2:]


def response(client: socket.socket) -> tuple[int, bytes]:
    """Status and body, of a response that tells its length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(65536)
        assert piece, f"closed after {data!r}"
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    length = int(lines[b"content-length"])
    while len(body) < length:
        body += client.recv(65536)
    return int(head.split()[1]), body


def get_all(puppet: Puppet, asked: dict[str, str], headers=None, body=None, draining=False, **settings):
    """Responses, in process. asked: the method of each path."""

    async def go():
        app = make_app(puppet, ApiSettings(("m",), **settings))
        app.state.service.draining = draining
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://puppet") as client:
            return [await client.request(asked[path], path, headers=headers, json=body) for path in asked]

    return asyncio.run(go())


def get(puppet: Puppet, path: str, method: str = "GET", headers=None, body=None, **settings):
    """A response, in process."""
    return get_all(puppet, {path: method}, headers, body, **settings)[0]


def refused(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    assert ErrorBody.model_validate_json(response.content, strict=True).error.code == code


class TestBodies:
    @pytest.mark.parametrize("chunked", [False, True])
    @pytest.mark.parametrize(("size", "status"), [(LIMIT - 1, 200), (LIMIT, 200), (LIMIT + 1, 413)])
    def test_to_the_byte(self, server, chunked, size, status):
        body = body_of(size)
        if chunked:
            parts = [body[start : start + 60_000] for start in range(0, size, 60_000)]
            framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
            client = server.connect(COMPLETIONS, framed, "Transfer-Encoding: chunked")
        else:
            client = server.connect(COMPLETIONS, body)
        with client:
            told, content = response(client)
        assert told == status
        if status == 413:
            assert json.loads(content)["error"]["code"] == "body_too_large"

    def test_a_length_is_enough(self, server):
        """Nothing of the body has been sent."""
        with server.connect(COMPLETIONS, b"", "Content-Length: 99999999999") as client:
            assert response(client)[0] == 413

    def test_a_body_without_end(self, server):
        """It is told before all of it has come, and the connection ends."""
        part = b"%x\r\n%s\r\n" % (2**16, b"u" * 2**16)
        sent = 0
        with server.connect(COMPLETIONS, b"", "Transfer-Encoding: chunked") as client:
            with contextlib.suppress(ConnectionError):
                for _ in range(4000):  # 250 MB
                    client.sendall(part)
                    sent += 2**16
            assert LIMIT <= sent < 4000 * 2**16
            with contextlib.suppress(ConnectionError):
                assert response(client)[0] == 413

    def test_nothing_of_it_is_kept(self):
        """The app is never told more than the limit, however much comes."""
        came = []

        async def app(scope, receive, send):
            while (message := await receive())["more_body"]:
                came.append(len(message["body"]))

        async def scenario():
            sent, left = [], iter([b"u" * 1000] * 50)

            async def receive():
                piece = next(left, None)
                return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

            async def send(message):
                sent.append(message)

            await BodyLimit(app, limit=10_000)({"type": "http", "headers": []}, receive, send)
            return sent

        start, *_ = asyncio.run(scenario())
        assert start["status"] == 413
        assert sum(came) == 10_000

    def test_a_client_that_sends_all_first_hears_of_it(self, server):
        """httpx and most others read only when they have written."""
        headers = {"Content-Type": "application/json"}
        told = httpx.post(server.url + COMPLETIONS, content=b"u" * 8 * LIMIT, headers=headers)
        refused(told, 413, "body_too_large")

    @pytest.mark.parametrize("opening", [b"[", b'{"a":'])
    def test_deep_json(self, server, opening):
        with server.connect(COMPLETIONS, opening * 10_000) as client:
            status, content = response(client)
        assert (status, json.loads(content)["error"]["code"]) == (400, "invalid_json")


PARSERS = ["h11", *(["httptools"] if importlib.util.find_spec("httptools") else [])]


@pytest.fixture(scope="module", params=PARSERS)
def by_parser(request, tokenizer) -> Iterator[tuple[Loopback, int]]:
    """A server, and the status that it refuses a head with. h11 is told off by uvicorn, which knows 400 alone."""

    async def make():
        return Puppet(tokenizer, ANSWER)

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "h11":
            patch.setattr("importlib.util.find_spec", lambda name: None)
        told = parser()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loopback, "parser", lambda: told)
        patch.setattr("stages.s09_server.head_limit.LINGER_SECONDS", 0.2)
        with Loopback(make, ApiSettings(("m",))) as server:
            yield server, 400 if request.param == "h11" else 431


def head_of(size: int, end: bytes = b"\r\n\r\n") -> bytes:
    """A request for the models, of so many bytes."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-A: "
    return head + b"a" * (size - len(head) - len(end)) + end


class TestHeads:
    def test_up_to_the_limit(self, by_parser):
        """One after the other on one connection."""
        with socket.create_connection(by_parser[0].address, timeout=20) as client:
            for size in (MAX_HEAD, 100, MAX_HEAD):
                client.sendall(head_of(size))
                assert response(client)[0] == 200

    def test_a_byte_more_without_an_end(self, by_parser):
        server, status = by_parser
        with socket.create_connection(server.address, timeout=20) as client:
            client.sendall(head_of(MAX_HEAD + 1, end=b""))
            head, _, body = b"".join(iter(lambda: client.recv(1000), b"")).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        assert body and body.count(b"\n") == 0

    @pytest.mark.skipif("httptools" not in PARSERS, reason="h11 takes a head that comes at once")
    def test_to_the_byte(self, server):
        with socket.create_connection(server.address, timeout=20) as client:
            client.sendall(head_of(MAX_HEAD + 1))
            status, content = response(client)
        assert (status, ErrorBody.model_validate_json(content).error.code) == (431, "headers_too_large")

    def test_a_header_without_end(self, by_parser):
        """The connection ends, however much would still come; who only writes need not hear why."""
        with socket.create_connection(by_parser[0].address, timeout=20) as client:
            client.sendall(head_of(MAX_HEAD, end=b""))
            with pytest.raises(ConnectionError):
                for _ in range(1000):
                    client.sendall(b"a" * 2**16)
                    time.sleep(0.01)
        with httpx.Client(base_url=by_parser[0].url) as other:
            assert other.get("/health").is_success

    def test_what_comes_after_a_body(self, by_parser):
        """Trailers are headers too. An answer is under way, so nobody can be told."""
        body = b"%x\r\n%s\r\n0\r\n" % (len(body_of(50)), body_of(50))
        with by_parser[0].connect(COMPLETIONS, body + b"X-A: a\r\n\r\n", "Transfer-Encoding: chunked") as client:
            assert response(client)[0] == 200
        body += b"X-A: " + b"a" * 3 * MAX_HEAD
        with (
            by_parser[0].connect(COMPLETIONS, body, "Transfer-Encoding: chunked") as client,
            contextlib.suppress(ConnectionError),
        ):
            assert b" 200 " not in b"".join(iter(lambda: client.recv(1000), b""))

    def test_a_body_in_many_chunks(self, by_parser):
        """What is between them counts from one to the next."""
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in body_of(20_000)) + b"0\r\n\r\n"
        with by_parser[0].connect(COMPLETIONS, body, "Transfer-Encoding: chunked") as client:
            assert response(client)[0] == 200


@pytest.fixture(scope="module")
def roomy(tokenizer) -> Iterator[Loopback]:
    """Takes bodies of 16 MB."""

    async def make():
        return Puppet(tokenizer, ANSWER)

    with Loopback(make, ApiSettings(("m",), max_body_mb=16)) as server:
        yield server


class TestLongPrompts:
    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            (COMPLETIONS, {"prompt": [5] * 1_000_000}),
            (COMPLETIONS, {"prompt": "word " * 1_000_000}),
            (CHAT, {"messages": [{"role": "user", "content": "word " * 1_000_000}]}),
            (CHAT, {"messages": [{"role": "user", "content": "a"}] * 10_000}),
            (COMPLETIONS, {"prompt": ["a"] * 10_000}),
            (COMPLETIONS, {"prompt": ["a"] * 2048, "n": 128}),
            (COMPLETIONS, {"prompt": "x", "stop": ["x"] * 100_000}),
            (COMPLETIONS, {"prompt": "x", "logit_bias": {str(number): 1 for number in range(100_000)}}),
        ],
    )
    def test_they_are_refused_in_no_time(self, roomy, path, fields):
        body = json.dumps({"model": "m"} | fields).encode()
        took = []
        while len(took) < 3 and min(took, default=1.0) >= 1:
            began = time.process_time()  # client and server, whatever else keeps the machine busy
            with roomy.connect(path, body) as client:
                status, content = response(client)
            took.append(time.process_time() - began)
            assert status == 400 and len(content) < 1000
        assert min(took) < 1, took  # 0.1 at most on a small server; to make tokens of a million words takes 5

    def test_nobody_waits_for_a_long_text(self, tokenizer, monkeypatch):
        """While a thread makes tokens of one, another request comes and goes."""
        puppet = Puppet(tokenizer, ANSWER)
        long = "2" * (LONG_TEXT + 1)
        begun, may_end = threading.Event(), threading.Event()

        def encode(text):
            if text == long:
                begun.set()
                assert may_end.wait(20)
            return [5]

        monkeypatch.setattr(tokenizer, "encode", encode)
        monkeypatch.setattr("stages.s09_server.service.Service.max_characters", 10**9)

        async def scenario():
            transport = httpx.ASGITransport(make_app(puppet, ApiSettings(("m",))))
            async with httpx.AsyncClient(transport=transport, base_url="http://puppet") as client:
                slow = asyncio.create_task(client.post(COMPLETIONS, json={"model": "m", "prompt": long}))
                while not begun.is_set():
                    await asyncio.sleep(0.001)
                quick = await client.post(COMPLETIONS, json={"model": "m", "prompt": "x"})
                may_end.set()
                return quick.status_code, (await slow).status_code

        assert asyncio.run(asyncio.wait_for(scenario(), 30)) == (200, 200)

    def test_as_long_as_fits(self, tokenizer, monkeypatch):
        """The bound on characters refuses nothing that the model could take, and the next token is too much."""
        monkeypatch.setattr("stages.s09_server.service.LONG_TEXT", 0)
        longest = max((tokenizer.decode([token_id]) for token_id in range(500)), key=len)
        for count, status in ((LENGTH - 1, 200), (LENGTH, 400)):
            text = longest * count
            assert len(tokenizer.encode(text)) == count
            body = {"model": "m", "prompt": text}
            assert get(Puppet(tokenizer, ANSWER), COMPLETIONS, "POST", body=body).status_code == status

    def test_a_thread_puts_many_tokens_together(self, tokenizer, monkeypatch):
        threads = set()

        def token_bytes(token_id, skip_special):
            threads.add(threading.current_thread())
            return b"a"

        monkeypatch.setattr(tokenizer, "token_bytes", token_bytes)
        for count in (MANY_TOKENS, MANY_TOKENS + 1):
            response = get(Puppet(tokenizer), "/detokenize", "POST", body={"tokens": [5] * count})
            assert response.json() == {"prompt": "a" * count}
            assert (threads == {threading.main_thread()}) == (count == MANY_TOKENS)
            threads.clear()


class TestApiKey:
    ALLOWED = ("/health", "/version", "/metrics", "/openapi.json")

    WRONG = (None, "", "Bearer", "Bearer wrong", "key", "Basic key", "Bearer key2", "Bearer é")

    @pytest.mark.parametrize("header", WRONG)
    def test_without_it(self, tokenizer, header):
        headers = {} if header is None else {"Authorization": header.encode()}
        asked = {"/v1/models": "GET", CHAT: "POST", COMPLETIONS: "POST", "/tokenize": "POST", "/status": "GET"}
        for response in get_all(Puppet(tokenizer), asked, headers, api_key="key"):
            refused(response, 401, "invalid_api_key")
            assert "key" not in response.json()["error"]["message"].replace("API key", "")

    def test_with_it(self, tokenizer):
        assert get(Puppet(tokenizer), "/v1/models", headers={"Authorization": "Bearer key"}, api_key="key").is_success

    def test_what_machines_ask_needs_none(self, tokenizer):
        asked = dict.fromkeys(self.ALLOWED, "GET")
        assert all(response.is_success for response in get_all(Puppet(tokenizer), asked, api_key="key"))

    def test_below_a_proxys_path(self, tokenizer):
        """A server may be told of it, and then sees it in each path."""
        app = make_app(Puppet(tokenizer), ApiSettings(("m",), api_key="key", root_path="/llm"))

        async def ask(**headers):
            transport = httpx.ASGITransport(app, root_path="/llm")
            async with httpx.AsyncClient(transport=transport, base_url="http://puppet/llm") as client:
                return (await client.get("/v1/models", headers=headers)).status_code

        assert asyncio.run(ask()) == 401
        assert asyncio.run(ask(authorization="Bearer key")) == 200
        assert get(Puppet(tokenizer), "/openapi.json", root_path="/llm").json()["servers"] == [{"url": "/llm"}]

    def test_nobody_needs_one_unless_told(self, tokenizer):
        assert get(Puppet(tokenizer), "/v1/models").is_success


class TestRequestId:
    def test_told_back(self, tokenizer):
        headers = {"X-Request-Id": "mine"}
        for path in ("/health", "/nothing"):
            assert get(Puppet(tokenizer), path, headers=headers).headers["x-request-id"] == "mine"
        assert get(Puppet(tokenizer), "/v1/models", headers=headers, api_key="k").headers["x-request-id"] == "mine"

    def test_else_a_new_one(self, tokenizer):
        one, other = (get(Puppet(tokenizer), "/health").headers["x-request-id"] for _ in range(2))
        assert len(one) == len(other) == 32 and one != other

    def test_a_long_one_is_cut(self, tokenizer):
        headers = {"X-Request-Id": "i" * 5000}
        assert get(Puppet(tokenizer), "/health", headers=headers).headers["x-request-id"] == "i" * 128


class TestDraining:
    def test_nothing_new_is_taken(self, tokenizer):
        for path in (CHAT, COMPLETIONS):
            response = get(Puppet(tokenizer), path, "POST", body={}, draining=True)
            refused(response, 503, "shutting_down")
            assert int(response.headers["retry-after"]) > 0
        refused(get(Puppet(tokenizer), "/health", draining=True), 503, "shutting_down")
        assert get(Puppet(tokenizer), "/metrics", draining=True).is_success

    def test_what_is_open_goes_on(self, tokenizer):
        puppet = Puppet(tokenizer)

        async def scenario():
            app = make_app(puppet, ApiSettings(("m",)))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://puppet") as client:
                asked = asyncio.create_task(client.post(COMPLETIONS, json={"model": "m", "prompt": "x"}))
                while not puppet.streams:
                    await asyncio.sleep(0)
                app.state.service.draining = True
                puppet.say(**ANSWER)
                return await asked

        assert asyncio.run(scenario()).json()["choices"][0]["text"] == "hi"


class TestNoEngineYet:
    def test_another_one_is_on_its_way(self, tokenizer):
        """`death` is None again: nobody is told that an engine died of None."""
        puppet = Puppet(tokenizer)
        puppet.alive = False
        for path in ("/health", "/status"):
            response = get(puppet, path)
            refused(response, 503, "engine_starting")
            assert response.json()["error"]["message"] == "the engine is being started"
            assert response.headers["retry-after"]


class TestOtherOrigins:
    ASKING = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}

    def test_off_unless_told(self, tokenizer):
        response = get(Puppet(tokenizer), "/health", headers={"Origin": "http://page"})
        assert not any(name.startswith("access-control") for name in response.headers)
        assert get(Puppet(tokenizer), CHAT, "OPTIONS", self.ASKING).status_code == 405

    def test_those_that_were_told(self, tokenizer):
        settings = {"allowed_origins": ("http://page",), "api_key": "key"}
        response = get(Puppet(tokenizer), CHAT, "OPTIONS", self.ASKING, **settings)
        assert response.headers["access-control-allow-origin"] == "http://page"
        other = get(Puppet(tokenizer), CHAT, "OPTIONS", self.ASKING | {"Origin": "http://other"}, **settings)
        assert "access-control-allow-origin" not in other.headers
        refusal = get(Puppet(tokenizer), "/v1/models", headers={"Origin": "http://page"}, **settings)
        assert refusal.status_code == 401
        assert refusal.headers["access-control-allow-origin"] == "http://page"  # the page may read why
