"""Read later: from what the caller passes to checked requests. Everything is refused here, before any work is done."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stages.s01_forward.generation import Generation, generations_for
from stages.s01_forward.outputs import NOT_FINITE, RequestOutput, Timings, TokenLogprob
from stages.s01_forward.sampler import prompt_logprobs
from stages.s01_forward.sampling_params import SamplingParams, check_int
from stages.s01_forward.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids


@dataclass
class PromptRequest:
    """One prompt and its n answers in the making."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    generations: list[Generation]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    arrival: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # seconds after arrival
    finished: float | None = None

    def score(self, logits: Tensor) -> None:
        """Take the prompt's log-probabilities from logits [T, V] of all its positions; NaN ends the request instead."""
        if bool(torch.isfinite(logits.amax(-1)).all()):
            self.prompt_logprobs = prompt_logprobs(logits, self.prompt_token_ids, self.params)
            return
        for generation in self.generations:
            generation.fail(NOT_FINITE)

    def note_time(self) -> None:
        """Call after each token: keeps when the first came and when the last answer ended."""
        now = time.perf_counter() - self.arrival
        self.first_token = now if self.first_token is None else self.first_token
        if all(generation.finish_reason for generation in self.generations):
            self.finished = now

    def output(self) -> RequestOutput:
        """What the caller gets back."""
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[generation.output() for generation in self.generations],
            timings=Timings(self.first_token, self.finished),
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )


@dataclass(frozen=True)
class RequestBuilder:
    """What a model allows: its vocabulary, its length in tokens, its EOS ids, and its tokenizer if it has one."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None

    def build(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[PromptRequest]:
        """One request per prompt, with one SamplingParams for all or one each."""
        listed = list_prompts(prompts)
        each = [params or SamplingParams()] * len(listed) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(listed):
            raise ValueError(f"{len(listed)} prompts came with {len(each)} SamplingParams; give one, or one for each")
        return [self._request(i, prompt, p) for i, (prompt, p) in enumerate(zip(listed, each, strict=True))]

    def _request(self, number: int, prompt: Prompt, params: SamplingParams) -> PromptRequest:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"prompt {number} came with {params!r}; its parameters must be a SamplingParams")
        ids = self._encode(number, prompt)
        room = self.max_model_len - len(ids)
        if room < (0 if params.max_tokens == 0 else 1):
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens; the model's length is {self.max_model_len} "
                "and must hold the prompt and at least one new token"
            )
        self._check_ids("stop_token_ids", list(params.stop_token_ids))
        self._check_ids("logit_bias", list(params.logit_bias))
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {list(params.stop)} need a tokenizer, and this model folder has none")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        generations = generations_for(
            ids,
            params,
            [answer_seed(seed, index) for index in range(params.n)],
            token_limit=room if params.max_tokens is None else min(room, params.max_tokens),
            eos_token_ids=self.eos_token_ids,
            tokenizer=self.tokenizer,
            request=number,
        )
        self._check_choice(params, generations[0].stop_token_ids)
        return PromptRequest(prompt if isinstance(prompt, str) else None, ids, params, generations)

    def _encode(self, number: int, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"prompt {number} is text, and this model folder has no tokenizer; pass token ids")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        if not ids:
            raise ValueError(f"prompt {number} is empty: {prompt!r} gives no token to start from")
        self._check_ids(f"prompt {number}", ids)
        return ids

    def _check_choice(self, params: SamplingParams, stop_token_ids: frozenset[int]) -> None:
        if params.min_tokens and len(stop_token_ids) == self.vocab_size:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, and each of the model's {self.vocab_size} tokens ends the answer: "
                "none could be chosen before; leave min_tokens out, or some of stop_token_ids"
            )

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if ids and are_plain_ids(ids, self.vocab_size):
            return
        for token_id in ids:
            check_int(f"{name}: a token id", token_id, 0, self.vocab_size - 1)


def are_plain_ids(ids: Sequence[int], limit: int) -> bool:
    """Is each of them an `int` in [0, limit)? Told without a loop in Python: a long prompt has thousands."""
    try:
        values = np.frombuffer(array("I", ids), np.uint32)
    except (TypeError, OverflowError):  # not whole; below 0, or more than 32 bits
        return False
    may_be_bool = np.flatnonzero(values < 2)
    # With any other kind of number among them the sum would be of that kind, too.
    return values.max() < limit and type(sum(ids)) is int and all(type(ids[n]) is int for n in may_be_bool)


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, or a non-empty list of ids) or a list of prompts, as a list."""
    if not isinstance(prompts, (str, list, tuple)):
        raise TypeError(f"prompts are a {type(prompts).__name__}; pass text, token ids, or a list of these")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, list, tuple)):
            raise TypeError(f"prompt {i} is {prompt!r}; a prompt is text or a list of token ids")
    return list(prompts)  # type: ignore[arg-type]


def answer_seed(seed: int, index: int) -> int:
    """The seed of answer `index`: the request's own for the first, then steps of 2^64 / golden ratio (a Weyl sequence).

    As a signed 64-bit number, since that is what tensors hold.
    """
    value = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    return value - 2**64 if value >= 2**63 else value
