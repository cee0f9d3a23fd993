"""`LLM` behind messages: the same face as ever, and all that is said goes through bytes, as between two processes."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from typing import Any

from stages.s01_forward.frontend import Params
from stages.s01_forward.inputs import Prompt, PromptRequest
from stages.s01_forward.outputs import RequestOutput, TokenEvent
from stages.s01_forward.progress import show_progress
from stages.s04_continuous_batching.interrupts import held_back
from stages.s08_speculative.llm import LLM as SpeculativeLLM
from stages.s09_server.answers import Answers, add_message
from stages.s09_server.constraint import Grammars
from stages.s09_server.engine_loop import EngineLoop
from stages.s09_server.grammar import grammar_of
from stages.s09_server.messages import Abort, AnswerEvent, Step, ToEngine, decode_from_engine, decode_to_engine, encode


class LLM(SpeculativeLLM):
    """What the server does, in one thread: to read it, and to debug it. See `AsyncLLM` for the one that serves."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        eos = self.requests.eos_token_ids
        self.loop = EngineLoop(self.engine, eos, Grammars(self.tokenizer, self.config.vocab_size, eos))
        self.answers = Answers()
        self.next_number = 0
        self.news: dict[int, deque[AnswerEvent]] = {}  # by stream

    def generate(
        self,
        prompts: Prompt | Rows[Prompt],
        sampling_params: Params = None,
        *,
        progress: bool = False,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As ever. response_format: what the answers must be, as in the OpenAI API; see `grammar_of`."""
        requests = self.requests.build(prompts, sampling_params)
        events = self.run(requests, grammar_of(response_format))
        for _ in show_progress(events, requests) if progress else events:
            pass
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompt | Rows[Prompt],
        sampling_params: Params = None,
        *,
        response_format: Mapping[str, Any] | None = None,
    ) -> Iterator[TokenEvent]:
        """As `generate`, token by token. What is wrong with the input is raised here, not at the first event."""
        return self.run(self.requests.build(prompts, sampling_params), grammar_of(response_format))

    def run(self, requests: Rows[PromptRequest], grammar: str | None = None) -> Iterator[TokenEvent]:
        """Queue everything, then step until all of it has ended. Closing the stream early aborts the rest.

        Several streams may be read in turns: whoever steps the engine brings the others their news too.
        """
        stream, names = self.next_number, list[tuple[int, int]]()  # which prompt, and which of the answers to it
        news = self.news[stream] = deque()
        gc.freeze()  # what is there now need not be looked at again and again
        try:
            for number, request in enumerate(requests):
                message = add_message(request, self.next_number, stream, grammar)
                with held_back():
                    names += [(number, index) for index in range(len(request.generations))]
                    self.next_number += len(request.generations)
                    self.send(self.answers.add(message, request.generations))
            left = len(names)
            while left:
                while not news:
                    self.step()
                event = news.popleft()
                left -= event.finish_reason is not None
                yield from token_events(event, requests, *names[event.answer])
        finally:
            gc.unfreeze()
            with held_back():
                del self.news[stream]
                self.send(Abort(self.answers.drop(range(stream, stream + len(names)))))

    def send(self, message: ToEngine) -> None:
        """As over a socket."""
        self.loop.take(decode_to_engine(encode(message)))

    @held_back()
    def step(self) -> None:
        """One step, and its news to whom they concern."""
        step = decode_from_engine(encode(self.loop.step()))
        assert isinstance(step, Step)
        events, surplus = self.answers.take(step)
        self.send(Abort(surplus))
        for event in events:
            self.news[event.stream].append(event)


def token_events(event: AnswerEvent, requests: Rows[PromptRequest], number: int, index: int) -> Iterator[TokenEvent]:
    """What the caller is told of an event: nothing of an answer that wanted no token."""
    request = requests[number]
    if index == 0 and (event.prompt_logprobs is not None or event.num_cached_tokens):
        request.prompt_logprobs, request.num_cached_tokens = event.prompt_logprobs, event.num_cached_tokens
    request.note_time()
    for token in event.token_ids or ([-1] if event.error else []):
        yield TokenEvent(number, index, token, event.text, event.finish_reason)
