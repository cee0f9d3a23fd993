"""The API from its outside: what comes back, word for word, and with which status.

`real` is a server on loopback whose model follows a script; elsewhere a puppet says what a check wants to hear.
"""

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from stages.s01_forward.outputs import TokenLogprob
from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server.api import ApiSettings, make_app
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.errors import ErrorBody
from stages.s09_server.loopback import Loopback
from stages.s09_server.puppet import LENGTH, Puppet
from stages.s09_server.response_models import ChatCompletion, Completion, Models
from stages.s09_server.token_texts import CompletionScores, TokenTexts
from tests.fixtures import start_early
from tests.scripted import scripted

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAMES = ("m", "org/m-alias")
EOS, NO_TOKEN = 2, 505  # <|im_end|>; a row of the model that the tokenizer does not know
EMOJI = "A😀é"  # 1 + 4 + 2 bytes, and a token for each


@pytest.fixture(scope="module", autouse=True)
def early(request):
    start_early(request, "dry_engines", "test_async_llm.py")


@cache
def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tiny: Callable[[str], Path]) -> Tokenizer:
    return tokenizer_of(tiny("qwen2"))


@pytest.fixture(scope="module")
def real(tiny, tokenizer: Tokenizer, tmp_path_factory) -> Iterator[Loopback]:
    """After a chat's prompt it says A😀é and ends; after "x" h, a token without text, i, and the end of a turn."""
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(500)}
    bytes_of_emoji = [ids[bytes([byte])] for byte in EMOJI.encode()]
    scripts = [[ids[b"\n"], *bytes_of_emoji, EOS], [ids[b"x"], ids[b"h"], NO_TOKEN, ids[b"i"], 0]]
    folder = scripted(tiny("qwen2"), tmp_path_factory.mktemp("api") / "model", scripts)
    settings = EngineSettings(str(folder), options={"device": "cpu", "kv_cache_mb": 2, "max_num_seqs": 8})
    with Loopback(lambda: AsyncLLM.start(settings, in_process=True), ApiSettings(NAMES)) as server:
        yield server


@pytest.fixture(scope="module")
def client(real: Loopback) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=30) as client:
        yield client


def chat(content="hello", **fields) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0} | fields


def completion(prompt="x", **fields) -> dict:
    return {"model": "m", "prompt": prompt, "temperature": 0} | fields


def answer(client: httpx.Client, path: str, body: dict) -> dict:
    """A good answer, of the form that the OpenAPI document tells."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    (ChatCompletion if path == CHAT else Completion).model_validate_json(response.content, strict=True)
    return response.json()


def chunks(text: str) -> list[dict]:
    """The events of a stream, which ends as clients expect."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def stream(client: httpx.Client, path: str, body: dict) -> list[dict]:
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks(response.text)


def refused(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """An error object in every detail; returns its words."""
    assert response.status_code == status, response.text
    error = ErrorBody.model_validate_json(response.content, strict=True).error
    assert (error.param, error.code) == (param, code), error
    return error.message


def ask(puppet: Puppet, *requests: tuple[str, dict], **settings) -> list[httpx.Response]:
    """Responses to requests that are there at the same time, in process."""

    async def all_of_them():
        transport = httpx.ASGITransport(make_app(puppet, ApiSettings(("m",), **settings)), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://puppet") as client:
            return await asyncio.gather(*(client.post(path, json=body) for path, body in requests))

    return asyncio.run(all_of_them())


class TestAnswers:
    def test_a_chat(self, client):
        body = answer(client, CHAT, chat())
        assert (body["object"], body["model"]) == ("chat.completion", "m")
        assert body["id"].startswith("chatcmpl-")
        [choice] = body["choices"]
        assert choice == {
            "index": 0,
            "message": {"role": "assistant", "content": EMOJI},
            "logprobs": None,
            "finish_reason": "stop",
        }

    def test_usage_counts_token_ids(self, client):
        """7 tokens of text and the one that ended it; the end is no text."""
        usage = answer(client, CHAT, chat())["usage"]
        prompt = client.post("/tokenize", json={"messages": chat()["messages"]}).json()["count"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 8)
        assert usage["total_tokens"] == prompt + 8

    def test_cached_tokens_are_told(self, client):
        long = chat("one two three four five six seven eight nine ten " * 2)
        answer(client, CHAT, long)
        usage = answer(client, CHAT, long)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 16 * 16 > 0

    def test_usage_of_several_answers(self, tokenizer):
        """Tokens that came together count all, what is cached of a prompt once."""
        script = [
            {"text": "ab", "token_ids": [7, 8], "num_cached_tokens": 16},
            {"text": "a", "answer": 1, "num_cached_tokens": 16, "finish_reason": "stop"},
            {"text": "c", "finish_reason": "stop"},
        ]
        for stream in (False, True):
            options = {"stream_options": {"include_usage": True}} if stream else {}
            [response] = ask(Puppet(tokenizer, *script), (CHAT, chat(n=2, stream=stream, **options)))
            usage = (chunks(response.text)[-1] if stream else response.json())["usage"]
            assert usage["completion_tokens"] == 4
            assert usage["prompt_tokens_details"] == {"cached_tokens": 16}

    def test_a_completion(self, client):
        body = answer(client, COMPLETIONS, completion())
        assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")
        assert body["choices"] == [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}]
        assert body["usage"]["completion_tokens"] == 4  # h, one without text, i, the end

    def test_sixteen_tokens_unless_told(self, client):
        [choice] = answer(client, COMPLETIONS, completion(ignore_eos=True))["choices"]
        assert choice["finish_reason"] == "length"
        usage = answer(client, COMPLETIONS, completion(ignore_eos=True))["usage"]
        assert usage["completion_tokens"] == 16

    def test_prompts_of_all_forms(self, client, tokenizer):
        ids = tokenizer.encode("x")
        for prompt in ("x", ids, ["x"], [ids]):
            assert [c["text"] for c in answer(client, COMPLETIONS, completion(prompt))["choices"]] == ["hi"]
        body = answer(client, COMPLETIONS, completion(["x", ids, "x"], n=2))
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(index, "hi") for index in range(6)]
        assert body["usage"] == {
            "prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 0},
        }  # fmt: skip

    @pytest.mark.parametrize(("field", "value"), [("max_completion_tokens", 3), ("max_tokens", 3)])
    def test_the_cap(self, client, field, value):
        [choice] = answer(client, CHAT, chat(**{field: value}))["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == "A\ufffd"  # two bytes of four

    def test_of_two_caps_the_newer(self, client):
        body = answer(client, CHAT, chat(max_completion_tokens=3, max_tokens=5))
        assert body["usage"]["completion_tokens"] == 3

    def test_never_beyond_the_models_length(self, client):
        for cap in ({}, {"max_tokens": None}, {"max_tokens": 10**9}):
            usage = answer(client, CHAT, chat("2" * 230, ignore_eos=True, **cap))["usage"]
            assert (usage["total_tokens"], usage["completion_tokens"] < 16) == (LENGTH, True)

    @pytest.mark.parametrize("role", ["system", "user", "assistant"])
    def test_parts_are_as_their_text(self, client, role):
        def prompt_tokens(content):
            messages = [{"role": role, "content": content}]
            return answer(client, CHAT, chat(messages=messages, max_tokens=1))["usage"]["prompt_tokens"]

        parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
        assert prompt_tokens(parts) == prompt_tokens("a b") != prompt_tokens("a b c")
        assert prompt_tokens([]) == prompt_tokens(None) == prompt_tokens("")

    def test_a_developer_is_the_system(self, client):
        def count(role):
            return client.post("/tokenize", json={"messages": [{"role": role, "content": "Be brief."}]}).json()

        assert count("developer") == count("system") != count("user")

    def test_a_seed_gives_the_same_answer(self, client):
        def text(**fields):
            choices = answer(client, COMPLETIONS, completion("y", temperature=1, ignore_eos=True, **fields))["choices"]
            return [choice["text"] for choice in choices]

        assert text(seed=1) == text(seed=1) != text(seed=2)
        one, other = text(seed=1, n=2)
        assert [one] == text(seed=1) and one != other

    def test_a_bias(self, client, tokenizer):
        [token] = tokenizer.encode("z")
        for body in (
            completion(logit_bias={str(token): 100}, max_tokens=3),
            chat(logit_bias={str(token): 100}, max_tokens=3),
        ):
            path = CHAT if "messages" in body else COMPLETIONS
            [choice] = answer(client, path, body)["choices"]
            assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == "zzz"

    def test_a_stop_string_is_no_text(self, client):
        [choice] = answer(client, CHAT, chat(stop="😀"))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("A", "stop")
        deltas = [c["choices"][0]["delta"].get("content", "") for c in stream(client, CHAT, chat(stop="😀"))]
        assert "".join(deltas) == "A"


class TestStreams:
    def test_whole_characters(self, client):
        deltas = [chunk["choices"][0]["delta"] for chunk in stream(client, CHAT, chat())]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        assert "".join(delta["content"] for delta in deltas[1:-1]) == EMOJI
        assert not any("\ufffd" in delta["content"] for delta in deltas[:-1])

    @pytest.mark.parametrize("cap", range(1, 8))
    def test_cut_anywhere_as_without_a_stream(self, client, cap):
        body = chat(max_tokens=cap)
        whole = answer(client, CHAT, body)["choices"][0]["message"]["content"]
        parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in stream(client, CHAT, body)]
        assert "".join(parts) == whole

    def test_several_answers(self, client):
        texts: dict[int, str] = {}
        reasons = {}
        for chunk in stream(client, COMPLETIONS, completion(["x", "x"], n=2)):
            [choice] = chunk["choices"]
            assert choice["index"] not in reasons
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
        assert texts == dict.fromkeys(range(4), "hi")
        assert reasons == dict.fromkeys(range(4), "stop")

    @pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion())])
    def test_usage_as_without_a_stream(self, client, path, body):
        *others, last = stream(client, path, body | {"stream_options": {"include_usage": True}})
        assert all(chunk["usage"] is None for chunk in others)
        assert last["choices"] == []
        expected = answer(client, path, body)["usage"]
        for usage in (last["usage"], expected):
            del usage["prompt_tokens_details"]  # the second finds more
        assert last["usage"] == expected


class TestLogprobs:
    def test_bytes_are_the_tokens_own(self, client):
        [choice] = answer(client, CHAT, chat(logprobs=True, top_logprobs=2))["choices"]
        content = choice["logprobs"]["content"]
        assert [entry["bytes"] for entry in content[:5]] == [[65], [240], [159], [152], [128]]
        assert bytes(b for entry in content[:7] for b in entry["bytes"]).decode() == EMOJI
        assert content[7]["token"] == "<|im_end|>"
        for entry in content:
            top = [alternative["logprob"] for alternative in entry["top_logprobs"]]
            assert len(top) == 2 and top == sorted(top, reverse=True)
            assert entry["logprob"] == top[0]  # greedy

    def test_a_stream_brings_the_same(self, client):
        body = chat(logprobs=True, top_logprobs=1)
        whole = answer(client, CHAT, body)["choices"][0]["logprobs"]["content"]
        parts = [chunk["choices"][0]["logprobs"] for chunk in stream(client, CHAT, body)]
        assert [entry for part in parts if part for entry in part["content"]] == whole

    def test_without_alternatives(self, client):
        [choice] = answer(client, CHAT, chat(logprobs=True))["choices"]
        assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])

    def test_a_token_without_text(self, client):
        """Models have more rows than their tokenizers have tokens."""
        [choice] = answer(client, COMPLETIONS, completion(logprobs=3))["choices"]
        assert choice["text"] == "hi"
        assert choice["logprobs"]["tokens"] == ["h", "", "i", "<|endoftext|>"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]

    def test_no_alternative_is_lost(self, tokenizer):
        """Two of three look the same: a list keeps both, a dict by text the likelier."""
        half, a, other_half = tokenizer.encode("😀")[0], tokenizer.encode("a")[0], tokenizer.encode("é")[0]
        score = TokenLogprob(half, -0.5, 1, ((half, -0.5), (a, -1.0), (other_half, -2.0)))
        puppet = Puppet(tokenizer, {"token_ids": [half], "logprobs": [score], "finish_reason": "length"})
        [response] = ask(puppet, (CHAT, chat(logprobs=True, top_logprobs=3)))
        [entry] = response.json()["choices"][0]["logprobs"]["content"]
        assert [(e["token"], e["logprob"], e["bytes"]) for e in entry["top_logprobs"]] == [
            ("\ufffd", -0.5, [0xF0, 0x9F]),
            ("a", -1.0, [ord("a")]),
            ("\ufffd", -2.0, [0xC3]),
        ]
        chosen = TokenLogprob(other_half, -2.0, 3, score.top)
        puppet = Puppet(tokenizer, {"token_ids": [other_half], "logprobs": [chosen], "finish_reason": "length"})
        [response] = ask(puppet, (COMPLETIONS, completion(logprobs=3)))
        assert response.json()["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}]

    def test_minus_infinity_is_a_number_in_json(self, tokenizer):
        score = TokenLogprob(7, float("-inf"), 1, ((7, float("-inf")),))
        puppet = Puppet(tokenizer, {"logprobs": [score], "finish_reason": "length"})
        for path, body in ((CHAT, chat(logprobs=True, top_logprobs=1)), (COMPLETIONS, completion(logprobs=1))):
            [response] = ask(puppet, (path, body))
            assert "-9999.0" in response.text and "null" not in response.text.partition("logprobs")[2][:60]


class TestEcho:
    def test_the_prompt_comes_first(self, client, tokenizer):
        for prompt in ("ax", tokenizer.encode("ax")):
            [choice] = answer(client, COMPLETIONS, completion(prompt, echo=True))["choices"]
            assert choice["text"] == "axhi"

    def test_offsets_count_the_prompt(self, client):
        body = completion("é😀 x", echo=True, logprobs=1)
        [choice] = answer(client, COMPLETIONS, body)["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"] == "é😀 xhi"
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        assert len(set(map(len, logprobs.values()))) == 1
        answer_from = logprobs["tokens"].index("h")
        assert logprobs["text_offset"][answer_from:] == [4, 5, 5, 6]
        assert logprobs["text_offset"][:2] == [0, 0]  # of é the first byte, then the second
        assert all(one <= two for one, two in zip(logprobs["text_offset"], logprobs["text_offset"][1:], strict=False))

    def test_a_stream_brings_the_same(self, client):
        body = completion("é x", echo=True, logprobs=2)
        [whole] = answer(client, COMPLETIONS, body)["choices"]
        parts = [chunk["choices"][0] for chunk in stream(client, COMPLETIONS, body)]
        assert "".join(part["text"] for part in parts) == whole["text"]
        for name, column in whole["logprobs"].items():
            streamed = [value for part in parts for value in part["logprobs"][name]]
            assert streamed == (pytest.approx(column) if name == "token_logprobs" else column)

    def test_offsets_are_lengths_of_what_comes_before(self, client):
        body = completion("a <|im_end|> bx", echo=True, logprobs=0, max_tokens=1)
        [choice] = answer(client, COMPLETIONS, body)["choices"]
        *prompt, last = choice["logprobs"]["tokens"]
        assert ("".join(prompt), last) == ("a <|im_end|> bx", "h")
        assert choice["logprobs"]["text_offset"] == [0, *accumulate(map(len, prompt))]

    def test_the_prompt_is_told_as_it_was_asked(self, client):
        """The tokenizer writes é as one character; offsets are those of the text that comes back."""
        [choice] = answer(client, COMPLETIONS, completion("e\u0301x", echo=True, logprobs=0, max_tokens=2))["choices"]
        assert choice["text"] == "e\u0301xh"
        assert choice["logprobs"]["text_offset"][-2:] == [3, 4]

    def test_a_space_that_is_no_character(self):
        """SentencePiece puts one before a text, and takes it away again."""
        pieces = {0: b" Hello", 1: b" new", 2: b" world"}
        tokenizer = SimpleNamespace(token_bytes=lambda token_id, skip_special=True: pieces[token_id])
        scores = CompletionScores(TokenTexts(tokenizer))
        assert scores.prompt("Hello new", [0, 1], [None, None])["text_offset"] == [0, 5]
        assert scores.answer([TokenLogprob(2, -1.0, 1, ())] * 2)["text_offset"] == [9, 15]

    def test_a_prompt_that_ends_within_a_character(self, tokenizer):
        """Its beginning is U+FFFD in the text, and nothing of the answer is its end."""
        half, h = tokenizer.encode("😀")[0], tokenizer.encode("h")[0]
        scores = [TokenLogprob(h, -1.0, 1, ())] * 2
        event = {"token_ids": [h, h], "text": "hh", "logprobs": scores, "prompt_logprobs": [None]}
        puppet = Puppet(tokenizer, event | {"finish_reason": "length"})
        [response] = ask(puppet, (COMPLETIONS, completion([half], echo=True, logprobs=0)))
        [choice] = response.json()["choices"]
        assert choice["text"] == "\ufffdhh"
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]

    def test_a_prompt_scored_alone(self, client):
        body = answer(client, COMPLETIONS, completion("abcd", echo=True, max_tokens=0, logprobs=1))
        [choice] = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
        assert body["usage"]["completion_tokens"] == 0
        assert [value is None for value in choice["logprobs"]["token_logprobs"]] == [True, False, False, False]
        body = answer(client, COMPLETIONS, completion("abcd", echo=True, max_tokens=0))
        assert body["choices"] == [{"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length"}]

    def test_scores_of_the_prompt_for_each_answer(self, client):
        choices = answer(client, COMPLETIONS, completion(["ab", "x"], echo=True, logprobs=1, n=2))["choices"]
        first, second, third, fourth = (choice["logprobs"]["token_logprobs"] for choice in choices)
        assert first[:2] == second[:2] and first[0] is None
        assert third == fourth and third[:2] != first[:2]


class TestRefusals:
    """400, in words; and the server goes on."""

    @pytest.fixture(autouse=True)
    def goes_on(self, client) -> Iterator[None]:
        yield
        assert answer(client, COMPLETIONS, completion())["choices"][0]["text"] == "hi"

    @pytest.mark.parametrize("token_id", ["512", "-1", "abc", "3.5"])
    def test_a_bias_outside_the_vocabulary(self, client, token_id):
        param = "logit_bias" if token_id == "512" else f"logit_bias.{token_id}"  # a token that there is not, or no key
        for path, body in ((COMPLETIONS, completion()), (CHAT, chat())):
            refused(client.post(path, json=body | {"logit_bias": {token_id: 1}}), 400, param)
        assert answer(client, COMPLETIONS, completion(logit_bias={"511": 1}))

    @pytest.mark.parametrize("token_id", [512, -1, 10**6])
    def test_token_ids_outside_the_vocabulary(self, client, token_id):
        stop = client.post(COMPLETIONS, json=completion(stop_token_ids=[token_id]))
        assert str(token_id) in stop.json()["error"]["message"] and stop.status_code == 400
        for prompt in ([token_id], [[1], [1, token_id]]):
            refused(client.post(COMPLETIONS, json=completion(prompt)), 400, "prompt")
        assert answer(client, COMPLETIONS, completion([511], stop_token_ids=[511]))

    def test_a_minimum_without_a_token_to_reach_it(self, client):
        for path, body in ((COMPLETIONS, completion()), (CHAT, chat())):
            none_left = body | {"min_tokens": 1, "stop_token_ids": [*range(512)]}
            assert "leave min_tokens out" in refused(client.post(path, json=none_left), 400, "min_tokens")

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    @pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", '"NaN"', "1e999", "-1e999"])
    @pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty"])
    def test_no_numbers(self, client, path, literal, field):
        body = json.dumps(chat() if path == CHAT else completion())[:-1]
        content = body.replace('"temperature": 0, ', "").replace(', "temperature": 0', "") + f', "{field}": {literal}}}'
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        ErrorBody.model_validate_json(response.content)

    @pytest.mark.parametrize("stream", [False, True])
    def test_before_the_stream_begins(self, client, stream):
        refused(client.post(CHAT, json=chat(n=0, stream=stream)), 400, "n")
        too_long = client.post(CHAT, json=chat("word " * LENGTH, stream=stream))
        assert "the model's length" in refused(too_long, 400, "messages")
        too_long = client.post(COMPLETIONS, json=completion([5] * LENGTH, stream=stream))
        assert "256" in refused(too_long, 400, "prompt")

    def test_nothing_to_answer(self, client):
        refused(client.post(COMPLETIONS, json=completion(max_tokens=0)), 400, "max_tokens")
        refused(client.post(COMPLETIONS, json=completion("")), 400, "prompt")

    def test_names_of_the_model(self, client):
        models = Models.model_validate_json(client.get("/v1/models").content, strict=True)
        assert [model.id for model in models.data] == list(NAMES)
        for name in NAMES:
            assert answer(client, CHAT, chat(model=name, max_tokens=1))["model"] == "m"
            assert client.get(f"/v1/models/{name}").json()["id"] == name
        for name in ("no-such", "", "n" * 100_000):
            for path, body in ((CHAT, chat(model=name)), (COMPLETIONS, completion(model=name))):
                refused(client.post(path, json=body), 404, "model", "model_not_found")
        refused(client.get("/v1/models/no-such"), 404, "model", "model_not_found")
        refused(client.post(CHAT, json={"messages": []}), 400, "model")

    def test_an_image(self, client):
        parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        assert "image_url" in refused(client.post(CHAT, json=chat(parts)), 400, "messages.0.content")

    def test_what_is_not_supported(self, client):
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert "tools" in refused(client.post(CHAT, json=chat(tools=tools)), 400, "tools", "unsupported_value")
        kind = {"type": "no-such-format"}
        assert "no-such-format" in refused(client.post(CHAT, json=chat(response_format=kind)), 400, "response_format")

    def test_no_json(self, client):
        json_type = {"Content-Type": "application/json"}
        for content in (b"", b"{", b"[1, 2]", b'"a"', b"null"):
            response = client.post(CHAT, content=content, headers=json_type)
            assert response.status_code == 400
            ErrorBody.model_validate_json(response.content, strict=True)
        for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
            response = client.post(CHAT, content=json.dumps(chat()), headers=headers)
            assert "application/json" in refused(response, 415, None, "unsupported_media_type")
        charset = {"Content-Type": "application/json; charset=utf-8"}
        assert client.post(CHAT, content=json.dumps(chat()), headers=charset).status_code == 200

    def test_a_body_that_is_compressed(self, client):
        """It is refused by the coding's name, not as bad JSON; a client learns what is taken instead."""
        json_type = {"Content-Type": "application/json"}
        body = gzip.compress(json.dumps(chat()).encode())
        response = client.post(CHAT, content=body, headers=json_type | {"Content-Encoding": "gzip"})
        assert "gzip" in refused(response, 415, None, "unsupported_content_encoding")
        assert response.headers["accept-encoding"] == "identity"
        plain = json_type | {"Content-Encoding": "identity"}
        assert client.post(CHAT, content=json.dumps(chat()), headers=plain).status_code == 200

    def test_paths_and_methods(self, client):
        assert refused(client.get("/v1/nothing"), 404) == "Not Found: GET /v1/nothing"
        refused(client.get(CHAT), 405)
        assert client.get(CHAT).headers["allow"] == "POST"

    @pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models/m", "/v1/x", "/openapi.json", CHAT])
    def test_head_is_get_without_the_body(self, client, path):
        """On one connection, so that a body that came nevertheless would be in the way of the next response."""
        headers = {}
        for method in ("HEAD", "GET"):
            response = client.request(method, path)
            told = {name: response.headers.get(name) for name in ("content-type", "allow")}
            headers[method] = response.status_code, told
            assert bool(response.content) == (method == "GET")
        assert headers["HEAD"] == headers["GET"]
        assert client.get(CHAT).headers["allow"] == "POST"


class TestTokens:
    @pytest.mark.parametrize("text", ["", "hello world", "é😀 \n", "<|im_start|>a", "a\u0301"])
    def test_there_and_back(self, client, text):
        body = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
        back = client.post("/detokenize", json={"tokens": body["tokens"]})
        assert back.json() == {"prompt": text.replace("a\u0301", "\u00e1")}  # the tokenizer writes NFC

    def test_counts_are_those_of_usage(self, client, tokenizer):
        for text in ("hello", "é😀"):
            count = client.post("/tokenize", json={"prompt": text}).json()["count"]
            assert count == len(tokenizer.encode(text))
            assert answer(client, COMPLETIONS, completion(text, max_tokens=1))["usage"]["prompt_tokens"] == count
            messages = [{"role": "user", "content": text}]
            count = client.post("/tokenize", json={"messages": messages}).json()["count"]
            assert count == len(tokenizer.encode_chat(messages))
            assert answer(client, CHAT, chat(text, max_tokens=1))["usage"]["prompt_tokens"] == count

    def test_refusals(self, client):
        for body in ({}, {"prompt": "a", "messages": chat()["messages"]}):
            refused(client.post("/tokenize", json=body), 400, "prompt")
        for token_id in (512, 10**9):
            response = client.post("/detokenize", json={"tokens": [1, token_id]})
            assert f"{token_id}; it must be between 0 and 511" in refused(response, 400, "tokens")
        assert client.post("/detokenize", json={"tokens": [-1]}).status_code == 400
        assert client.post("/detokenize", json={"tokens": [511]}).json() == {"prompt": ""}
        refused(client.post("/tokenize", json={"prompt": "a", "model": "other"}), 404, "model", "model_not_found")

    def test_a_model_without_text(self):
        puppet = Puppet(None, {"finish_reason": "length"})
        for path, body in ((CHAT, chat()), (COMPLETIONS, completion()), ("/tokenize", {"prompt": "a"})):
            [response] = ask(puppet, (path, body))
            assert response.status_code == 400 and "token ids" in response.json()["error"]["message"]
        [response] = ask(puppet, (COMPLETIONS, completion([1, 2])))
        assert response.json()["choices"][0]["text"] == ""
        for wanted in ({"echo": True}, {"logprobs": 1}):
            [response] = ask(puppet, (COMPLETIONS, completion([1, 2], **wanted)))
            refused(response, 400, *wanted)


class TestTheEngineEnds:
    def test_a_failed_answer(self, tokenizer):
        """Nothing has gone out yet: the response says what happened, and the other answers of the request end."""
        puppet = Puppet(tokenizer, {"text": "a", "answer": 1}, {"finish_reason": "error", "error": "the step failed"})
        [response] = ask(puppet, (CHAT, chat(n=2)))
        assert "the step failed" in refused(response, 500, None, "answer_failed")
        assert puppet.num_open == 0

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("path", "body"), [(CHAT, chat(n=2)), (COMPLETIONS, completion(n=2))])
    def test_the_last_one_fails_as_another_ends(self, tokenizer, path, body, stream):
        """Both are heard of at once; no client is told that all went well."""
        puppet = Puppet(tokenizer)

        async def scenario():
            transport = httpx.ASGITransport(make_app(puppet, ApiSettings(("m",))))
            async with httpx.AsyncClient(transport=transport, base_url="http://puppet") as client:
                asked = asyncio.create_task(client.post(path, json=body | {"stream": stream}))
                while not puppet.streams:
                    await asyncio.sleep(0)
                puppet.say("all", 0, finish_reason="stop")
                puppet.say("half", 1, finish_reason="error", error="the step failed")
                return await asked

        response = asyncio.run(asyncio.wait_for(scenario(), 30))
        if stream:
            *_, last, rest = response.text.split("\n\n")
            assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the step failed" and rest == ""
        else:
            assert "the step failed" in refused(response, 500, None, "answer_failed")

    @pytest.mark.parametrize("stream", [False, True])
    def test_death(self, tokenizer, stream):
        """2 run, 1 waits, another comes after: each hears of it."""
        puppet = Puppet(tokenizer)

        async def scenario():
            transport = httpx.ASGITransport(make_app(puppet, ApiSettings(("m",))))
            async with httpx.AsyncClient(transport=transport, base_url="http://puppet") as client:
                body = chat(stream=stream)
                asked = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(3)]
                while len(puppet.streams) < 3:
                    await asyncio.sleep(0)
                assert (await client.get("/health")).json() == {"status": "ok"}
                puppet.die("out of memory")
                responses = await asyncio.gather(*asked)
                return [*responses, await client.post(CHAT, json=body), await client.get("/health")]

        responses = asyncio.run(asyncio.wait_for(scenario(), 30))
        assert len(responses) == 5
        for response in responses:
            assert "out of memory" in refused(response, 503, None, "engine_dead")
            assert int(response.headers["retry-after"]) > 0
        assert puppet.num_open == 0

    def test_a_mistake_of_ours(self, tokenizer, monkeypatch):
        """500, without a word of what is inside."""
        puppet = Puppet(tokenizer)
        monkeypatch.setattr(puppet, "open", lambda *_, **__: 1 / 0)
        [response] = ask(puppet, (CHAT, chat()))
        assert "division" not in refused(response, 500, None, "internal_error")


class TestManyRequests:
    def test_all_are_answered(self, tokenizer):
        """2 run and 3 wait; of 20 that come at once 15 are told to come again, and afterwards there is room."""
        puppet = Puppet(tokenizer, *[{"text": "a"}] * 7, {"text": "b", "finish_reason": "length"})
        responses = ask(puppet, *[(CHAT, chat())] * 20, max_waiting=3)
        good = [response for response in responses if response.status_code == 200]
        assert len(good) == 5
        assert all(response.json()["choices"][0]["message"]["content"] == "aaaaaaab" for response in good)
        for response in responses:
            if response not in good:
                refused(response, 429, None, "queue_full")
                assert int(response.headers["retry-after"]) > 0
        assert puppet.num_open == 0
        [response] = ask(puppet, (CHAT, chat()), max_waiting=3)
        assert response.status_code == 200

    def test_more_at_once_than_there_is_room_for(self, tokenizer):
        """That will not be better later."""
        [response] = ask(Puppet(tokenizer), (COMPLETIONS, completion(["x"] * 3, n=2)), max_waiting=3)
        assert "6 answers" in refused(response, 400)

    def test_one_name_for_two_requests(self, real, client):
        """A client's X-Request-Id is told back; nothing goes by it."""

        def post(body):
            return httpx.post(real.url + COMPLETIONS, json=body, headers={"X-Request-Id": "same"}, timeout=30)

        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(post, [completion(), completion("x", max_tokens=1)])
        assert (one.json()["choices"][0]["text"], other.json()["choices"][0]["text"]) == ("hi", "h")
        assert one.headers["x-request-id"] == other.headers["x-request-id"] == "same"
        assert one.json()["id"] != other.json()["id"]


class TestDocument:
    def test_every_route_tells_its_answers(self, client):
        document = client.get("/openapi.json").json()
        assert set(document["paths"]) == {
            CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/models", "/v1/models/{model}", "/health", "/version",
            "/metrics", "/status",
        }  # fmt: skip
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                responses = operation["responses"]
                assert responses["200"]["content"], path
                if method == "post":
                    assert operation["requestBody"]["required"]
                    assert {"400", "401", "404", "413", "415", "default"} <= set(responses)
                assert "422" not in responses
        for name in ("ChatRequest", "CompletionRequest"):
            assert document["components"]["schemas"][name]["properties"]["model"]["enum"] == list(NAMES)
        assert "text/event-stream" in document["paths"][CHAT]["post"]["responses"]["200"]["content"]

    def test_small_questions(self, client):
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/version").json()["version"]
