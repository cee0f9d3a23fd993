"""The server as strangers use it, over a real connection: OpenAI's Python client, curl, `llm`, Prometheus, a crowd."""

import asyncio
import gc
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server import dry_run
from stages.s09_server.api import ApiSettings
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.children import ROOT
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.loopback import DryLoopback, Loopback
from stages.s09_server.prometheus_process import PROMETHEUS, PROMTOOL, PrometheusProcess
from stages.s09_server.server_process import busy
from tests.scripted import scripted

KEY = "sesame"
EOS = 2
HELLO = [{"role": "user", "content": "hello"}]
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
SEATS, LINE = 16, 64  # answers that run, and that may wait
# Families and flags are several code points, Hangul and accents may be; each byte is a token, or a few are.
STORY = "👩‍👩‍👧 says: ça va? 漢字かな 한국어 한 é🇫🇷, नमस्ते! "


# ---- servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tiny, tmp_path_factory) -> Iterator[Loopback]:
    """Weights, and a key: after a chat's prompt it says A😀é and ends; after "x" it says hi."""
    tokenizer = Tokenizer(tiny("qwen2"))
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(500)}
    after_a_chat = [ids[b"\n"], *(ids[bytes([byte])] for byte in "A😀é".encode()), EOS]
    scripts = [after_a_chat, [ids[b"x"], ids[b"h"], ids[b"i"], 0]]
    folder = scripted(tiny("qwen2"), tmp_path_factory.mktemp("clients") / "model", scripts)
    settings = EngineSettings(str(folder), {"device": "cpu", "kv_cache_mb": 2, "max_num_seqs": 8})
    api = ApiSettings(("m", "org/m-alias"), api_key=KEY)
    with Loopback(lambda: AsyncLLM.start(settings, in_process=True), api) as server:
        yield server


@pytest.fixture(scope="module")
def dry(tiny) -> Iterator[DryLoopback]:
    """No weights, and 2 ms for a step, so that a long answer takes half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "STORY", STORY)
        api = ApiSettings(("m",), max_waiting=LINE)
        with DryLoopback(tiny("qwen2"), 2.0, api, kv_cache_mb=16, max_num_seqs=SEATS) as it:
            yield it


@pytest.fixture(scope="module", autouse=True)
def prometheus(dry, tmp_path_factory) -> Iterator[PrometheusProcess | None]:
    """For all of this file: it takes five seconds before it scrapes for the first time."""
    if PROMETHEUS is None:
        yield None
    else:
        with PrometheusProcess(dry.url, tmp_path_factory.mktemp("prometheus")) as it:
            yield it


@pytest.fixture(scope="module")
def client(real) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def slow(dry) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{dry.url}/v1/", api_key="none", max_retries=0) as client:  # the slash is not needed
        yield client


def settled(server: Loopback) -> int:
    """Within seconds nobody is there, and nothing is held; how many answers were given up since the server's start."""

    def held() -> tuple[int, ...]:
        llm = server.llm
        return llm.num_open, llm.stats.running, llm.stats.waiting, llm.stats.kv_blocks_used

    server.wait_until(lambda: held() == (0, 0, 0, 0))
    return server.service.metrics.finished["abort"]


# ---- OpenAI's client -------------------------------------------------------------------------------------------------


class TestOpenAI:
    def test_models(self, client):
        assert [model.id for model in client.models.list()] == ["m", "org/m-alias"]
        assert client.models.retrieve("org/m-alias").owned_by == "stepinfer"

    def test_a_chat(self, client):
        answer = client.chat.completions.create(
            model="m", messages=HELLO, temperature=0, user="u", metadata={"a": "b"}, parallel_tool_calls=False
        )
        [choice] = answer.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "A😀é", "stop")
        assert answer.usage.completion_tokens == 8

    def test_a_streamed_chat(self, client):
        stream = client.chat.completions.create(
            model="m", messages=HELLO, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        first, *middle, end, usage = stream
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
        pieces = [chunk.choices[0].delta.content for chunk in middle]  # who reads late gets several as one
        assert all(pieces) and "".join(pieces) == "A😀é"
        assert (end.choices[0].finish_reason, end.choices[0].delta.content) == ("stop", None)
        assert (usage.choices, usage.usage.completion_tokens) == ([], 8)
        assert len({chunk.id for chunk in (first, *middle, end, usage)}) == 1

    def test_the_helper_that_puts_a_stream_together(self, client):
        asked = {"model": "m", "messages": HELLO, "temperature": 0, "logprobs": True, "top_logprobs": 2, "n": 2}
        with client.chat.completions.stream(**asked) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            answer = stream.get_final_completion()
        whole = client.chat.completions.create(**asked)
        assert Counter("".join(filter(None, deltas))) == Counter({"A": 2, "😀": 2, "é": 2})
        assert [choice.message.content for choice in answer.choices] == ["A😀é", "A😀é"]
        assert [choice.logprobs.content for choice in answer.choices] == [
            choice.logprobs.content for choice in whole.choices
        ]

    def test_logprobs(self, client):
        asked = {"model": "m", "messages": HELLO, "temperature": 0, "logprobs": True, "top_logprobs": 3}
        content = client.chat.completions.create(**asked).choices[0].logprobs.content
        assert bytes(byte for entry in content[:-1] for byte in entry.bytes).decode() == "A😀é"
        for entry in content:
            assert [entry.token, entry.logprob] == [entry.top_logprobs[0].token, entry.top_logprobs[0].logprob]
            assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1 + 1e-6

    def test_a_completion(self, client):
        answer = client.completions.create(model="m", prompt=["x", "zx"], n=2, temperature=0, echo=True, logprobs=1)
        assert [choice.text for choice in answer.choices] == ["xhi", "xhi", "zxhi", "zxhi"]
        for choice in answer.choices:
            scores = choice.logprobs
            assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
            assert "".join(scores.tokens) == choice.text + "<|endoftext|>"
            assert scores.text_offset == list(range(len(scores.tokens)))

    def test_a_streamed_completion(self, client):
        stream = client.completions.create(
            model="m", prompt="x", temperature=0, stream=True, stream_options={"include_usage": True}
        )
        *parts, usage = stream
        assert "".join(part.choices[0].text for part in parts) == "hi"
        assert parts[-1].choices[0].finish_reason == "stop"
        assert usage.usage.total_tokens == usage.usage.prompt_tokens + 3

    def test_stop(self, client):
        answer = client.chat.completions.create(model="m", messages=HELLO, temperature=0, stop=["😀", "nowhere"])
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("A", "stop")

    def test_a_seed(self, client):
        def text(seed: int) -> str:
            asked = {"model": "m", "prompt": "y", "seed": seed, "max_tokens": 30}
            return client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text

        assert text(1) == text(1) != text(2)

    def test_a_bias(self, client, real):
        [token] = real.llm.tokenizer.encode("z")
        answer = client.chat.completions.create(
            model="m", messages=HELLO, temperature=0, max_completion_tokens=3, logit_bias={str(token): 100}
        )
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("zzz", "length")

    @pytest.mark.parametrize("streamed", [False, True])
    def test_an_answer_of_a_given_form(self, client, streamed):
        class Verdict(pydantic.BaseModel):
            good: bool
            colours: list[Literal["red", "grün"]] = pydantic.Field(max_length=2)

        asked = {"model": "m", "messages": HELLO, "seed": 3, "response_format": Verdict}
        if streamed:
            with client.chat.completions.stream(**asked) as stream:
                answer = stream.get_final_completion()
        else:
            answer = client.chat.completions.parse(**asked)
        verdict = answer.choices[0].message.parsed
        assert isinstance(verdict, Verdict)
        assert set(verdict.colours) <= {"red", "grün"}

    def test_async(self, real):
        async def text(client: openai.AsyncOpenAI, streamed: bool) -> str:
            asked = {"model": "m", "messages": HELLO, "temperature": 0}
            if not streamed:
                return (await client.chat.completions.create(**asked)).choices[0].message.content
            async with await client.chat.completions.create(**asked, stream=True) as stream:
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def main() -> None:
            async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key=KEY) as client:
                texts = await asyncio.gather(*(text(client, number % 2 == 0) for number in range(20)))
                assert texts == ["A😀é"] * 20
                assert [model.id async for model in client.models.list()] == ["m", "org/m-alias"]
                answer = await client.completions.create(model="m", prompt=[[7, 8], [9]], max_tokens=2)
                assert len(answer.choices) == 2

        asyncio.run(main())


class TestErrorsOfOpenAI:
    def test_a_bad_request(self, client):
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            client.chat.completions.create(model="m", messages=HELLO, temperature=3)
        assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.BadRequestError) as caught:  # with a status, though a stream was asked for
            client.chat.completions.create(model="m", messages=HELLO, tools=[{"type": "function"}], stream=True)
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported_value")
        assert caught.value.request_id

    def test_what_is_not_there(self, client):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-9", messages=HELLO)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError, match="org/other"):
            client.models.retrieve("org/other")
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings"):
            client.embeddings.create(model="m", input="a")
        with pytest.raises(openai.NotFoundError, match="POST /v1/responses"):
            client.responses.create(model="m", input="a")

    def test_a_wrong_key(self, client):
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key="guess").models.list()
        assert caught.value.code == "invalid_api_key"

    def test_a_full_queue(self, slow, dry):
        """The client comes again when it was told to, and not earlier."""

        def leave_when_refused() -> None:
            dry.wait_until(lambda: dry.service.metrics.responses[429] > refused)
            blocker.close()

        asked = {"model": "m", "prompt": "x", "max_tokens": 250, "extra_body": {"ignore_eos": True}}
        with dry.slowly(), ThreadPoolExecutor(1) as pool:
            blocker = slow.completions.create(**asked, n=SEATS + LINE, stream=True)
            next(blocker)
            with pytest.raises(openai.RateLimitError) as caught:
                slow.completions.create(model="m", prompt="x")
            assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("queue_full", "1")
            refused = dry.service.metrics.responses[429]
            leaving = pool.submit(leave_when_refused)
            began = time.perf_counter()
            answer = slow.with_options(max_retries=1).completions.create(model="m", prompt="x", max_tokens=2)
            assert time.perf_counter() - began >= 0.95  # it sleeps by another clock
            assert answer.usage.completion_tokens == 2
            leaving.result()
        assert dry.service.metrics.responses[429] == refused + 1
        settled(dry)

    def test_time_is_up(self, slow, dry):
        """The client's own: it leaves, and what it had asked for is given up."""
        before = settled(dry)
        with dry.slowly(), pytest.raises(openai.APITimeoutError):
            slow.with_options(timeout=0.4).completions.create(
                model="m", prompt="x", max_tokens=250, extra_body={"ignore_eos": True}
            )
        assert settled(dry) == before + 1


class TestStreamsOfOpenAI:
    def test_characters_come_whole(self, slow, dry):
        whole, chunks = "", 0
        for chunk in slow.chat.completions.create(model="m", messages=HELLO, stream=True):
            text = chunk.choices[0].delta.content or ""
            assert "\ufffd" not in text
            whole, chunks = whole + text, chunks + bool(text)
        assert whole == STORY
        assert chunks > len(STORY) / 3

    def test_who_closes_early_frees_its_blocks(self, slow, dry):
        asked = {"model": "m", "prompt": "x", "n": 8, "max_tokens": 250, "extra_body": {"ignore_eos": True}}
        before = settled(dry)
        with dry.slowly(0.01):
            stream = slow.completions.create(**asked, stream=True)
            next(stream)
            assert dry.llm.stats.kv_blocks_used > 0
            stream.close()
        assert settled(dry) == before + 8
        with dry.slowly(0.01), slow.completions.create(**asked, stream=True) as stream:
            for _ in zip(range(3), stream, strict=False):
                pass
        assert settled(dry) == before + 16
        with dry.slowly(0.01):
            for _ in slow.completions.create(**asked, stream=True):  # neither closed nor kept
                break
            gc.collect()  # what the client has left lies in a cycle
        assert settled(dry) == before + 24


# ---- the crowd -------------------------------------------------------------------------------------------------------


def values(page: str) -> Counter[str]:
    """Of /metrics, summed over labels."""
    sums = Counter[str]()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            sums[sample.name.removeprefix("stepinfer_")] += sample.value
    return sums


def test_64_streams_with_random_disconnects(dry):
    """Some read slowly, with little room for what they have not read; half leave in the middle, each in its own way."""
    rng = random.Random(9)
    before = values(httpx.get(f"{dry.url}/metrics").text)
    told: Counter[str] = Counter()

    async def one(client: openai.AsyncOpenAI, number: int) -> None:
        asked = {"model": "m", "messages": HELLO, "max_tokens": rng.randint(10, 60), "n": rng.choice([1, 1, 2])}
        asked |= {"stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
        leaves_after, pause = rng.choice([None, rng.randint(1, 30)]), 0.0
        if number % 9 == 0:
            asked |= {"logprobs": True, "top_logprobs": 20}
            pause = 0.01
        async with asyncio.timeout(rng.uniform(0.05, 0.8) if number % 8 == 0 else None):
            stream = await client.chat.completions.create(**asked, stream=True)
            async with stream:
                chunks = []
                async for chunk in stream:
                    chunks.append(chunk)
                    if len(chunks) == leaves_after:
                        told["left"] += asked["n"]
                        return
                    await asyncio.sleep(pause)
            assert chunks[-1].usage.completion_tokens == asked["max_tokens"] * asked["n"]
            told["answers"] += asked["n"]
            told["tokens"] += asked["max_tokens"] * asked["n"]

    async def main() -> None:
        options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
        limits = httpx.Limits(max_connections=None)
        transport = httpx.AsyncHTTPTransport(socket_options=options, limits=limits)
        async with (
            httpx.AsyncClient(transport=transport, timeout=30) as http,
            openai.AsyncOpenAI(base_url=f"{dry.url}/v1", api_key="none", http_client=http, max_retries=5) as client,
        ):
            ends = await asyncio.gather(*(one(client, number) for number in range(64)), return_exceptions=True)
        assert {type(end) for end in ends} == {type(None), TimeoutError}, ends

    given_up = settled(dry)
    with dry.slowly(0.006):
        asyncio.run(main())
    assert told["left"] // 2 < settled(dry) - given_up  # others had ended before their reader left
    assert busy(dry.url) == {}
    assert dry.llm.streams == {} and dry.llm.answers.open == {}
    after = values(httpx.get(f"{dry.url}/metrics").text)
    after.subtract(before)
    assert 10 < told["answers"] <= after["request_success_total"]
    assert told["tokens"] <= after["generation_tokens_total"]
    assert after["e2e_request_latency_seconds_count"] <= after["time_to_first_token_seconds_count"]
    assert after["time_to_first_token_seconds_count"] <= after["request_success_total"]
    assert httpx.post(f"{dry.url}/v1/completions", json={"model": "m", "prompt": "x"}).status_code == 200


# ---- curl, llm -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
class TestCurl:
    def curl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["curl", "--silent", "--show-error", "--max-time", "20", *arguments]
        return subprocess.run(command, capture_output=True, encoding="utf-8")

    def test_a_chat(self, real):
        body = json.dumps({"model": "m", "messages": HELLO, "temperature": 0})
        url, key = f"{real.url}/v1/chat/completions", f"Authorization: Bearer {KEY}"
        done = self.curl("--fail", url, "-H", key, "-H", "Content-Type: application/json", "-d", body)
        assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "A😀é"
        refused = self.curl(url, "--json", body, "--write-out", "\n%{http_code}")
        error, status = refused.stdout.splitlines()
        assert (json.loads(error)["error"]["code"], status) == ("invalid_api_key", "401")

    def test_without_the_type_of_its_body_it_is_told_so(self, real):
        done = self.curl(f"{real.url}/v1/completions", "-H", f"Authorization: Bearer {KEY}", "-d", "{}")
        assert "Content-Type: application/json" in json.loads(done.stdout)["error"]["message"]

    def test_a_stream_comes_as_it_grows(self, dry):
        """With -N each line is there at once; Ctrl-C frees what it held."""
        body = {"model": "m", "prompt": "x", "stream": True}
        url = f"{dry.url}/v1/completions"
        command = ["curl", "-sN", url, "--json", json.dumps(body | {"max_tokens": 250, "ignore_eos": True})]
        with dry.slowly(), subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
            lines = [process.stdout.readline() for _ in range(6)]
            assert dry.llm.num_open == 1
            before = dry.service.metrics.finished["abort"]
            assert all(line.startswith("data: {") for line in lines[::2]) and set(lines[1::2]) == {"\n"}
            process.terminate()
        assert settled(dry) == before + 1
        whole = self.curl("-N", url, "--json", json.dumps(body | {"max_tokens": 9}))
        assert whole.stdout.endswith("\n\ndata: [DONE]\n\n")


@pytest.fixture(scope="module", autouse=True)
def chatting(real, tmp_path_factory) -> Iterator[subprocess.Popen[str]]:
    """`llm chat`, started and not waited for: it imports for seconds. Its model is told in a file, as its
    documentation says.
    """
    folder = tmp_path_factory.mktemp("llm")
    model = {"model_id": "step", "model_name": "m", "api_base": f"{real.url}/v1", "api_key_name": "stepinfer"}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")  # JSON is YAML
    (folder / "keys.json").write_text(json.dumps({"stepinfer": KEY}), encoding="utf-8")
    told = {"LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": "", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "llm", "chat", "-m", "step", "-o", "temperature", "0"]
    with subprocess.Popen(command, env=os.environ | told, encoding="utf-8", **PIPES) as process:
        yield process
        process.kill()


def test_llm(real, chatting):
    """In a chat it sends the conversation so far."""
    before = real.service.metrics.prompt_tokens
    said, complaints = chatting.communicate("hello\nhello\nquit\n", timeout=60)
    assert chatting.returncode == 0, complaints
    assert said.count("A😀é\n") == 2
    once = len(real.llm.tokenizer.encode_chat(HELLO))
    answered = [*HELLO, {"role": "assistant", "content": "A😀é"}, *HELLO]
    twice = len(real.llm.tokenizer.encode_chat(answered))
    assert real.service.metrics.prompt_tokens - before == once + twice


# ---- made-up requests, and what machines read ------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def made_up(tiny) -> Iterator[tuple[Loopback, subprocess.Popen[str]]]:
    """A server, and schemathesis in a process of its own, which asks it while the other checks here go on."""
    options = {"device": "cpu", "kv_cache_mb": 4, "max_model_len": 64, "max_num_seqs": 64}
    settings = EngineSettings(str(tiny("qwen2")), options, dry_run=True)
    with Loopback(lambda: AsyncLLM.start(settings, in_process=True), ApiSettings(("m",), api_key=KEY)) as server:
        command = [sys.executable, "-m", "stages.s09_server.openapi_cases", "--cases", "25", "--seed", "9"]
        command += ["--url", server.url, "--key", KEY]
        with subprocess.Popen(command, cwd=ROOT, encoding="utf-8", **PIPES) as process:
            yield server, process
            process.kill()


def test_requests_that_schemathesis_makes_up(made_up):
    """`python -m stages.s09_server.openapi_cases` asks 2,000, of a model with weights."""
    server, process = made_up
    said, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    settled(server)
    assert busy(server.url) == {}
    statuses = Counter[str]()
    for line in said.splitlines():
        _, status, count = line.rsplit(maxsplit=2)
        statuses[status] += int(count)
    assert min(statuses["200"], statuses["400"]) >= 10


def numbers_of(schema: object) -> Iterator[dict]:
    """The parts of a schema that are numbers."""
    if isinstance(schema, dict) and schema.get("type") in ("integer", "number"):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from numbers_of(part)


def test_the_document_says_what_numbers_may_be(dry):
    """In JSON schema's own words, which programs know. Token ids of prompts end where the model's vocabulary does."""
    schemas = httpx.get(f"{dry.url}/openapi.json").json()["components"]["schemas"]
    bodies = [schemas[name]["properties"] for name in ("ChatRequest", "CompletionRequest", "DetokenizeRequest")]
    fields = [field for body in bodies for name, field in body.items() if name != "prompt"]
    numbers = [number for field in fields for number in numbers_of(field)]
    assert len(numbers) > 20
    for number in numbers:
        assert "maximum" in number and {"minimum", "exclusiveMinimum"} & number.keys(), number


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_finds_nothing(dry, slow):
    slow.completions.create(model="m", prompt="x", max_tokens=3)
    page = httpx.get(f"{dry.url}/metrics").content
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed")
def test_prometheus_scrapes_a_loaded_server(dry, slow, prometheus):
    """While answers run it says so; each sample of the page can be asked for."""
    prometheus.wait_for("up == 1")
    asked = {"model": "m", "prompt": "x", "max_tokens": 250, "extra_body": {"ignore_eos": True}}
    with dry.slowly(0.05), slow.completions.create(**asked, n=SEATS + LINE, stream=True) as stream:
        next(stream)
        [(labels, _)] = prometheus.wait_for(f"stepinfer_num_requests_running == {SEATS}")
        assert (labels["model_name"], labels["job"]) == ("m", "stepinfer")
    settled(dry)
    prometheus.wait_for("stepinfer_kv_cache_usage_perc == 0")
    page = text_string_to_metric_families(httpx.get(f"{dry.url}/metrics").text)
    names = {sample.name for family in page for sample in family.samples}
    assert len(names) > 15
    for name in names:
        prometheus.wait_for(name)
    prometheus.wait_for("histogram_quantile(0.5, stepinfer_inter_token_latency_seconds_bucket) > 0")
