"""What the answers look like: for the OpenAPI document, and for the checks. The handlers write JSON themselves."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from stages.s09_server.errors import ErrorBody

ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; try again later.",
    500: "The server made a mistake.",
    503: "There is no engine: it has died, or is being started, or the server is shutting down.",
    504: "The answer took too long.",
}
ANSWER_ERRORS = (400, 401, 404, 413, 415, 429, 500, 503, 504)
TEXT_ERRORS = (400, 401, 404, 413, 415)
EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
    "description": "An event of the stream: a chunk as JSON text; the last is [DONE], or an error object.",
}
STREAM = {"text/event-stream": {"schema": EVENT}}

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Alternative(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenScore(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    content: list[TokenScore]


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    status: Literal["ok"]


class Version(BaseModel):
    version: str


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Annotated[list[str] | None, Field(description="If `return_token_strs` was asked for.")]


class Text(BaseModel):
    prompt: str


def documented(model: type[BaseModel], *statuses: int, content: dict[str, Any] | None = None) -> dict[int | str, Any]:
    """A route's `responses`: its answer, the errors of these statuses, and that all other errors look the same."""
    ok: dict[str, Any] = {"model": model} | ({"content": content} if content else {})
    errors: dict[int | str, Any] = {status: {"model": ErrorBody, "description": ERRORS[status]} for status in statuses}
    return {200: ok, **errors, "default": {"model": ErrorBody, "description": "Any other error."}}
