"""The text side: from the engine's token ids to text, and back the news that somebody's stop string has come.

Runs in the API's process or in one of its own. Constant work per token: `TextStream` of stage 01 gives whole characters
only, and holds back what may yet become a stop string.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from stages.s01_forward.generation import Generation, generations_for
from stages.s01_forward.outputs import SampledToken, TokenLogprob
from stages.s01_forward.sampling_params import SamplingParams
from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server.messages import Add, AnswerEvent, Begun, Step

if TYPE_CHECKING:  # not needed by the text process, nor is PyTorch, which comes with it
    from stages.s01_forward.inputs import PromptRequest

NOTHING: list[TokenLogprob] = []
LARGEST = 2**63 - 1  # that a message can carry


@dataclass
class Answer:
    """One answer in the making: the engine has the same without text."""

    stream: int
    number: int  # within its stream
    generation: Generation
    begun: Begun | None = None  # what was told of it, until its first event goes out


class Answers:
    """All answers that are open, by their numbers."""

    def __init__(self) -> None:
        self.open: dict[int, Answer] = {}

    def add(self, message: Add, generations: Sequence[Generation]) -> Add:
        """Follow the answers to a prompt; returns what the engine needs to know: stop strings are not its affair."""
        for number, generation in zip(message.answers, generations, strict=True):
            self.open[number] = Answer(message.stream, number - message.stream, generation)
        if not message.params.stop:
            return message
        return structs.replace(message, params=replace(message.params, stop=()))

    def drop(self, numbers: Iterable[int]) -> list[int]:
        """Nobody wants these any more; returns those that were still open. Their late tokens are passed over."""
        return [number for number in numbers if self.open.pop(number, None)]

    def take(self, step: Step) -> tuple[list[AnswerEvent], list[int]]:
        """The news of a step, one event for each token, and the answers that the engine should abort."""
        events: list[AnswerEvent] = []
        surplus: list[int] = []  # ended by their text, which the engine does not see
        for begun in step.begun:
            if answer := self.open.get(begun.answer):
                answer.begun = begun
                if begun.answer in step.errors:
                    continue  # its end is told below
                if answer.generation.finish_reason is not None:  # it wanted no token
                    events.append(self.event(answer, [], ""))
                    del self.open[begun.answer]
        logprobs, complete = step.logprobs, step.complete
        for place, (number, token) in enumerate(zip(step.answers, step.tokens, strict=True)):
            answer = self.open.get(number)
            if answer is None:
                continue
            score = logprobs.get(place)
            scores = NOTHING if score is None else [score]
            told = answer.generation.append(SampledToken(token, score), place in complete)
            if told.finish_reason is None and answer.begun is None:  # nearly always
                events.append(AnswerEvent(answer.stream, answer.number, [token], told.text, scores))
                continue
            events.append(self.event(answer, [token], told.text, scores))
            if told.finish_reason is not None:
                del self.open[number]
                if isinstance(answer.generation.stop_reason, str):
                    surplus.append(number)
        for number, error in step.errors.items():
            if answer := self.open.pop(number, None):
                events.append(self.event(answer, [], answer.generation.fail(error).text))
        return events, surplus

    def event(self, answer: Answer, tokens: list[int], text: str, scores: list[TokenLogprob] = NOTHING) -> AnswerEvent:
        """An event with all that is to be told of an answer."""
        generation, begun = answer.generation, answer.begun
        answer.begun = None
        return AnswerEvent(
            answer.stream,
            answer.number,
            tokens,
            text,
            scores,
            finish_reason=generation.finish_reason,
            stop_reason=generation.stop_reason,
            error=generation.error,
            num_cached_tokens=begun.num_cached_tokens if begun else 0,
            prompt_logprobs=begun.prompt_logprobs if begun else None,
        )


def add_message(request: PromptRequest, first: int, stream: int, grammar: str | None = None) -> Add:
    """A request as the engine hears of it."""
    return Add(
        stream=stream,
        first=first,
        prompt_token_ids=request.prompt_token_ids,
        params=within_64_bits(request.params),
        seeds=[generation.seed for generation in request.generations],
        token_limit=request.generations[0].token_limit,
        grammar=grammar,
    )


def within_64_bits(params: SamplingParams) -> SamplingParams:
    """A count that no message can carry asks for no more than the largest that one can."""
    counts = {name: getattr(params, name) for name in ("max_tokens", "min_tokens", "top_k")}
    large: dict[str, Any] = {name: LARGEST for name, count in counts.items() if count is not None and count > LARGEST}
    return replace(params, **large) if large else params


def generations_of(message: Add, eos_token_ids: Collection[int], tokenizer: Tokenizer | None) -> list[Generation]:
    """The answers that a message asks for: with a tokenizer they have text, without they are the engine's."""
    return generations_for(
        message.prompt_token_ids,
        message.params,
        message.seeds,
        token_limit=message.token_limit,
        eos_token_ids=eos_token_ids,
        tokenizer=tokenizer,
        request=message.first,
    )
