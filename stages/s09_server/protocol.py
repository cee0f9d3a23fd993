"""The requests of the OpenAI API, as pydantic models: what is known is checked, what is unknown is passed over.

Whatever would change the answer and cannot be done is refused by its name, instead of being passed over.
Types are strict: `true` and "3" are no numbers. `null` always means the default.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from stages.s09_server.errors import bad_request
from stages.s09_server.fields import (
    MAX_MESSAGES,
    MAX_STOP_IDS,
    Alternatives,
    Biases,
    Content,
    Count,
    Int32,
    Int64,
    NumAnswers,
    Penalty,
    Positive,
    Prompts,
    Share,
    Stops,
    TopK,
)

Unsupported = dict[str, tuple[Any, ...]]  # field -> values that ask for nothing special


class Body(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")
    unsupported: ClassVar[Unsupported] = {}

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, body: Any) -> Any:
        """Nothing that would change the answer is passed over."""
        for name, harmless in cls.unsupported.items() if isinstance(body, dict) else ():
            value = body.get(name)
            if value is not None and value not in harmless:
                raise bad_request(name, f"{name} is not supported by this server", "unsupported_value")
        return body


class StreamOptions(Body):
    """What a stream tells besides its chunks."""

    include_usage: bool | None = None


class SamplingFields(Body):
    """What chat and completions have in common. The second half is not OpenAI's: the names are vLLM's."""

    unsupported: ClassVar[Unsupported] = {
        "use_beam_search": (False,), "prompt_logprobs": (), "truncate_prompt_tokens": (), "logits_processors": ([],),
        "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "return_token_ids": (False,),
        "allowed_token_ids": ([],), "bad_words": ([],), "structured_outputs": (), "guided_json": (),
        "guided_regex": (), "guided_choice": (), "guided_grammar": (), "json_schema": (), "regex": (), "ebnf": (),
        "length_penalty": (1.0,),
    }  # fmt: skip

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumAnswers | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None  # 1, as OpenAI's
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None  # token ids as text, as JSON wants its keys
    seed: Int64 | None = None
    stop: Stops = None
    response_format: dict[str, Any] | None = None

    top_k: TopK | None = None  # -1 and 0: all tokens
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    priority: Int32 | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> SamplingFields:
        """As OpenAI does."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "stream_options is for streams: set stream to true as well")
        return self


class ChatMessage(Body):
    """One turn. "developer" is OpenAI's newer word for "system", which is what chat templates know."""

    unsupported: ClassVar[Unsupported] = {"tool_calls": ([],), "function_call": (), "audio": (), "refusal": ("",)}

    role: Literal["system", "developer", "user", "assistant"]
    content: Content = ""


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[Unsupported] = SamplingFields.unsupported | {
        "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
        "modalities": (["text"],), "audio": (), "web_search_options": (), "reasoning_effort": ("none",),
        "chat_template": (), "chat_template_kwargs": ({},), "documents": ([],), "echo": (False,),
        "add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (False,),
    }  # fmt: skip

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Positive | None = None  # goes before `max_tokens`; neither: as many as fit
    max_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    @model_validator(mode="after")
    def check_logprobs(self) -> ChatRequest:
        """As OpenAI does."""
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs is for logprobs: set logprobs to true as well")
        return self


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    unsupported: ClassVar[Unsupported] = SamplingFields.unsupported | {"suffix": ("",), "add_special_tokens": (True,)}

    prompt: Prompts
    max_tokens: Count | None = None  # 16, as OpenAI's; 0 only to `echo`, and to score, the prompt
    echo: bool | None = None
    logprobs: Alternatives | None = None  # OpenAI takes up to 5
    best_of: NumAnswers | None = None  # OpenAI's takes the best n; here only n itself

    @model_validator(mode="after")
    def check_together(self) -> CompletionRequest:
        """Values that are good alone and not together."""
        n = self.n or 1
        if self.best_of not in (None, n):
            raise bad_request("best_of", f"best_of {self.best_of} is not supported; leave it out, or give n, {n}")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens", "max_tokens is 0; without echo there would be nothing to answer")
        if self.echo and self.logprobs is not None and self.stream and n > 1:
            raise bad_request("n", "a scored echo of several answers cannot be streamed; ask for n 1, or no stream")
        return self
