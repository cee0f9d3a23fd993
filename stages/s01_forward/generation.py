"""Read later: one answer in the making, from its first token to the reason why it ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stages.s01_forward.constraint import Constraint
from stages.s01_forward.outputs import CompletionOutput, FinishReason, SampledToken, TokenEvent, TokenLogprob
from stages.s01_forward.sampling_params import SamplingParams
from stages.s01_forward.text_stream import TextStream
from stages.s01_forward.tokenizer import Tokenizer


class Generation:
    """The tokens and the text of one answer. `token_limit` is its cap on new tokens, the model's length considered.

    Each answer has a `seed` of its own; `index` tells the n answers to one prompt apart. `constraint`: what its tokens
    must follow, if anything; it is given before the first token.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        token_limit: int,
        eos_token_ids: Collection[int] = (),
        tokenizer: Tokenizer | None = None,
        request: int = 0,
        index: int = 0,
    ) -> None:
        self.prompt_token_ids, self.params, self.seed = prompt_token_ids, params, seed
        self.request, self.index, self.token_limit = request, index, token_limit
        self.stop_token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.banned_token_ids = sorted(self.stop_token_ids)  # before `min_tokens`
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = "length" if token_limit == 0 else None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.stream = TextStream(tokenizer, params.stop) if tokenizer else None
        self.constraint: Constraint | None = None

    def append(self, sampled: SampledToken, complete: bool = False) -> TokenEvent:
        """Take one token and decide whether the answer ends here. A stop goes before the cap when both apply.

        complete: no other token may follow, as somebody knows who has the constraint.
        """
        if self.finish_reason is not None:
            raise ValueError(f"answer {self.index} has ended ({self.finish_reason}) and takes no further token")
        token_id, logprob, error = sampled
        if error is not None:
            return self.fail(error)
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.constraint is not None:
            complete = self.constraint.accept(token_id)

        count, stream = len(self.token_ids), self.stream
        may_stop = count >= self.params.min_tokens
        if may_stop and token_id in self.stop_token_ids:  # the token itself is no text
            self.finish_reason, self.stop_reason = "stop", token_id
            return self._event(token_id, self._finish_text())
        text = stream.push(token_id, may_stop) if stream else ""
        if stream and stream.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", stream.stopped_by
        elif complete:
            self.finish_reason = "stop"
            text += self._finish_text()
        elif count >= self.token_limit:
            self.finish_reason = "length"
            text += self._finish_text()
        return self._event(token_id, text)

    def fail(self, error: str) -> TokenEvent:
        """End the answer with an error that came instead of a token; what there is of it stays."""
        self.finish_reason, self.error = "error", error
        return self._event(-1, self._finish_text())

    def output(self) -> CompletionOutput:
        """The answer so far."""
        return CompletionOutput(
            index=self.index,
            text="".join(self.stream.pieces) if self.stream else "",
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
            error=self.error,
        )

    def _finish_text(self) -> str:
        return self.stream.finish() if self.stream else ""

    def _event(self, token_id: int, text: str) -> TokenEvent:
        # `TokenEvent(...)` in half the time: this happens for every token.
        return tuple.__new__(TokenEvent, (self.request, self.index, token_id, text, self.finish_reason))


def generations_for(
    prompt_token_ids: list[int],
    params: SamplingParams,
    seeds: Iterable[int],
    *,
    token_limit: int,
    eos_token_ids: Collection[int],
    tokenizer: Tokenizer | None,
    request: int,
) -> list[Generation]:
    """The answers to one prompt, one for each seed."""
    return [
        Generation(
            prompt_token_ids,
            params,
            seed=seed,
            token_limit=token_limit,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            request=request,
            index=index,
        )
        for index, seed in enumerate(seeds)
    ]
