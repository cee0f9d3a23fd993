"""POST /tokenize and /detokenize: text to token ids and back, as vLLM's. What is taken apart comes back the same."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import FailFast, Field, model_validator

from stages.s01_forward.sampling_params import check_int
from stages.s09_server.errors import bad_request, refusing
from stages.s09_server.fields import MAX_MESSAGES, Count
from stages.s09_server.json_body import JsonRoute
from stages.s09_server.protocol import Body, ChatMessage
from stages.s09_server.response_models import TEXT_ERRORS, Text, Tokens, documented
from stages.s09_server.service import service_of, template_turns
from stages.s09_server.token_texts import TokenTexts

MAX_TOKENS = 2**18  # of a text to be put together
MANY_TOKENS = 2**12  # a thread puts together more, so that no stream waits


class TokenizeRequest(Body):
    """A text, or a conversation, which is written as for an answer."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def check_one(self) -> TokenizeRequest:
        """Not both, and not neither."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[Count], Field(max_length=MAX_TOKENS), FailFast()]


router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize", response_model=Tokens, responses=documented(Tokens, *TEXT_ERRORS))
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """The token ids that a prompt would be."""
    service = service_of(request)
    if body.model is not None:
        service.check_model(body.model)
    tokenizer = service.tokenizer
    if body.messages is not None:
        token_ids = await service.chat_ids(template_turns(body.messages), TokenizeRequest)
    else:
        prompt = body.prompt or ""
        with refusing("prompt", TokenizeRequest):
            token_ids = await service.tokenised([len(prompt)], lambda: tokenizer.encode(prompt))
    texts = TokenTexts(tokenizer)
    return {
        "count": len(token_ids),
        "max_model_len": service.llm.info.max_model_len,
        "tokens": token_ids,
        "token_strs": [texts.of(token_id)[0] for token_id in token_ids] if body.return_token_strs else None,
    }


@router.post("/detokenize", response_model=Text, responses=documented(Text, *TEXT_ERRORS))
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    if body.model is not None:
        service.check_model(body.model)
    tokenizer, last = service.tokenizer, service.llm.info.vocab_size - 1

    def text() -> str:
        for token_id in body.tokens:
            check_int("tokens: a token id", token_id, 0, last)
        return tokenizer.decode(body.tokens, skip_special=False)

    with refusing("tokens", DetokenizeRequest):
        return {"prompt": text() if len(body.tokens) <= MANY_TOKENS else await asyncio.to_thread(text)}
