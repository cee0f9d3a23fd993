"""Rows for the checks of the samplers: requests as stage 01 sees them, and the same as columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from stages.s01_forward.constraint import Constraint
from stages.s01_forward.sampling_params import SamplingParams
from stages.s07_cuda_graph.sampling_columns import SamplingColumns


@dataclass
class Row:
    """What stage 01's sampler needs to know of a request."""

    params: SamplingParams
    prompt_token_ids: list[int] = field(default_factory=lambda: [0])
    token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    banned_token_ids: list[int] = field(default_factory=list)
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Case:
    """The arguments of `sample_rows`; `rows` are the requests, rows[i] in slot slots[i]."""

    rows: list[Row]
    logits: Tensor  # [N, V]
    slots: Tensor  # int32 [N]
    positions: Tensor  # int64 [N]
    columns: SamplingColumns

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, SamplingColumns]:
        return self.logits, self.slots, self.positions, self.columns


def make_case(count: int, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Case:
    """Rows of every kind, in slots of their own; the same for the same arguments, apart from the device."""
    rng = Random(f"{count} {vocab_size} {seed}")
    rows = [random_row(rng, vocab_size) for _ in range(count)]
    logits = torch.stack([random_logits(rng, vocab_size) for _ in rows]).to(dtype).to(device)
    slots = torch.tensor(rng.sample(range(1, count + 1), count), dtype=torch.int32, device=device)
    positions = torch.tensor([len(row.prompt_token_ids) + len(row.token_ids) for row in rows], device=device)
    return Case(rows, logits, slots, positions, make_columns(rows, slots, vocab_size))


def random_row(rng: Random, vocab_size: int) -> Row:
    """About half of the values are off."""
    params = SamplingParams(
        temperature=rng.choice([0.0, 1e-5, 1e-3, 0.3, 0.7, 1.0, 1.0, 1.7, 50.0, 1e6]),
        top_k=rng.choice([0, 0, 0, 1, 2, 5, 20, vocab_size - 1, vocab_size, vocab_size + 1, 2**40]),
        top_p=rng.choice([1.0, 1.0, 1.0, 0.999, 0.95, 0.8, 0.5, 0.1, 1e-30]),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.01, 0.1, 0.5, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 1.5, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.7, -0.3]),
    )
    prompt = rng.choices(range(vocab_size), k=rng.randint(1, 20))
    output = rng.choices(range(max(1, vocab_size // 3)), k=rng.choice([0, 1, 10, 40]))
    return Row(params, prompt, output, rng.randrange(-(2**63), 2**63))


def random_logits(rng: Random, vocab_size: int) -> Tensor:
    """fp32 [V]: spread, with ties, flat, with banned tokens, with few that are not, extreme; some spoil their row."""
    normal = torch.randn(vocab_size, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    kind = rng.choice(["spread", "spread", "spread", "ties", "ties", "flat", "banned", "few", "huge", "tiny", "broken"])
    if kind == "ties":
        return (2 * normal).round() / 2
    if kind == "flat":
        return torch.full_like(normal, rng.choice([0.0, -7.5, 30.0]))
    if kind == "banned":
        return normal.where(normal > 0.3, rng.choice([-torch.inf, -3e38])).index_fill(0, torch.tensor(0), 1.0)
    if kind == "few":  # so that groups of tokens have one, or none
        few = torch.tensor([0, *rng.choices(range(vocab_size), k=1 + vocab_size // 400)])
        return torch.full_like(normal, -torch.inf).index_copy(0, few, normal[few])
    if kind == "huge":
        return normal * 1e38
    if kind == "tiny":
        return normal * 1e-6
    if kind == "broken":
        value = rng.choice([torch.nan, torch.inf, -torch.inf])
        place = torch.arange(vocab_size) if value == -torch.inf else torch.tensor([rng.randrange(vocab_size)])
        return normal.index_fill(0, place, value)
    return 3 * normal


def make_columns(rows: list[Row], slots: Tensor, vocab_size: int) -> SamplingColumns:
    """rows[i] in slot slots[i], on the device of the slots; slot 0 asks for all there is, and nobody may see it."""
    S = int(slots.max()) + 1 if len(rows) else 1
    of_slot: dict[int, Row] = dict(zip(slots.tolist(), rows, strict=True))
    padding = Row(SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1.0))
    ordered = [of_slot.get(slot, padding) for slot in range(S)]
    params = [row.params for row in ordered]

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=slots.device)

    seeds = torch.tensor([row.seed for row in ordered]).view(torch.int32).view(-1, 2).to(slots.device)
    history = torch.zeros(S, vocab_size, dtype=torch.int16)
    for slot, row in enumerate(ordered):
        history[slot, row.prompt_token_ids] = 1
        for token_id in row.token_ids:
            history[slot, token_id] += 2
    return SamplingColumns(
        temperature=column([0.0 if p.greedy else p.temperature for p in params]),
        top_k=column([min(p.top_k, 2**31 - 1) for p in params], torch.int32),
        top_p=column([p.top_p for p in params]),
        min_p=column([p.min_p for p in params]),
        repetition=column([p.repetition_penalty for p in params]),
        presence=column([p.presence_penalty for p in params]),
        frequency=column([p.frequency_penalty for p in params]),
        seed_low=seeds[:, 0].contiguous(),
        seed_high=seeds[:, 1].contiguous(),
        history=history.to(slots.device),
    )


def draws_case(logits: Tensor, count: int, params: SamplingParams, seed: int = 1) -> Case:
    """`count` positions of one request, whose logits [V] are always the same; in slot 1, on the logits' device."""
    row = Row(params, seed=seed)
    slots = torch.ones(count, dtype=torch.int32, device=logits.device)
    columns = make_columns([row], slots[:1], len(logits))
    return Case([row], logits.expand(count, -1).contiguous(), slots, torch.arange(count, device=logits.device), columns)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """What temperature, top-k, top-p and min-p leave of logits [V] without ties: float64 [V], by their definitions."""
    probs = (logits.double() / params.temperature).softmax(-1)
    if params.top_k:
        probs[probs < probs.sort(descending=True).values[min(params.top_k, len(probs)) - 1]] = 0
        probs /= probs.sum()
    if params.top_p < 1:
        heavier = torch.stack([probs[probs > p].sum() for p in probs])  # [V]
        probs[heavier >= params.top_p] = 0
        probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    return probs / probs.sum()


def chi_square(token_ids: Tensor, probs: Tensor) -> float:
    """In units of its own spread: about N(0, 1) when the tokens follow the probabilities; inf for an impossible token.

    Tokens that are expected less than five times are one class.
    """
    counts, expected = token_ids.long().bincount(minlength=len(probs)).double().cpu(), probs.cpu() * len(token_ids)
    if bool((counts[expected == 0] > 0).any()):
        return torch.inf
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5)
