"""Requests: what is taken, what is refused and in which words, and what of it the engine is told."""

import asyncio

import msgspec
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from stages.s01_forward.sampling_params import SamplingParams
from stages.s09_server.errors import ApiError, error_object, first_fault, refusing
from stages.s09_server.fields import a_prompt
from stages.s09_server.json_body import JsonRequest
from stages.s09_server.params import chat_params, completion_params
from stages.s09_server.protocol import ChatMessage, ChatRequest, CompletionRequest

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": HELLO} | fields)


def completion(**fields) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "a"} | fields)


def sampling(make=completion, **fields) -> SamplingParams:
    return (chat_params if make is chat else completion_params)(make(**fields))


def refusal(make=completion, **fields) -> str:
    with pytest.raises((ValidationError, ApiError)) as caught:
        make(**fields)
    if isinstance(caught.value, ApiError):
        assert caught.value.status_code == 400
        return str(caught.value.param)
    return ".".join(map(str, caught.value.errors()[0]["loc"]))


def fault(given: object, kind: str = "value_error") -> RequestValidationError:
    return RequestValidationError([{"loc": ("body", "stop"), "msg": "no", "type": kind, "input": given}])


class TestDefaults:
    @pytest.mark.parametrize("make", [chat, completion])
    def test_those_of_the_openai_api(self, make):
        params = sampling(make)
        assert (params.temperature, params.top_p, params.top_k, params.n, params.seed) == (1.0, 1.0, 0, 1, None)
        assert (params.repetition_penalty, params.stop, params.logit_bias) == (1.0, (), {})
        assert (params.logprobs, params.prompt_logprobs) == (None, None)

    def test_how_long_an_answer_may_be(self):
        assert sampling(chat).max_tokens is None  # as many as fit
        assert sampling(completion).max_tokens == 16

    @pytest.mark.parametrize("make", [chat, completion])
    def test_null_is_the_default(self, make):
        fields = [name for name in type(make()).model_fields if name not in ("model", "messages", "prompt")]
        assert sampling(make, **dict.fromkeys(fields)) == sampling(make)

    @pytest.mark.parametrize("make", [chat, completion])
    def test_temperature_zero_is_greedy(self, make):
        assert sampling(make, temperature=0).greedy


class TestSampling:
    def test_vllms_names(self):
        given = {
            "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [3], "seed": -5,
            "ignore_eos": True, "cache_salt": "s", "priority": -1, "presence_penalty": -2.0, "frequency_penalty": 2.0,
        }  # fmt: skip
        params = sampling(**given)
        for name, value in given.items():
            assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)

    @pytest.mark.parametrize(("top_k", "taken"), [(-1, 0), (0, 0), (5, 5)])
    def test_two_words_for_all_tokens(self, top_k, taken):
        assert sampling(top_k=top_k).top_k == taken

    @pytest.mark.parametrize(("stop", "taken"), [("x", ("x",)), (["x", "yy"], ("x", "yy")), ([], ())])
    def test_one_stop_or_several(self, stop, taken):
        assert sampling(stop=stop).stop == taken

    def test_more_stops_than_openai_takes(self):
        stops = [str(number) for number in range(32)]
        assert sampling(stop=stops).stop == tuple(stops)
        assert refusal(stop=[*stops, "x"]) == "stop"

    @pytest.mark.parametrize("stop", ["", ["x", ""], [1], "x" * 1001, {}])
    def test_no_stops(self, stop):
        assert refusal(stop=stop).startswith("stop")

    def test_bias_by_token_id(self):
        assert sampling(logit_bias={"511": 1, "0": -100.0}).logit_bias == {511: 1, 0: -100.0}

    @pytest.mark.parametrize("bias", [{"abc": 1}, {"3.5": 1}, {"-1": 1}, {"1": 1e9}, {"1": "2"}, {" 1": 1}, {"01": 1}])
    def test_no_bias(self, bias):
        assert refusal(logit_bias=bias).startswith("logit_bias")

    def test_chats_two_numbers_of_alternatives(self):
        assert sampling(chat, logprobs=True).logprobs == 0
        assert sampling(chat, logprobs=True, top_logprobs=20).logprobs == 20
        assert sampling(chat, logprobs=False).logprobs is None
        assert refusal(chat, top_logprobs=2) == "top_logprobs"
        assert refusal(chat, logprobs=True, top_logprobs=21) == "top_logprobs"

    def test_an_echo_is_scored_if_the_answer_is(self):
        assert sampling(echo=True, logprobs=2).prompt_logprobs == 2
        assert sampling(echo=True).prompt_logprobs is None
        assert sampling(logprobs=2).prompt_logprobs is None
        assert sampling(echo=True, max_tokens=0).prompt_logprobs == 0  # without a score it would ask for nothing


class TestMaxTokens:
    def test_the_newer_name_goes_first(self):
        assert sampling(chat, max_completion_tokens=3).max_tokens == 3
        assert sampling(chat, max_tokens=5).max_tokens == 5
        assert sampling(chat, max_completion_tokens=3, max_tokens=5).max_tokens == 3
        assert sampling(chat, max_completion_tokens=5, max_tokens=3).max_tokens == 5

    @pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, 2**70, 1e300])
    def test_not_a_number_of_tokens(self, value):
        assert refusal(chat, max_tokens=value) == "max_tokens"
        assert refusal(chat, max_completion_tokens=value) == "max_completion_tokens"
        assert refusal(completion, max_tokens=value) == "max_tokens"  # 0, too, without echo


class TestPrompt:
    @pytest.mark.parametrize(
        ("prompt", "taken"),
        [
            ("a", ["a"]),
            (["a", "b"], ["a", "b"]),
            ([1, 2], [[1, 2]]),
            ([[1], [2, 3]], [[1], [2, 3]]),
            (["a", [1]],) * 2,
            ([1.0], [[1]]),
            ([[2, 3.0]], [[2, 3]]),
        ],
    )
    def test_text_ids_and_lists_of_both(self, prompt, taken):
        assert completion(prompt=prompt).prompt == taken

    @pytest.mark.parametrize(
        "prompt", [None, [], [[]], 1, {"a": 1}, [1, "a"], [[1, "a"]], [True], [[1.5]], [1.5], ["a"] * 2049]
    )
    def test_no_prompt(self, prompt):
        assert refusal(prompt=prompt) == "prompt"

    def test_a_long_one_is_gone_through_once(self):
        """No stream is served meanwhile."""

        class Counted(list):
            times = 0

            def __iter__(self):
                self.times += 1
                return super().__iter__()

        token_ids = Counted([7] * 5)
        assert a_prompt(token_ids) is token_ids and token_ids.times == 1


class TestMessages:
    @pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
    def test_content_in_parts(self, role):
        parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
        assert chat(messages=[{"role": role, "content": parts}]).messages[0].content == "a b"

    @pytest.mark.parametrize("message", [{"content": []}, {"content": None}, {}])
    def test_no_content_is_no_text(self, message):
        assert chat(messages=[{"role": "assistant"} | message]).messages[0].content == ""

    def test_an_image_is_refused_by_its_type(self):
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        with pytest.raises(ValidationError, match="'image_url' is not supported"):
            chat(messages=[{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}])

    @pytest.mark.parametrize("content", [1, {"type": "text"}, ["a"], [{"type": "text"}], [{"text": "a"}], [None]])
    def test_no_content(self, content):
        assert refusal(chat, messages=[{"role": "user", "content": content}]) == "messages.0.content"

    @pytest.mark.parametrize("role", ["tool", "function", "bot", None, ""])
    def test_roles_that_are_not_known(self, role):
        assert refusal(chat, messages=[{"role": role, "content": "a"}]) == "messages.0.role"

    @pytest.mark.parametrize("messages", [[], None, "a", [1], HELLO * 2049])
    def test_no_conversation(self, messages):
        assert refusal(chat, messages=messages).startswith("messages")


class TestUnsupported:
    @pytest.mark.parametrize(("make", "name"), [(make, name) for make in (chat, completion) for name in
                                                make().unsupported])  # fmt: skip
    def test_what_would_change_the_answer_is_refused_by_name(self, make, name):
        with pytest.raises(ApiError, match=f"^400: {name} is not supported"):
            make(**{name: [{"anything": "else"}]})
        assert refusal(make, **{name: "anything else"}) == name

    @pytest.mark.parametrize(("make", "name"), [(make, name) for make in (chat, completion) for name in
                                                make().unsupported])  # fmt: skip
    def test_what_asks_for_nothing_special_passes(self, make, name):
        for value in (*make().unsupported[name], None):
            assert sampling(make, **{name: value}) == sampling(make)

    @pytest.mark.parametrize(("name", "value"), [
        ("regex", "a+"), ("ebnf", 'root ::= "a"'), ("json_schema", "{}"), ("length_penalty", 0.5),
    ])  # fmt: skip
    @pytest.mark.parametrize("make", [chat, completion])
    def test_what_other_servers_know(self, make, name, value):
        assert refusal(make, **{name: value}) == name

    def test_special_tokens_are_added_as_ever(self):
        """To a plain text, and to no conversation, whose template writes them."""
        assert refusal(chat, add_special_tokens=True) == refusal(completion, add_special_tokens=False)
        assert completion(add_special_tokens=True) == completion()
        assert chat(add_special_tokens=False) == chat()

    @pytest.mark.parametrize(("name", "value"), [
        ("tool_calls", [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        ("function_call", {"name": "f", "arguments": "{}"}), ("audio", {"id": "1"}), ("refusal", "No."),
    ])  # fmt: skip
    def test_what_a_message_says_besides_its_text(self, name, value):
        """The model would not read it."""
        said = {"role": "assistant", "content": None}
        with pytest.raises(ApiError, match=f"^400: {name} is not supported") as caught:
            chat(messages=[*HELLO, said | {name: value}])
        assert (caught.value.param, caught.value.code) == (name, "unsupported_value")
        for nothing in (*ChatMessage.unsupported[name], None):
            assert chat(messages=[*HELLO, said | {name: nothing}]) == chat(messages=[*HELLO, said])

    def test_what_stock_clients_send_besides_passes(self):
        extras = {"user": "u", "metadata": {}, "store": False, "max_token": 4, "service_tier": "auto"}
        extras |= {"parallel_tool_calls": True, "n": 1, "logit_bias": {}, "response_format": {"type": "text"}}
        assert sampling(chat, **extras) == sampling(chat)

    def test_best_of_is_n_or_nothing(self):
        assert sampling(best_of=1).n == 1
        assert sampling(best_of=3, n=3).n == 3
        assert refusal(best_of=3, n=2) == "best_of"

    def test_what_is_for_streams_alone(self):
        assert refusal(chat, stream_options={"include_usage": True}) == "stream_options"
        assert chat(stream=True, stream_options={"include_usage": True}).stream_options.include_usage

    def test_a_scored_echo_of_several_answers_is_not_streamed(self):
        together = {"echo": True, "logprobs": 1, "stream": True, "n": 2}
        assert refusal(**together) == "n"
        for name in together:
            assert completion(**{key: value for key, value in together.items() if key != name})


class TestNumbers:
    LIMITS = {
        "temperature": (0, 2), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "min_p": (0, 1),
        "repetition_penalty": (0.01, 100), "n": (1, 128), "seed": (-(2**63), 2**63 - 1), "top_k": (-1, 2**31 - 1),
        "logprobs": (0, 20),
    }  # fmt: skip

    @pytest.mark.parametrize("name", LIMITS)
    def test_up_to_its_limits_and_not_beyond(self, name):
        low, high = self.LIMITS[name]
        assert sampling(**{name: low}) and sampling(**{name: high})
        for value in (low - 1, high + 1, str(low), True, [low]):
            assert refusal(**{name: value}) == name

    def test_top_p_is_above_zero(self):
        assert sampling(top_p=1e-9).top_p == 1e-9
        assert refusal(top_p=0) == refusal(top_p=1.1) == "top_p"

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_no_number_is_no_number(self, value):
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
            assert refusal(**{name: value}) == name

    @pytest.mark.parametrize("name", ["top_k", "seed", "n", "min_tokens", "priority"])
    def test_whole_numbers(self, name):
        assert refusal(**{name: 1.5}) == refusal(**{name: "1"}) == name
        assert sampling(**{name: 2.0}) == sampling(**{name: 2})


class TestJson:
    """A body is parsed once, by a reader that takes JSON and nothing else."""

    @staticmethod
    def parsed(body: bytes):
        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        return asyncio.run(JsonRequest({"type": "http", "headers": []}, receive).json())

    def test_json(self):
        assert self.parsed('{"a": [1, 2.5, null, true, "é😀"]}'.encode()) == {"a": [1, 2.5, None, True, "é😀"]}

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"NaN",
            b"Infinity",
            b'{"a": -Infinity}',
            b'{"a": 1e999}',
            b"'a'",
            b'"\xff"',
            b'"\\ud800"',
            b"{} {}",
        ],
    )
    def test_no_json(self, body):
        with pytest.raises(ApiError) as caught:
            self.parsed(body)
        assert (caught.value.status_code, caught.value.code) == (400, "invalid_json")

    def test_too_deep(self):
        with pytest.raises(ApiError, match="nested too deeply"):
            self.parsed(b"[" * 10_000 + b"]" * 10_000)


class TestErrorObjects:
    def test_they_are_json_whatever_was_wrong(self):
        body = msgspec.json.encode(error_object(ApiError(400, "it is nan", param="temperature")))
        assert msgspec.json.decode(body) == {
            "error": {
                "message": "it is nan", "type": "invalid_request_error", "param": "temperature", "code": None,
            }
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("status", "kind"),
        [(400, "invalid_request_error"), (401, "authentication_error"), (404, "invalid_request_error"),
         (429, "rate_limit_error"), (500, "server_error"), (503, "server_error")],
    )  # fmt: skip
    def test_types(self, status, kind):
        assert error_object(ApiError(status, "words"))["error"]["type"] == kind

    def test_our_own_checks_name_the_field(self):
        with pytest.raises(ApiError) as caught, refusing("prompt", CompletionRequest):
            SamplingParams(max_tokens=2, min_tokens=3)
        assert (caught.value.status_code, caught.value.param) == (400, "min_tokens")
        with pytest.raises(ApiError) as caught, refusing("prompt", CompletionRequest):
            raise ValueError("no field begins these words")
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize(
        ("given", "told"),
        [("a", '"a"'), (True, "true"), (None, "null"), ([1.5, {"é": []}], '[1.5, {"é": []}]'), ([[7] * 101], None),
         ("a" * 101, None), ({str(number): 1 for number in range(101)}, None)],
        ids=lambda value: repr(value)[:20],
    )  # fmt: skip
    def test_a_short_value_is_told_back(self, given, told):
        words = str(first_fault(fault(given)).detail)
        assert words == "stop: no" + (f"; it is {told}" if told else "")

    def test_a_long_value_is_not_written_out(self):
        """A body of 8 MB would hold up every stream for that."""
        written = []

        class Part:
            def __repr__(self) -> str:
                written.append(self)
                return "part"

        for given in ([Part()] * 10_000, {"within": [Part()] * 10_000}):
            first_fault(fault(given))
            first_fault(fault(given, "missing"))
        assert 0 < len(written) < 250

    def test_a_mistake_of_ours_is_not_the_clients(self):
        with pytest.raises(KeyError), refusing("prompt", CompletionRequest):
            {}["a"]
