"""The values that the fields of a request may have, and how the OpenAPI document tells of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints, WithJsonSchema

from stages.s01_forward.inputs import Prompt
from stages.s01_forward.sampling_params import MAX_LOGPROBS

INT32, INT64 = 2**31 - 1, 2**63 - 1
MAX_STOPS, MAX_STOP_LENGTH = 32, 1000  # OpenAI takes 4
MAX_BIASES = MAX_STOP_IDS = 1024
MAX_MESSAGES = MAX_PROMPTS = 2048


def as_list(value: object) -> object:
    """A text stands for a list of one."""
    return [value] if isinstance(value, str) else value


def whole(value: object) -> object:
    """JSON knows one kind of numbers: 3.0 is 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text_of(content: object) -> str:
    """A message's content: text, or parts of type text, which are joined with nothing between. None is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError("content must be text or a list of parts")
    return "".join(map(text_of_part, content))


def text_of_part(part: object) -> str:
    """The text of a content part; a model of text cannot see images."""
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise ValueError(f"a content part of type {kind!r} is not supported; 'text' is")
    if not isinstance(part.get("text"), str):
        raise ValueError("a content part of type 'text' needs its 'text'")
    return part["text"]


def a_prompt_or_more(value: object) -> list[Prompt]:
    """Text, token ids, or a list of these: as a list."""
    single = isinstance(value, str) or (isinstance(value, list) and len(value) > 0 and type(value[0]) in (int, float))
    prompts = [value] if single else value
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"a prompt is text, token ids, or a list of 1 to {MAX_PROMPTS} of these")
    return [a_prompt(prompt) for prompt in prompts]


def a_prompt(value: Any) -> Prompt:
    """Text, or some token ids; whether there are such tokens is looked at later."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if float in kinds:
            value = [whole(token_id) for token_id in value]
            kinds = set(map(type, value))
        if kinds == {int}:
            return value
    raise ValueError("each prompt must be text, or a list of token ids, not an empty one")


IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        IDS_SCHEMA,
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
TEXT_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART_SCHEMA}, {"type": "null"}]}
STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
STOPS_SCHEMA = {
    "anyOf": [STOP_SCHEMA, {"type": "array", "items": STOP_SCHEMA, "maxItems": MAX_STOPS}, {"type": "null"}]
}

Prompts = Annotated[list[Any], PlainValidator(a_prompt_or_more), WithJsonSchema(PROMPT_SCHEMA)]
Content = Annotated[str, PlainValidator(text_of), WithJsonSchema(CONTENT_SCHEMA)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None,
    BeforeValidator(as_list),
    WithJsonSchema(STOPS_SCHEMA),
]
BiasKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Biases = Annotated[
    dict[BiasKey, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
# Bounds stand before `whole`: behind a function pydantic would tell them as "ge" and "le", which no client knows.
Count = Annotated[int, Field(ge=0, le=INT32), BeforeValidator(whole)]
Positive = Annotated[int, Field(ge=1, le=INT32), BeforeValidator(whole)]
NumAnswers = Annotated[int, Field(ge=1, le=128), BeforeValidator(whole)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(whole)]
Int32 = Annotated[int, Field(ge=-INT32 - 1, le=INT32), BeforeValidator(whole)]
Int64 = Annotated[int, Field(ge=-INT64 - 1, le=INT64), BeforeValidator(whole)]
TopK = Annotated[int, Field(ge=-1, le=INT32), BeforeValidator(whole)]
