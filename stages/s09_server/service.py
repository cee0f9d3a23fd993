"""What all handlers share: the engine, what the server was told, and the way from a request to a stream of answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

from fastapi import Request
from pydantic import BaseModel

from stages.s01_forward.inputs import Prompt, PromptRequest
from stages.s01_forward.sampling_params import SamplingParams
from stages.s01_forward.tokenizer import Message, Tokenizer
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.errors import ApiError, bad_request, refusing
from stages.s09_server.exchange import Exchange
from stages.s09_server.grammar import grammar_of
from stages.s09_server.metrics import Metrics
from stages.s09_server.protocol import ChatMessage, SamplingFields

LONG_TEXT = 8192  # characters; a longer text is made tokens by a thread, so that no stream waits for it

Result = TypeVar("Result")


@dataclass(frozen=True)
class ApiSettings:
    """How the API behaves.

    served_model_names: what clients may call the model; the first is what answers say. api_key: None: nobody needs one.
    max_waiting: answers that may wait when as many run as can. request_timeout: seconds, None: no end.
    allowed_origins: web pages that may use the API from a browser. root_path: what a proxy in front cuts off.
    """

    served_model_names: tuple[str, ...]
    api_key: str | None = None
    max_waiting: int = 256
    request_timeout: float | None = None
    max_body_mb: float = 8.0
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ValueError("served_model_names is empty; clients must be able to name the model")
        if not all(name.strip() for name in self.served_model_names):
            raise ValueError("a served model name is empty; leave it out, or give one that clients can send")


@dataclass
class Service:
    """One server. `draining` is set when it is to end: what is open goes on, nothing new is taken."""

    llm: AsyncLLM
    settings: ApiSettings
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.model_name, lambda: self.llm.stats)
        self.tokenising = asyncio.Lock()

    @property
    def model_name(self) -> str:
        """What answers call the model."""
        return self.settings.served_model_names[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError if the model has none."""
        if self.llm.tokenizer is None:
            raise bad_request(None, "this model has no tokenizer; send token ids to /v1/completions")
        return self.llm.tokenizer

    @cached_property
    def max_characters(self) -> int:
        """A longer text cannot fit: even if each token were the longest that there is."""
        token_bytes, info = self.tokenizer.token_bytes, self.llm.info
        longest = max(len(token_bytes(token_id, skip_special=False)) for token_id in range(info.vocab_size))
        return longest * info.max_model_len

    def check_model(self, name: str) -> None:
        """404 for a model that is not served here."""
        if name not in self.settings.served_model_names:
            names = ", ".join(self.settings.served_model_names)
            message = f"the model {name!r} is not served here; there is {names}"
            raise ApiError(404, message, param="model", code="model_not_found")

    # ---- text to token ids -------------------------------------------------------------------------------------------

    async def tokenised(self, sizes: Sequence[int], function: Callable[[], Result]) -> Result:
        """The result of a function that makes tokens of texts of these `sizes`. Long ones go one request at a time."""
        if sum(sizes) <= LONG_TEXT:
            return function()
        async with self.tokenising:
            return await asyncio.to_thread(self.if_it_can_fit, max(sizes), function)

    def if_it_can_fit(self, size: int, function: Callable[[], Result]) -> Result:
        """Refuse at once what would be refused after seconds of work."""
        if size > self.max_characters:
            raise ValueError(
                f"the text has {size} characters; the model's length of {self.llm.info.max_model_len} tokens "
                f"can hold {self.max_characters} at most"
            )
        return function()

    async def chat_ids(self, messages: Sequence[Message], fields: type[BaseModel]) -> list[int]:
        """A conversation as token ids."""
        tokenizer, size = self.tokenizer, sum(len(message["content"]) for message in messages)
        with refusing("messages", fields):
            return await self.tokenised([size], lambda: tokenizer.encode_chat(messages))

    async def build(
        self, prompts: Sequence[Prompt], params: SamplingParams, fields: type[SamplingFields], param: str
    ) -> list[PromptRequest]:
        """Checked requests. None may be longer than what the KV cache holds when nobody else is there."""
        info, answers = self.llm.info, len(prompts) * params.n
        if answers > self.most_answers:  # `open` would refuse it, after all the work
            raise too_many(answers, self.most_answers)
        held = min(self.llm.requests.max_model_len, info.num_blocks * info.block_size)
        builder = replace(self.llm.requests, max_model_len=held)
        sizes = [len(prompt) if isinstance(prompt, str) else 0 for prompt in prompts]
        with refusing(param, fields):
            return await self.tokenised(sizes, lambda: builder.build(prompts, params))

    async def grammar(self, response_format: Mapping[str, Any] | None, fields: type[BaseModel]) -> str | None:
        """What the text must follow; None: nothing. A large schema takes a while, so a thread reads it."""
        if response_format is None:
            return None
        with refusing("response_format", fields):
            grammar = await asyncio.to_thread(grammar_of, response_format)
        if grammar is not None and self.llm.tokenizer is None:
            raise bad_request("response_format", "this model has no tokenizer, so its text cannot follow a grammar")
        return grammar

    # ---- to the engine -----------------------------------------------------------------------------------------------

    @property
    def most_answers(self) -> int:
        """As many may be under way: those that run, and those that may wait."""
        return self.llm.info.max_num_seqs + self.settings.max_waiting

    def open(self, requests: list[PromptRequest], arrival: float, grammar: str | None = None) -> Exchange:
        """Queue requests, unless the queue is full. `arrival`: by `time.perf_counter`. Raises EngineDied."""
        answers, most = sum(len(request.generations) for request in requests), self.most_answers
        if answers > most:
            raise too_many(answers, most)
        if self.llm.num_open + answers > most:
            message = f"{self.llm.num_open} answers are under way, and the server takes {most} at most; try again later"
            raise ApiError(429, message, code="queue_full", retry=True)
        stream = self.llm.open(requests, grammar=grammar)
        return Exchange(stream, requests, self.metrics, arrival, self.settings.request_timeout, self.llm)


def service_of(request: Request) -> Service:
    """Whom a request is for: routes are made once, and every server of a process has them."""
    return cast(Service, request.app.state.service)


def too_many(answers: int, most: int) -> ApiError:
    """400: however long the client waits, this request will not fit."""
    return bad_request(None, f"the request asks for {answers} answers at once; the server takes {most} at most")


def template_turns(messages: Sequence[ChatMessage]) -> list[Message]:
    """As chat templates want them; they know OpenAI's newer role "developer" by its older name, "system"."""
    return [{"role": "system" if turn.role == "developer" else turn.role, "content": turn.content} for turn in messages]
