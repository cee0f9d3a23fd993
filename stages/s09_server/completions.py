"""POST /v1/completions: text goes on."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from stages.s09_server.completion_text import Columns, CompletionText, completion_texts
from stages.s09_server.errors import refusing
from stages.s09_server.exchange import Exchange
from stages.s09_server.json_body import JsonRoute
from stages.s09_server.messages import AnswerEvent
from stages.s09_server.params import completion_params
from stages.s09_server.protocol import CompletionRequest
from stages.s09_server.response_models import ANSWER_ERRORS, STREAM, Completion, documented
from stages.s09_server.service import service_of
from stages.s09_server.sse import Chunks, EventStream, encode, head_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", response_model=None, responses=documented(Completion, *ANSWER_ERRORS, content=STREAM))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """How each prompt goes on. Answers are numbered in the order of the prompts, n to each."""
    arrival, service = time.perf_counter(), service_of(request)
    service.check_model(body.model)
    with refusing(None, CompletionRequest):
        params = completion_params(body)
    grammar = await service.grammar(body.response_format, CompletionRequest)
    requests = await service.build(body.prompt, params, CompletionRequest, "prompt")
    texts = completion_texts(requests, service.llm.tokenizer, bool(body.echo), body.logprobs is not None)
    exchange = service.open(requests, arrival, grammar)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(exchange, CompletionChunks(exchange, service.model_name, texts, usage))
    return await whole(exchange, request, service.model_name, texts)


async def whole(exchange: Exchange, request: Request, model: str, texts: list[CompletionText]) -> Response:
    """The response without a stream."""
    told: list[list[AnswerEvent]] = [[] for _ in texts]
    async with exchange.watched(request.receive):
        while exchange.left and (events := await exchange.next()):
            for event in events:
                told[event.answer].append(event)
    choices = []
    for index, (text, news) in enumerate(zip(texts, told, strict=True)):
        if not news:  # the client has gone
            break
        text.prompt_scores = told[index - text.index][0].prompt_logprobs
        parts = [text.part(event) for event in news]
        logprobs = joined([columns for _, columns in parts if columns is not None])
        choices.append(
            {
                "index": index,
                "text": "".join(piece for piece, _ in parts),
                "logprobs": logprobs or None,
                "finish_reason": news[-1].finish_reason,
            }
        )
    body = {**head_of("cmpl", "text_completion", model), "choices": choices, "usage": exchange.usage()}
    return Response(encode(body), media_type="application/json")


def joined(parts: list[Columns]) -> Columns:
    """The columns of all parts, one below the other."""
    return {name: [value for columns in parts for value in columns[name]] for name in parts[0]} if parts else {}


class CompletionChunks(Chunks):
    """The chunks of a stream: text as it comes; the last of an answer says why it ended."""

    def __init__(self, exchange: Exchange, model: str, texts: list[CompletionText], usage: bool) -> None:
        super().__init__(exchange, head_of("cmpl", "text_completion", model), usage)
        self.texts = texts
        self.text_from = [self.head + b'{"index":%d,"text":' % index for index in range(len(texts))]
        self.text_to = b',"logprobs":null,"finish_reason":null}' + self.tail

    def chunk(self, event: AnswerEvent) -> bytes:
        """Nothing, if no text is certain yet and nobody wants scores."""
        answer = event.answer
        text, columns = self.texts[answer].part(event)
        if columns is None and event.finish_reason is None:  # nearly always
            return self.text_from[answer] + encode(text) + self.text_to if text else b""
        choice = {"index": answer, "text": text, "logprobs": columns, "finish_reason": event.finish_reason}
        return self.of_choice(choice)
