"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response

from stages.s01_forward.outputs import TokenLogprob
from stages.s09_server.errors import refusing
from stages.s09_server.exchange import Exchange
from stages.s09_server.json_body import JsonRoute
from stages.s09_server.messages import AnswerEvent
from stages.s09_server.params import chat_params
from stages.s09_server.protocol import ChatRequest
from stages.s09_server.response_models import ANSWER_ERRORS, STREAM, ChatCompletion, documented
from stages.s09_server.service import service_of, template_turns
from stages.s09_server.sse import Chunks, EventStream, encode, head_of
from stages.s09_server.token_texts import TokenTexts

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses=documented(ChatCompletion, *ANSWER_ERRORS, content=STREAM),
)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The model's next message in a conversation."""
    arrival, service = time.perf_counter(), service_of(request)
    service.check_model(body.model)
    with refusing(None, ChatRequest):
        params = chat_params(body)
    grammar = await service.grammar(body.response_format, ChatRequest)
    token_ids = await service.chat_ids(template_turns(body.messages), ChatRequest)
    requests = await service.build([token_ids], params, ChatRequest, "messages")
    texts = TokenTexts(service.tokenizer) if body.logprobs else None
    exchange = service.open(requests, arrival, grammar)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(exchange, ChatChunks(exchange, service.model_name, texts, usage))
    return await whole(exchange, request, service.model_name, texts)


@dataclass
class Collected:
    """An answer as it is put together."""

    pieces: list[str] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


async def whole(exchange: Exchange, request: Request, model: str, texts: TokenTexts | None) -> Response:
    """The response without a stream."""
    answers = [Collected() for _ in range(exchange.num_answers)]
    async with exchange.watched(request.receive):
        while exchange.left and (events := await exchange.next()):
            for event in events:
                answer = answers[event.answer]
                answer.pieces.append(event.text)
                answer.scores += event.logprobs
                answer.finish_reason = event.finish_reason
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(answer.pieces)},
            "logprobs": {"content": texts.for_chat(answer.scores)} if texts else None,
            "finish_reason": answer.finish_reason,
        }
        for index, answer in enumerate(answers)
    ]
    body = {**head_of("chatcmpl", "chat.completion", model), "choices": choices, "usage": exchange.usage()}
    return Response(encode(body), media_type="application/json")


class ChatChunks(Chunks):
    """The chunks of a stream: the role, then text as it comes, then why the answer ended, for each answer."""

    def __init__(self, exchange: Exchange, model: str, texts: TokenTexts | None, usage: bool) -> None:
        super().__init__(exchange, head_of("chatcmpl", "chat.completion.chunk", model), usage)
        self.texts = texts
        answers = range(exchange.num_answers)
        self.text_from = [self.head + b'{"index":%d,"delta":{"content":' % answer for answer in answers]
        self.text_to = b'},"logprobs":null,"finish_reason":null}' + self.tail
        self.begun: set[int] = set()

    def chunk(self, event: AnswerEvent) -> bytes:
        """Nothing, if no text is certain yet and nobody wants scores."""
        answer, text = event.answer, event.text
        if answer in self.begun and event.finish_reason is None and self.texts is None:  # nearly always
            return self.text_from[answer] + encode(text) + self.text_to if text else b""
        chunks = []
        if answer not in self.begun:
            self.begun.add(answer)
            chunks.append(self.choice(answer, {"role": "assistant", "content": ""}))
        if self.texts and event.logprobs:
            chunks.append(self.choice(answer, {"content": text}, {"content": self.texts.for_chat(event.logprobs)}))
        elif text:
            chunks.append(self.text_from[answer] + encode(text) + self.text_to)
        if event.finish_reason is not None:
            chunks.append(self.choice(answer, {}, finish_reason=event.finish_reason))
        return b"".join(chunks)

    def choice(
        self, index: int, delta: dict[str, str], logprobs: object = None, finish_reason: str | None = None
    ) -> bytes:
        """A chunk of an unusual kind."""
        return self.of_choice({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})
