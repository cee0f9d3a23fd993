"""Faults that servers of this kind have had, each named by its report, and asked over a real connection.

`pieces` is a model whose text is SentencePiece's, with a BOS, a turn-end and rows without a token; `dry` has neither
weights nor a BOS, and its steps fail when they are told to.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server.api import ApiSettings
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.errors import ErrorBody
from stages.s09_server.loopback import PATIENCE, DryLoopback, Loopback
from tests.scripted import edited, scripted

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>"]
UNK, BOS, EOS, TURN = range(4)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACES = ["\u2581", "\u2581" * 2, "\u2581" * 3]
WORDS = [*SPECIAL, *BYTES, *SPACES, "\u2581Hello", "\u2581new", "\u2581world", "Hi", "Ho", "a", "b", "x", "y", "!", "?"]
ID = {word: token_id for token_id, word in enumerate(WORDS)}
NO_TOKENS = range(505, 510)  # rows of the model that the tokenizer does not know
SCRIPTS = [
    [ID["\u2581Hello"], ID["\u2581new"], ID["\u2581world"], *(ID[spaces] for spaces in SPACES), ID["!"]],
    [ID["a"], ID["Hi"], EOS],
    [ID["b"], ID["Ho"], TURN, ID["?"]],  # a turn-end that is no EOS: the answer goes on
    [ID["x"], NO_TOKENS[0], ID["y"]],
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def sentence_piece(folder: Path) -> None:
    """As Llama 2's: words begin with U+2581, what is not known is bytes, and a BOS comes first."""
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE(ID, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True))
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **special).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("faults")

    def others_close_behind(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"][NO_TOKENS[1:]] = 3.5 * weights["model.embed_tokens.weight"][ID["x"]]

    keys = {"config.json": {"eos_token_id": EOS}, "generation_config.json": {"eos_token_id": EOS}}
    plain = scripted(tiny("llama"), base / "plain", SCRIPTS, keys)
    made = edited(plain, base / "model", others_close_behind)
    sentence_piece(made)
    return made


@pytest.fixture(scope="module")
def pieces(folder: Path) -> Iterator[httpx.Client]:
    settings = EngineSettings(str(folder), {"device": "cpu", "kv_cache_mb": 2, "max_num_seqs": 4})
    with (
        Loopback(lambda: AsyncLLM.start(settings, in_process=True)) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def errors() -> list[Exception]:
    """What the next steps of `dry` raise."""
    return []


@pytest.fixture(scope="module")
def dry(tiny: Callable[[str], Path], errors: list[Exception]) -> Iterator[DryLoopback]:
    """2 answers run, 3 wait, and a step takes 2 ms."""

    def run_or_fail(plan: Any) -> Any:
        if errors and plan.rows:
            raise errors.pop()
        return execute(plan)

    with DryLoopback(tiny("qwen2"), 2.0, ApiSettings(("m",), max_waiting=3), kv_cache_mb=2, max_num_seqs=2) as server:
        execute = server.engine.runner.execute
        server.engine.runner.execute = run_or_fail
        yield server


@pytest.fixture(scope="module")
def plain(dry: Loopback) -> Iterator[httpx.Client]:
    """Asks `dry`."""
    with httpx.Client(base_url=dry.url, timeout=20) as client:
        yield client


def post(client: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return client.post(path, json={"model": "m", "temperature": 0} | body, headers=headers)


def post_text(client: httpx.Client, content: str) -> httpx.Response:
    """What no JSON encoder would write."""
    return client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})


def refused(response: httpx.Response, param: str) -> None:
    assert response.status_code == 400, response.text
    assert ErrorBody.model_validate_json(response.content, strict=True).error.param == param


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Text, reason and usage of one answer: the same in one piece and as a stream."""
    response = post(client, path, body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    told = text, choice["finish_reason"], response.json()["usage"]

    streamed = post(client, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    *lines, done, _ = streamed.text.split("\n\n")
    assert done == "data: [DONE]"
    *chunks, last = (json.loads(line.removeprefix("data: ")) for line in lines)
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "") for choice in choices]
    assert ("".join(texts), choices[-1]["finish_reason"], last["usage"]) == told
    return told


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]} | fields


def settled(server: Loopback) -> None:
    """Nobody is there, and nothing is held."""
    llm = server.llm
    server.wait_until(
        lambda: (llm.num_open, llm.stats.running, llm.stats.waiting, llm.stats.kv_blocks_used) == (0, 0, 0, 0)
    )
    assert server.call(lambda: (llm.streams, llm.answers.open)) == ({}, {})


# ---- prompts ---------------------------------------------------------------------------------------------------------


class TestEmptyPrompts:
    """vllm-project/vllm#7632."""

    @pytest.mark.parametrize("prompt", ["", [""]])
    def test_with_a_bos_it_is_the_prompt(self, pieces, prompt):
        _, reason, usage = answer(pieces, COMPLETIONS, {"prompt": prompt, "max_tokens": 2, "ignore_eos": True})
        assert (reason, usage["prompt_tokens"], usage["completion_tokens"]) == ("length", 1, 2)

    @pytest.mark.parametrize("prompt", ["", [""], ["x", ""]])
    def test_without_one_there_is_no_token_to_start_from(self, dry, plain, prompt):
        refused(post(plain, COMPLETIONS, {"prompt": prompt}), "prompt")
        assert post(plain, COMPLETIONS, {"prompt": "x"}).status_code == 200
        settled(dry)

    @pytest.mark.parametrize("prompt", [[], [[]], [[1], []]])
    def test_no_prompt_is_none(self, pieces, plain, prompt):
        for client in (pieces, plain):
            refused(post(client, COMPLETIONS, {"prompt": prompt}), "prompt")
            assert post(client, COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status_code == 200

    def test_an_empty_turn(self, pieces, dry, plain, monkeypatch):
        """A template writes something all the same; one that writes nothing is told so."""
        for client in (pieces, plain):
            assert post(client, CHAT, chat("", max_tokens=1)).status_code == 200
        monkeypatch.setattr(dry.llm.tokenizer._hf, "chat_template", "{{ messages[0]['content'] }}")
        refused(post(plain, CHAT, chat("")), "messages")
        assert post(plain, CHAT, chat("x")).status_code == 200
        settled(dry)


def test_one_bos_and_no_second(folder, pieces):
    """The template prints it, and the tokenizer adds one. sgl-project/sglang#888."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hello"}]
    ids: Any = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ids.count(BOS) == 1 and theirs("Hello")["input_ids"].count(BOS) == 1
    assert pieces.post("/tokenize", json={"messages": messages}).json()["tokens"] == ids
    assert pieces.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"] == theirs("Hello")["input_ids"]
    for path, body, expected in (
        (CHAT, {"messages": messages}, ids),
        (COMPLETIONS, {"prompt": "Hello"}, theirs("Hello")["input_ids"]),
    ):
        assert answer(pieces, path, body | {"max_tokens": 3})[2]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize("value", ["512", "-1", '"abc"', "3.5", "NaN", "1e9"])
def test_ids_that_are_none(plain, value):
    """Of stop tokens and of prompts, and a bias that is no number; the last row is good. sgl-project/sglang#7670."""
    prompt, key = '"prompt": [5]', value.strip('"')
    fields = [
        f'"prompt": [5, {value}]',
        f'{prompt}, "stop_token_ids": [{value}]',
        f'{prompt}, "logit_bias": {{"{key}": 1}}',
    ]
    if value in ("NaN", "1e9", '"abc"'):
        fields.append(f'{prompt}, "logit_bias": {{"5": {value}}}')
    for given in fields:
        response = post_text(plain, f'{{"model": "m", {given}}}')
        assert response.status_code == 400, given
        ErrorBody.model_validate_json(response.content, strict=True)
    body = {"prompt": [511], "stop_token_ids": [511], "logit_bias": {"511": 1}}
    assert post(plain, COMPLETIONS, body).status_code == 200


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"NaN"', "1e999"])
@pytest.mark.parametrize("name", ["frequency_penalty", "repetition_penalty"])
def test_penalties_that_are_no_numbers(plain, name, value):
    """sgl-project/sglang#28153."""
    content = f'{{"model": "m", "prompt": "x", "{name}": {value}}}'
    response = post_text(plain, content)
    assert response.status_code == 400
    ErrorBody.model_validate_json(response.content, strict=True)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_spaces_between_words_stay(folder, pieces):
    """The first token of the answer and three in a row are spaces. huggingface/transformers#28776."""
    tokenizer = Tokenizer(folder)
    prompt, *expected = SCRIPTS[0]
    body = {"prompt": "Hello", "max_tokens": len(expected)}
    text, reason, _ = answer(pieces, COMPLETIONS, body)
    assert (text, reason) == (" new world" + 6 * " " + "!", "length")
    assert "Hello" + text == tokenizer.decode([BOS, prompt, *expected])
    assert answer(pieces, COMPLETIONS, body | {"echo": True})[0] == "Hello" + text
    assert answer(pieces, COMPLETIONS, body | {"prompt": [BOS, prompt], "echo": True})[0] == "Hello" + text
    assert answer(pieces, CHAT, chat("Hello", max_tokens=6))[0] == text


def test_text_comes_back_without_the_space_that_was_put_first(pieces):
    ids = post(pieces, "/tokenize", {"prompt": "Hello new  world"}).json()["tokens"]
    assert ids[0] == BOS
    assert post(pieces, "/detokenize", {"tokens": ids[1:]}).json() == {"prompt": "Hello new  world"}
    assert post(pieces, "/detokenize", {"tokens": ids}).json() == {"prompt": "<s> Hello new  world"}  # as Hugging Face


class TestTurnEnds:
    """kserve/kserve#4490."""

    @pytest.mark.parametrize(("path", "body"), [(CHAT, chat("a")), (COMPLETIONS, {"prompt": [ID["a"]]})])
    def test_eos_is_counted_and_is_no_text(self, pieces, path, body):
        text, reason, usage = answer(pieces, path, body)
        assert (text, reason, usage["completion_tokens"]) == ("Hi", "stop", 2)

    @pytest.mark.parametrize(("path", "body"), [(CHAT, chat("b")), (COMPLETIONS, {"prompt": [ID["b"]]})])
    def test_a_special_token_that_ends_nothing(self, pieces, path, body):
        text, reason, usage = answer(pieces, path, body | {"max_tokens": 3})
        assert (text, reason, usage["completion_tokens"]) == ("Ho?", "length", 3)
        text, reason, usage = answer(pieces, path, body | {"stop_token_ids": [TURN]})
        assert (text, reason, usage["completion_tokens"]) == ("Ho", "stop", 2)

    def test_they_cannot_be_shown(self, pieces):
        for path, body in ((CHAT, chat("a")), (COMPLETIONS, {"prompt": "x"})):
            refused(post(pieces, path, body | {"skip_special_tokens": False}), "skip_special_tokens")
            assert post(pieces, path, body | {"skip_special_tokens": True, "max_tokens": 1}).status_code == 200


def test_alternatives_without_a_token(pieces):
    """The likeliest five are rows of padding. pegainfer-project/pegainfer#676."""
    bodies = [(CHAT, chat("x", logprobs=True, top_logprobs=5)), (COMPLETIONS, {"prompt": [ID["x"]], "logprobs": 5})]
    for path, body in bodies:
        response = post(pieces, path, body | {"max_tokens": 2, "ignore_eos": True})
        assert response.status_code == 200, response.text
        [choice] = response.json()["choices"]
        assert response.json()["usage"]["completion_tokens"] == 2
        if path == CHAT:
            first, second = choice["logprobs"]["content"]
            assert [(entry["token"], entry["bytes"]) for entry in first["top_logprobs"]] == [("", [])] * 5
            assert (first["token"], first["logprob"]) == ("", first["top_logprobs"][0]["logprob"])
            assert choice["message"]["content"] == second["token"] == "y"
        else:
            scores = choice["logprobs"]
            assert (choice["text"], scores["tokens"], scores["text_offset"]) == ("y", ["", "y"], [0, 0])
            assert scores["top_logprobs"][0] == {"": scores["token_logprobs"][0]}


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_a_step_fails_in_the_middle_of_a_stream(dry, plain, errors):
    """One event says so and the connection ends; who waits is served. EricLBuehler/mistral.rs#1874."""
    began = []

    def read(number: int) -> list[str]:
        body = {"model": "m"} | chat("x", stream=True, ignore_eos=True, max_tokens=200 if number < 2 else 20)
        with plain.stream("POST", CHAT, json=body) as response:
            lines = []
            for line in filter(None, response.iter_lines()):
                lines.append(line.removeprefix("data: "))
                if number < 2 and len(lines) == 4:  # the role and three words
                    began.append(number)
            return lines

    with ThreadPoolExecutor(3) as pool:
        with dry.slowly():
            first, second = pool.submit(read, 0), pool.submit(read, 1)
            while len(began) < 2:
                time.sleep(0.001)
            third = pool.submit(read, 2)
            dry.wait_until(lambda: dry.llm.num_open == 3)
            errors.append(MemoryError("no room"))
            for stream in (first, second):
                *words, last = stream.result(PATIENCE)
                assert "no room" in json.loads(last)["error"]["message"]
                assert all("choices" in json.loads(word) for word in words)
        assert third.result(PATIENCE)[-1] == "[DONE]"
    settled(dry)
    assert plain.get("/health").json() == {"status": "ok"}
    assert post(plain, CHAT, chat("x", max_tokens=2)).status_code == 200


def test_a_name_that_is_used_again(dry, plain):
    """Its first request was given up in the middle of a step; nothing of it is heard. vllm-project/vllm#10583."""
    whole = post(plain, CHAT, chat("x", max_tokens=9)).json()["choices"][0]["message"]["content"]
    name = {"X-Request-Id": "same"}
    body = {"model": "m"} | chat("x", stream=True, ignore_eos=True, max_tokens=200)
    for _ in range(5):
        with plain.stream("POST", CHAT, json=body, headers=name) as response:
            assert next(response.iter_lines()).startswith("data: ")
        told = post(plain, CHAT, chat("x", max_tokens=9), **name)
        assert told.json()["choices"][0]["message"]["content"] == whole
        assert (told.json()["usage"]["completion_tokens"], told.headers["x-request-id"]) == (9, "same")
    settled(dry)


def test_everybody_is_answered(dry, plain):
    """2 run, 3 wait, 20 come at once. sgl-project/sglang#33858."""

    def ask(number: int) -> httpx.Response:
        return post(plain, CHAT, chat("x", max_tokens=8, ignore_eos=True, stream=number % 2 == 0))

    with ThreadPoolExecutor(20) as pool:
        responses = list(pool.map(ask, range(20)))
    for response in responses:
        if response.status_code == 429:
            assert ErrorBody.model_validate_json(response.content, strict=True).error.code == "queue_full"
            assert int(response.headers["retry-after"]) > 0
        else:
            assert response.status_code == 200
            assert response.text.endswith("data: [DONE]\n\n") or response.json()["usage"]["completion_tokens"] == 8
    assert sum(response.status_code == 200 for response in responses) >= 5
    settled(dry)
    assert post(plain, CHAT, chat("x", max_tokens=8)).status_code == 200


def test_a_response_does_not_wait_for_an_acknowledgement(plain):
    """On a connection that is kept; asyncio's own loop, as on Windows. It would cost 40 ms each time."""
    assert plain.get("/health").status_code == 200
    took: list[float] = []
    while len(took) < 50 and min(took, default=1.0) > 0.03:  # a busy machine delays many, but not all
        began = time.perf_counter()
        assert plain.get("/health").status_code == 200
        took.append(time.perf_counter() - began)
    assert min(took) < 0.03, took
