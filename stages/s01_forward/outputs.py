"""Read later: what comes back, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

NOT_FINITE = "no token can be chosen or scored: the logits are not finite numbers"

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability (natural log) under the model, its rank (1: likeliest) and the likeliest tokens."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


class SampledToken(NamedTuple):  # as `TokenEvent`, made for every token: in half the time of a frozen dataclass
    """What the sampler says of one row; with `error` set there is no token."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class TokenEvent(NamedTuple):
    """One step of one answer, as it happens. `text` is what became certain with it; it may be empty."""

    request: int  # which prompt of the call
    index: int  # type: ignore[assignment]  # which of the prompt's n answers; nobody needs the method `tuple.index`
    token_id: int
    text: str
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `token_ids` holds the token that ended it (EOS, say); `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None  # the stop token or stop string, if one ended it
    logprobs: list[TokenLogprob] | None = None  # one per token
    error: str | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was made."""

    first_token: float | None
    finished: float | None


@dataclass(frozen=True)
class RequestOutput:
    """All answers to one prompt."""

    prompt: str | None  # None: the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timings: Timings
    prompt_logprobs: list[TokenLogprob | None] | None = None  # entry 0 is None: nothing precedes it
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache (stage 06)

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first answer ended."""
        return self.outputs[0].finish_reason
