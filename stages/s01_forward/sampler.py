"""Read later: from logits to tokens, for a batch of rows that know nothing of each other.

The sampler has no state. Randomness is a function of (seed, position, token id or group), so a row draws the same
token whatever its neighbours, however the batch was cut, and again after it was stopped and replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stages.s01_forward.constraint import Constraint
from stages.s01_forward.outputs import NOT_FINITE, SampledToken, TokenLogprob
from stages.s01_forward.race import race
from stages.s01_forward.sampling_params import GREEDY_BELOW, SamplingParams


class SampleRow(Protocol):
    """What the sampler needs to know of a sequence."""

    params: SamplingParams
    prompt_token_ids: list[int]
    token_ids: list[int]  # the output so far
    seed: int
    banned_token_ids: list[int]  # not before `min_tokens`
    constraint: Constraint | None  # what else forbids tokens


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token per row: logits [N, V] in any float dtype, row i belongs to rows[i].

    A row whose largest logit is NaN or infinite, or all of whose tokens are forbidden, gets an error of its own; the
    other rows are not touched by it.
    """
    logits = logits.float()  # [N, V]
    broken = ~torch.isfinite(logits.amax(-1))  # [N]
    logprobs = {i: token_logprobs(logits[i]) for i, row in enumerate(rows) if row.params.logprobs is not None}
    adjusted = [row.params.adjusts_logits or row.constraint is not None for row in rows]
    if any(adjusted):
        logits = torch.stack([adjust(logits[i], row) if adjusted[i] else logits[i] for i, row in enumerate(rows)])
        broken |= ~torch.isfinite(logits.amax(-1))  # every token is forbidden
    token_ids = choose(logits, SamplingBatch.of(rows, logits.device)).where(~broken, -1).tolist()

    sampled = []
    for i, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
        if token_id < 0:
            sampled.append(SampledToken(-1, error=why_none(row)))
        elif i in logprobs:
            sampled.append(SampledToken(token_id, top_logprobs(logprobs[i], token_id, row.params.logprobs or 0)))
        else:
            sampled.append(SampledToken(token_id))
    return sampled


def adjust(logits: Tensor, row: SampleRow) -> Tensor:
    """Bias, what is forbidden, and penalties of one row: logits [V] -> a new [V]."""
    params, logits = row.params, logits.clone()
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    forbid(logits, row)
    if params.repetition_penalty != 1.0:  # Keskar et al. 2019: once per distinct token of prompt and output
        seen = torch.tensor(sorted({*row.prompt_token_ids, *row.token_ids}), device=logits.device)
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.token_ids:
        counts = Counter(row.token_ids)
        seen = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * times
    return logits


def forbid(logits: Tensor, row: SampleRow) -> None:
    """-inf, in place, in logits [V] for what a row's constraint does not allow, and for a stop before `min_tokens`.

    Where the constraint allows nothing but a stop, a stop it is: any other token would break what was promised.
    """
    if row.constraint is not None:
        logits.masked_fill_(~row.constraint.allowed().to(logits.device), float("-inf"))
    if len(row.token_ids) < row.params.min_tokens:
        stops = logits[row.banned_token_ids]
        logits[row.banned_token_ids] = float("-inf")
        if row.constraint is not None and bool(logits.isneginf().all()):
            logits[row.banned_token_ids] = stops


def why_none(row: SampleRow) -> str:
    """Why no token could be chosen for a row."""
    return NOT_FINITE if row.constraint is None else row.constraint.error or NOT_FINITE


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of N rows as tensors [N]."""

    temperature: Tensor  # fp32; 0 marks a greedy row
    top_k: Tensor  # int64, V or more: no limit
    top_p: Tensor  # fp32
    min_p: Tensor  # fp32
    seed: Tensor  # int64
    position: Tensor  # int64: where in its sequence the new token will stand

    @classmethod
    def of(cls, rows: Sequence[SampleRow], device: torch.device) -> SamplingBatch:
        """Gather the rows' parameters."""

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        params = [row.params for row in rows]
        return cls(
            column([0.0 if p.greedy else p.temperature for p in params], torch.float32),
            column([min(p.top_k or 2**31, 2**31) for p in params], torch.int64),
            column([p.top_p for p in params], torch.float32),
            column([p.min_p for p in params], torch.float32),
            column([row.seed for row in rows], torch.int64),
            column([len(row.prompt_token_ids) + len(row.token_ids) for row in rows], torch.int64),
        )


def choose(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """fp32 logits [N, V] -> token ids [N]: the largest logit, or a draw from the filtered distribution."""
    greedy = logits.argmax(-1)  # [N]
    random = batch.temperature > 0
    if not bool(random.any()):
        return greedy
    return torch.where(random, race(filtered(logits, batch), batch.seed, batch.position), greedy)


def filtered(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """What rows are drawn from: logits [N, V] over the temperature, -inf outside top-k, top-p and min-p."""
    # Subtracting the largest logit first keeps the quotient finite for every temperature.
    scaled = (logits - logits.amax(-1, keepdim=True)) / batch.temperature[:, None].clamp(min=GREEDY_BELOW)  # [N, V]
    return keep_min_p(keep_top_p(keep_top_k(scaled, batch.top_k), batch.top_p), batch.min_p)


def keep_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """-inf for all but the k[i] largest logits of row i [N, V]; equals of the k-th stay."""
    V = logits.shape[-1]
    k = k.clamp(max=V)
    if bool((k == V).all()):
        return logits
    kth = logits.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)  # [N, 1]
    return logits.masked_fill(logits < kth, float("-inf"))


def keep_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """-inf outside the nucleus (Holtzman et al. 2019): the smallest set of likeliest tokens that reaches p[i].

    A token stays if those before it do not reach p yet, so the token that crosses p stays and the set is never empty.
    """
    if bool((p >= 1).all()):
        return logits
    ordered, order = logits.sort(stable=True, dim=-1, descending=True)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # [N, V]
    drop = (before >= p[:, None]) & (p[:, None] < 1)
    drop[:, 0] = False
    return logits.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), float("-inf"))


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """-inf for tokens less likely than min_p[i] times the likeliest (Nguyen et al. 2024)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p[:, None].log(), float("-inf"))


def token_logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities [..., V] in fp32."""
    return logits.float().log_softmax(-1)


def top_logprobs(logprobs: Tensor, token_id: int, count: int) -> TokenLogprob:
    """The chosen token's log-probability and rank, and the `count` likeliest tokens, of logprobs [V]."""
    values, ids = logprobs.topk(min(count, logprobs.numel()))
    chosen = logprobs[token_id]
    return TokenLogprob(
        token_id=token_id,
        logprob=chosen.item(),
        rank=int((logprobs > chosen).sum()) + 1,
        top=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
    )


def prompt_logprobs(
    logits: Tensor, prompt_token_ids: Sequence[int], params: SamplingParams
) -> list[TokenLogprob | None]:
    """One entry per prompt token, from logits [T, V] of all positions: row i - 1 scores token i; entry 0 is None."""
    logprobs = token_logprobs(logits)  # [T, V]
    entries = [
        top_logprobs(logprobs[i], token_id, params.prompt_logprobs or 0)
        for i, token_id in enumerate(prompt_token_ids[1:])
    ]
    return [None, *entries]
