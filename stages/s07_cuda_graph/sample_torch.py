"""Sampling for a whole batch in plain torch: for CPUs, and what the kernels are held against.

The order of effects and the arithmetic are those of stage 01's sampler. Nothing here looks at a value from the host or
lets a shape depend on data, so it can be captured in a CUDA graph. On a CPU, where looking costs nothing, work that no
row needs is skipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.s01_forward.noise import MASK
from stages.s01_forward.race import race
from stages.s01_forward.sampler import keep_min_p
from stages.s07_cuda_graph.sampling_columns import MOST_SEEN, SamplingColumns, check_rows


def sample_rows(logits: Tensor, slots: Tensor, positions: Tensor, columns: SamplingColumns) -> Tensor:
    """One token id per row, int32 [N], from logits [N, V] in fp32, bf16 or fp16; -1 where no choice is possible.

    Row i is chosen by the wishes of slots[i] int32 [N]; positions[i] int32 or int64 [N] is where in its sequence the
    new token will stand. -1: the largest logit after penalties is NaN or infinite (all tokens are -inf, say).
    Counts the token in `columns.history`; the logits stay as they are. Raises ValueError for shapes that do not fit.
    """
    check_rows(logits, slots, positions, columns)
    slots = slots.long()
    penalised = (
        (columns.repetition[slots] != 1) | (columns.presence[slots] != 0) | (columns.frequency[slots] != 0)
    )  # [N]
    logits = logits.float()  # [N, V]
    if needed(penalised.any()):
        logits = penalise(logits, slots, columns)
    largest = logits.amax(-1, keepdim=True)  # [N, 1]; NaN if any is
    temperature = columns.temperature[slots]
    random = temperature > 0
    token_ids = logits.argmax(-1)  # [N]
    if needed(random.any()):
        # Subtracting the largest logit first keeps the quotient finite for every temperature.
        scaled = (logits - largest) / torch.where(random, temperature, 1.0)[:, None]
        drawn = race(keep(scaled, slots, columns), seeds(slots, columns), positions.long())
        token_ids = torch.where(random, drawn, token_ids)
    token_ids = torch.where(torch.isfinite(largest[:, 0]), token_ids, -1)
    if needed(penalised.any()):
        count(token_ids, slots, penalised, columns.history)
    return token_ids.int()


def needed(flag: Tensor) -> bool:
    """Must work be done that only some rows ask for? On a device: always, for the host must not wait for the answer."""
    return flag.device.type != "cpu" or bool(flag)


def penalise(logits: Tensor, slots: Tensor, columns: SamplingColumns) -> Tensor:
    """Repetition, presence and frequency penalties; fp32 [N, V] -> a new [N, V]. Values that are off change nothing."""
    repetition, presence, frequency = (
        column[slots][:, None] for column in (columns.repetition, columns.presence, columns.frequency)
    )
    history = columns.history[slots]  # [N, V]
    times = (history >> 1).float()  # in the output
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(history > 0, repeated, logits)
    return torch.where(times > 0, logits - (presence + frequency * times), logits)


def keep(scaled: Tensor, slots: Tensor, columns: SamplingColumns) -> Tensor:
    """-inf outside top-k, then top-p of what is left, then min-p; scaled logits [N, V] -> [N, V].

    As stage 01's `keep_top_k`, `keep_top_p` and `keep_min_p` for each row by the columns of its slot, but with one sort
    for both and all rows. A top-k of 0, or of V and more, and a top-p of 1 drop nothing.
    """
    k, p, min_p = columns.top_k[slots], columns.top_p[slots], columns.min_p[slots]
    if needed(((k > 0) | (p < 1)).any()):
        V = scaled.shape[1]
        ordered, order = scaled.sort(stable=True, dim=-1, descending=True)  # equals in the order of their ids
        k = torch.where((k > 0) & (k < V), k, V).long()[:, None]
        drop = ordered < ordered.gather(-1, k - 1)  # equals of the k-th stay
        probs = ordered.masked_fill(drop, float("-inf")).softmax(-1)
        before = probs.cumsum(-1) - probs  # the token that crosses p stays
        beyond = (before >= p[:, None]) & (p[:, None] < 1)
        beyond[:, 0] = False
        scaled = scaled.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop | beyond), float("-inf"))
    return keep_min_p(scaled, min_p) if needed((min_p > 0).any()) else scaled


def seeds(slots: Tensor, columns: SamplingColumns) -> Tensor:
    """The 64-bit seed of each row, int64 [N]."""
    return (columns.seed_high[slots].long() << 32) | (columns.seed_low[slots].long() & MASK)


def count(token_ids: Tensor, slots: Tensor, penalised: Tensor, history: Tensor) -> None:
    """Add 2 at (slot, token) of `history` int16 [S, V]. Padding rows meet in slot 0, which they leave as it is."""
    place = (slots, token_ids.clamp(min=0))
    before = history[place]  # [N]
    counted = penalised & (slots > 0) & (token_ids >= 0) & (before <= MOST_SEEN - 2)
    history[place] = torch.where(counted, before + 2, before)
