"""The model's own choices in the places of the guesses, where plain sampling on the device is not enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.s01_forward.constraint import Constraint
from stages.s01_forward.generation import Generation
from stages.s01_forward.noise import exponential_noise
from stages.s01_forward.outputs import SampledToken, TokenLogprob
from stages.s01_forward.sampler import (
    SamplingBatch,
    adjust,
    filtered,
    token_logprobs,
    top_logprobs,
    why_none,
)
from stages.s01_forward.sampling_params import SamplingParams
from stages.s08_speculative.acceptance import ratio_rule

OTHER_DRAWS = 0x5DEECE66D  # of a seed: draws that have nothing to do with those of plain decoding


@dataclass
class After:
    """A generation as it would be after some guesses: what stage 01's sampler needs to know of it."""

    params: SamplingParams
    prompt_token_ids: list[int]
    token_ids: list[int]
    seed: int
    banned_token_ids: list[int]
    constraint: Constraint | None = None


def prefixes(generation: Generation, drafts: Sequence[int], salt: int = 0) -> list[After]:
    """The generation after 0, 1 .. k guesses."""
    constraint = generation.constraint
    return [
        After(
            generation.params,
            generation.prompt_token_ids,
            [*generation.token_ids, *drafts[:count]],
            generation.seed ^ salt,
            generation.banned_token_ids,
            constraint.after(drafts[:count]) if constraint is not None else None,
        )
        for count in range(len(drafts) + 1)
    ]


def adjust_all(logits: Tensor, rows: Sequence[After]) -> Tensor:
    """Logits [N, V] after each row's bias, bans and penalties, fp32."""
    return torch.stack([adjust(each, row) for each, row in zip(logits.float(), rows, strict=True)])


def distributions(logits: Tensor, rows: Sequence[After]) -> Tensor:
    """What stage 01's sampler draws from: logits [N, V] -> probabilities [N, V], after penalties and filters."""
    return filtered(adjust_all(logits, rows), SamplingBatch.of(rows, logits.device)).softmax(-1)


def by_ratio(logits: Tensor, generation: Generation, drafts: Sequence[int], probs: Tensor) -> tuple[SampledToken, ...]:
    """The ratio rule for one request: logits [k + 1, V] of the model, probs [k, V] that the drafts were drawn from."""
    rows = prefixes(generation, drafts, salt=OTHER_DRAWS)
    p = distributions(logits, rows)  # [k + 1, V]
    broken = (~torch.isfinite(p).all(-1)).tolist()
    sound = broken.index(True) if True in broken else len(rows)  # a guess after which all breaks may yet fall
    batch = SamplingBatch.of(rows, logits.device)
    numbers = torch.arange(p.shape[-1] + 1, device=p.device)  # of the tokens, and one for the ratio
    noise = exponential_noise(batch.seed, batch.position, numbers)  # [k + 1, V + 1]
    uniform = (1 - torch.exp(-noise[:, -1])).tolist()
    tokens = ratio_rule(p, probs, drafts[:sound], uniform, noise[:, :-1])
    return tuple(
        SampledToken(token, logprob_of(logits[place], token, generation.params.logprobs))
        if place < sound
        else SampledToken(-1, error=why_none(rows[place]))
        for place, token in enumerate(tokens)
    )


def logprob_of(logits: Tensor, token: int, count: int | None) -> TokenLogprob | None:
    """What the model itself says of a token, if somebody asked: logits [V]."""
    return None if count is None else top_logprobs(token_logprobs(logits), token, count)
