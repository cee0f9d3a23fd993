"""An answer of /v1/completions, part by part: the echoed prompt, if it is wanted, then text and scores as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.s01_forward.inputs import PromptRequest
from stages.s01_forward.outputs import TokenLogprob
from stages.s01_forward.tokenizer import Tokenizer
from stages.s09_server.errors import bad_request
from stages.s09_server.messages import AnswerEvent
from stages.s09_server.token_texts import CompletionScores, TokenTexts

Columns = dict[str, list[Any]]


class CompletionText:
    """`index`: which of the answers to its prompt. `prompt_scores`: of the prompt, told with the first answer alone."""

    def __init__(self, request: PromptRequest, index: int, echo: str | None, scores: CompletionScores | None) -> None:
        self.request, self.index, self.echo, self.scores = request, index, echo, scores
        self.prompt_scores: Sequence[TokenLogprob | None] | None = None

    def part(self, event: AnswerEvent) -> tuple[str, Columns | None]:
        """The text and the scores of an event; before the first of them what there is of the prompt."""
        if self.echo is None:
            return event.text, self.scores.answer(event.logprobs) if self.scores else None
        echo, self.echo = self.echo, None
        if self.scores is None:
            return echo + event.text, None
        known = event.prompt_logprobs or self.prompt_scores or ()
        prompt = self.scores.prompt(echo, self.request.prompt_token_ids, known)
        answer = self.scores.answer(event.logprobs)
        return echo + event.text, {name: prompt[name] + answer[name] for name in prompt}


def completion_texts(
    requests: Sequence[PromptRequest], tokenizer: Tokenizer | None, echo: bool, scored: bool
) -> list[CompletionText]:
    """One for each answer. Raises ApiError if text is wanted and the model has none."""
    if tokenizer is None and (echo or scored):
        raise bad_request("echo" if echo else "logprobs", "this model has no tokenizer, and so no text of its tokens")
    texts = TokenTexts(tokenizer) if tokenizer else None
    answers = []
    for request in requests:
        prompt = None
        if echo and tokenizer:
            prompt = tokenizer.decode(request.prompt_token_ids) if request.prompt is None else request.prompt
        for index in range(len(request.generations)):
            scores = CompletionScores(texts) if scored and texts else None
            answers.append(CompletionText(request, index, prompt, scores))
    return answers
