"""Read later: how a request wants its tokens chosen and when it wants to stop. Every value is checked at birth."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_LOGPROBS = 20  # alternatives per token, as in the OpenAI API
MAX_TEMPERATURE = 1e6  # by then every token is as likely as any other; fp32 ends at 3e38
GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing by it would only overflow


@dataclass(frozen=True)
class SamplingParams:
    """One request's wishes. The defaults are greedy.

    The order in which they act on the logits is that of Hugging Face: bias and bans, penalties, temperature,
    top-k, top-p, min-p. Log-probabilities are those of the model, before any of it.
    Raises ValueError or TypeError naming the field, its value and its range.
    """

    max_tokens: int | None = 256  # new tokens at most; None: as many as the model's length allows
    min_tokens: int = 0  # no EOS, stop token or stop string before this many
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0  # the smallest set of tokens whose probabilities reach this
    min_p: float = 0.0  # drop tokens less likely than this share of the most likely one
    repetition_penalty: float = 1.0  # prompt and output, once per distinct token
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only, per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    seed: int | None = None  # None: a fresh one per request
    n: int = 1  # independent answers to one prompt
    stop: Sequence[str] = ()  # never part of the text
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # this many alternatives per output token; 0: the chosen token's alone
    prompt_logprobs: int | None = None
    cache_salt: str | None = None  # share cached K/V only with requests of the same salt; acts from stage 06 on
    priority: int = 0  # smaller is sooner; acts from stage 04 on

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_kind("stop", self.stop, (list, tuple), "text or a list of texts")
        check_kind("stop_token_ids", self.stop_token_ids, (list, tuple), "a list of token ids")
        check_kind("logit_bias", self.logit_bias, Mapping, "a mapping from token ids to numbers")
        # Copies: what the caller does with its own lists later was never checked.
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        check_kind("cache_salt", self.cache_salt, (str, type(None)), "text or None")
        check_kind("ignore_eos", self.ignore_eos, bool, "True or False")
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 0 if self.prompt_logprobs is not None else 1)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_int("top_k", self.top_k, 0)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            check_int("logit_bias: a token id", token_id, 0)
            check_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        check_int("n", self.n, 1, 128)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}; stop strings must be non-empty text")
        for token_id in self.stop_token_ids:
            check_int("stop_token_ids: a token id", token_id, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        check_int("priority", self.priority, -(2**31), 2**31 - 1)

    @property
    def greedy(self) -> bool:
        """Is the most likely token always taken?"""
        return self.temperature < GREEDY_BELOW

    @property
    def adjusts_logits(self) -> bool:
        """Does choosing a token need this request's own history or bias?"""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


def check_kind(name: str, value: object, kind: type | tuple[type, ...], words: str) -> None:
    """A value of this type; `words` say which that is."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; it must be {words}")


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """A whole number in [low, high]. `True` and `1.0` are not whole numbers here."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} is {value}; it must be {bounds}")


def check_float(name: str, value: object, low: float, high: float | None = None, open_low: bool = False) -> None:
    """A finite number in [low, high], or (low, high] with `open_low`. NaN is in no range."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    most = sys.float_info.max if high is None else high
    if not ((low < value or (low == value and not open_low)) and value <= most):
        bounds = f"{'above' if open_low else 'at least'} {low}" + (f" and at most {high}" if high is not None else "")
        raise ValueError(f"{name} is {value}; it must be a finite number, {bounds}")
