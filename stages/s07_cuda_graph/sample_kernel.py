"""Sampling for a whole batch in Triton: filter, weigh, race; the logits of a row without filters are read once.

Stage 01's two races: a group of tokens wins by its weight, then a token of it. `weigh` reads all logits and notes two
numbers for each group, `race` draws noise for these and for the tokens of one group. How the vocabulary is divided
among programs is the same for every batch, so a row's token does not depend on the batch it is in.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s01_forward.race import GROUP, GROUP_NUMBERS
from stages.s03_paged_kv.store_kv import launch_options
from stages.s03_paged_kv.tile_sizes import next_power_of_2
from stages.s07_cuda_graph.filter_kernel import filter_rows
from stages.s07_cuda_graph.row_kernel import (
    LN2,
    LOG2_E,
    SIZES,
    Sizes,
    cut,
    exp2,
    load_penalties,
    log2,
    log_noise,
    noise_keys,
    penalise,
)
from stages.s07_cuda_graph.sampling_columns import MOST_SEEN, SamplingColumns, check_rows

PARTS = 4  # of a group, read one after the other: then 8 threads hold a group, and sum it in 3 exchanges instead of 5


@triton.jit
def _weigh_kernel(
    largest_ptr, weight_ptr, floor_ptr, limit_ptr, logits_ptr, slot_ptr, temperature_ptr, repetition_ptr, presence_ptr,
    frequency_ptr, history_ptr, V, stride_row, stride_history, num_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: GROUPS groups of one row. Of each its largest logit, and its weight relative to that.

    The weight is 0 if no token stays, and NaN if one is NaN or inf.
    """
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    SIZE: tl.constexpr = GROUP // PARTS
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    first = group[:, None] * GROUP + tl.arange(0, SIZE)[None, :]  # [GROUPS, SIZE], tokens of the first part
    row_ptr = logits_ptr + row * stride_row
    read = ()
    for n in tl.static_range(PARTS):  # all are under way before anything waits for one
        token = first + n * SIZE
        read += (tl.load(row_ptr + token, mask=token < V, other=float("-inf")),)  # type: ignore[assignment]
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    floor, limit = tl.load(floor_ptr + row), tl.load(limit_ptr + row)
    penalties = load_penalties(slot, repetition_ptr, presence_ptr, frequency_ptr, history_ptr, stride_history)
    logits = ()
    largest = tl.full([GROUPS, SIZE], float("-inf"), tl.float32)
    for n in tl.static_range(PARTS):
        token = first + n * SIZE
        x = cut(penalise(read[n], token, token < V, penalties), token, floor, limit)
        logits += (x,)  # type: ignore[assignment]
        largest = tl.maximum(largest, x)
    largest = tl.max(largest, 1)  # [GROUPS]
    # Subtracting the largest logit first keeps every weight finite, and the largest at 1.
    base = tl.where(largest == float("-inf"), 0.0, largest)[:, None]
    rate = LOG2_E / tl.where(temperature > 0, temperature, 1.0)
    weight = tl.zeros([GROUPS, SIZE], tl.float32)
    for n in tl.static_range(PARTS):
        weight += exp2((logits[n] - base) * rate, ASM)
    out = row * num_groups + group
    tl.store(largest_ptr + out, largest, mask=group < num_groups)
    tl.store(weight_ptr + out, tl.sum(weight, 1), mask=group < num_groups)


@triton.jit
def _race_kernel(
    token_ptr, largest_ptr, weight_ptr, floor_ptr, limit_ptr, logits_ptr, slot_ptr, position_ptr, temperature_ptr,
    repetition_ptr, presence_ptr, frequency_ptr, seed_low_ptr, seed_high_ptr, history_ptr, V, stride_row,
    stride_history, num_groups, GROUP: tl.constexpr, GROUPS_PAD: tl.constexpr, GROUP_NUMBERS: tl.constexpr,
    MOST_SEEN: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row. First a group, then a token of it; the first of equals."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    floor, limit = tl.load(floor_ptr + row), tl.load(limit_ptr + row)
    penalties = load_penalties(slot, repetition_ptr, presence_ptr, frequency_ptr, history_ptr, stride_history)
    seeds = tl.load(seed_low_ptr + slot), tl.load(seed_high_ptr + slot)
    key, other = noise_keys(seeds[0], seeds[1], tl.load(position_ptr + row))
    rate = 1.0 / tl.where(temperature > 0, temperature, 1.0)

    group = tl.arange(0, GROUPS_PAD)
    at = row * num_groups + group
    largest = tl.load(largest_ptr + at, mask=group < num_groups, other=float("-inf"))
    weight = tl.load(weight_ptr + at, mask=group < num_groups, other=0.0)
    top = tl.max(largest, 0)
    score = (largest - top) * rate
    if temperature > 0:
        number = group.to(tl.uint32) + GROUP_NUMBERS
        score += LN2 * log2(weight, ASM) - log_noise(number, key, other, ASM)
    best = tl.minimum(tl.argmax(score, 0), num_groups - 1)  # beyond only if all is broken

    token = best * GROUP + tl.arange(0, GROUP)
    logits = tl.load(logits_ptr + row * stride_row + token, mask=token < V, other=float("-inf"))
    score = (cut(penalise(logits, token, token < V, penalties), token, floor, limit) - top) * rate
    if temperature > 0:
        score -= log_noise(token, key, other, ASM)
    winner = best * GROUP + tl.argmax(score, 0)

    broken = (tl.max((weight != weight).to(tl.int32), 0) > 0) | (top == float("-inf"))
    winner = tl.where(broken, -1, winner)
    tl.store(token_ptr + row, winner)
    _, _, _, penalised, seen_ptr = penalties
    if penalised & (slot > 0) & (winner >= 0):
        seen = tl.load(seen_ptr + winner)
        tl.store(seen_ptr + winner, tl.where(seen <= MOST_SEEN - 2, seen + 2, seen).to(tl.int16))


def sample_rows(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, columns: SamplingColumns, sizes: Sizes = SIZES
) -> torch.Tensor:
    """See `sample_torch.sample_rows`: the same arguments, effects and errors."""
    check_rows(logits, slots, positions, columns)
    N, V = logits.shape
    tokens = torch.empty(N, dtype=torch.int32, device=logits.device)
    if N == 0:
        return tokens
    options = launch_options(logits.device)
    floors, limits = filter_rows(logits, slots, columns, sizes)
    groups, asm = triton.cdiv(V, GROUP), logits.is_cuda and torch.version.hip is None
    largest, weights = torch.empty((2, N, groups), dtype=torch.float32, device=logits.device)
    _weigh_kernel[(triton.cdiv(V, sizes.chunk), N)](
        largest, weights, floors, limits, logits, slots, columns.temperature, columns.repetition, columns.presence,
        columns.frequency, columns.history, V, logits.stride(0), columns.history.stride(0), groups, GROUP=GROUP,
        GROUPS=sizes.chunk // GROUP, PARTS=PARTS, ASM=asm, num_warps=4, **options,
    )  # fmt: skip
    _race_kernel[(N,)](
        tokens, largest, weights, floors, limits, logits, slots, positions, columns.temperature, columns.repetition,
        columns.presence, columns.frequency, columns.seed_low, columns.seed_high, columns.history, V, logits.stride(0),
        columns.history.stride(0), groups, GROUP=GROUP, GROUPS_PAD=next_power_of_2(groups),
        GROUP_NUMBERS=GROUP_NUMBERS, MOST_SEEN=MOST_SEEN, ASM=asm, num_warps=4, **options,
    )  # fmt: skip
    return tokens
