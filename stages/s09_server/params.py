"""From a request's fields to `SamplingParams`. What is left out, or null, is OpenAI's default: temperature 1, top_p 1.

The sampling defaults of a model's generation_config.json are not read: the same request means the same for every model.
"""

from __future__ import annotations

from typing import Any

from stages.s01_forward.sampling_params import SamplingParams
from stages.s09_server.protocol import ChatRequest, CompletionRequest, SamplingFields

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

SAME = (
    "n", "top_p", "presence_penalty", "frequency_penalty", "seed", "min_p", "repetition_penalty", "min_tokens",
    "stop_token_ids", "ignore_eos", "cache_salt", "priority", "stop",
)  # fmt: skip


def shared(body: SamplingFields) -> dict[str, Any]:
    """What means the same in both endpoints; `SamplingParams` has its own defaults for the rest."""
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    given["temperature"] = 1.0 if body.temperature is None else body.temperature
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)  # -1 is vLLM's word for all
    if body.logit_bias:
        given["logit_bias"] = {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    return given


def chat_params(body: ChatRequest) -> SamplingParams:
    """`max_completion_tokens` goes before the older `max_tokens`; with neither an answer may be as long as fits."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **shared(body))


def completion_params(body: CompletionRequest) -> SamplingParams:
    """`logprobs` counts alternatives. An echo is scored too if the answer is; with no answer it always is."""
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    scored = body.logprobs if body.echo else None
    if max_tokens == 0 and scored is None:
        scored = 0
    return SamplingParams(max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scored, **shared(body))
