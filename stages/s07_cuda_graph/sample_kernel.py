"""Sampling for a whole batch in Triton: filter, race, finish; the logits of a row without filters are read once.

The race is that of stage 01: the token with the largest scaled logit - log(e) wins, e drawn from Exp(1) by a hash of
(seed, position, token id), which picks each token with its probability. It is run by chunks of the vocabulary, and the
chunks' winners meet in the end. Chunks have one size, so a row's token does not depend on the batch it is in.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.store_kv import launch_options
from stages.s03_paged_kv.tile_sizes import next_power_of_2
from stages.s07_cuda_graph.filter_kernel import filter_rows
from stages.s07_cuda_graph.row_kernel import SIZES, Sizes, load_logits, load_penalties, log_noise, noise_keys
from stages.s07_cuda_graph.sampling_columns import MOST_SEEN, SamplingColumns, check_rows


@triton.jit
def _race_kernel(
    largest_ptr, score_ptr, winner_ptr, floor_ptr, limit_ptr, logits_ptr, slot_ptr, position_ptr, temperature_ptr,
    repetition_ptr, presence_ptr, frequency_ptr, seed_low_ptr, seed_high_ptr, history_ptr, V, stride_row,
    stride_history, num_chunks, CHUNK: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one row. Its largest logit, and its winner's score relative to that."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    penalties = load_penalties(slot, repetition_ptr, presence_ptr, frequency_ptr, history_ptr, stride_history)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + row * stride_row, token, token < V, penalties)
    largest = tl.max(logits, 0)
    # Subtracting the largest logit first keeps the noise audible at every temperature.
    score = logits - tl.where(largest == float("-inf"), 0.0, largest)
    if temperature > 0:
        floor, limit = tl.load(floor_ptr + row), tl.load(limit_ptr + row)
        seeds = tl.load(seed_low_ptr + slot), tl.load(seed_high_ptr + slot)
        key, other = noise_keys(seeds[0], seeds[1], tl.load(position_ptr + row))
        score = score * (1.0 / temperature) - log_noise(token, key, other, ASM)
        if floor > float("-inf"):
            score = tl.where((logits > floor) | ((logits == floor) & (token < limit)), score, float("-inf"))
    best, winner = tl.max(score, 0, return_indices=True)  # the first of equals
    out = row * num_chunks + chunk
    tl.store(largest_ptr + out, largest)
    tl.store(score_ptr + out, best)
    tl.store(winner_ptr + out, chunk * CHUNK + winner)


@triton.jit
def _finish_kernel(
    token_ptr, largest_ptr, score_ptr, winner_ptr, slot_ptr, temperature_ptr, repetition_ptr, presence_ptr,
    frequency_ptr, history_ptr, stride_history, num_chunks, CHUNKS_PAD: tl.constexpr, MOST_SEEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: the chunks of one row. Scores are brought to one reference, the row's largest logit."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    repetition, presence, frequency, penalised, history_ptr = load_penalties(
        slot, repetition_ptr, presence_ptr, frequency_ptr, history_ptr, stride_history
    )
    chunk = tl.arange(0, CHUNKS_PAD)
    exists = chunk < num_chunks
    largest = tl.load(largest_ptr + row * num_chunks + chunk, mask=exists, other=float("-inf"))
    score = tl.load(score_ptr + row * num_chunks + chunk, mask=exists, other=float("-inf"))
    top = tl.max(largest, 0)
    rate = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    best = tl.argmax(score + (largest - top) * rate, 0)  # the first of equals
    token = tl.load(winner_ptr + row * num_chunks + tl.minimum(best, num_chunks - 1))  # beyond only if all is broken
    token = tl.where((top == float("inf")) | (top == float("-inf")), -1, token)
    tl.store(token_ptr + row, token)
    if penalised & (slot > 0) & (token >= 0):
        seen = tl.load(history_ptr + token)
        tl.store(history_ptr + token, tl.where(seen <= MOST_SEEN - 2, seen + 2, seen).to(tl.int16))


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
    chunks, asm = triton.cdiv(V, sizes.chunk), logits.is_cuda and torch.version.hip is None
    largest, scores = torch.empty((2, N, chunks), dtype=torch.float32, device=logits.device)
    winners = torch.empty((N, chunks), dtype=torch.int32, device=logits.device)
    _race_kernel[(chunks, N)](
        largest, scores, winners, floors, limits, logits, slots, positions, columns.temperature, columns.repetition,
        columns.presence, columns.frequency, columns.seed_low, columns.seed_high, columns.history, V, logits.stride(0),
        columns.history.stride(0), chunks, CHUNK=sizes.chunk, ASM=asm, num_warps=4, **options,
    )  # fmt: skip
    _finish_kernel[(N,)](
        tokens, largest, scores, winners, slots, columns.temperature, columns.repetition, columns.presence,
        columns.frequency, columns.history, columns.history.stride(0), chunks, CHUNKS_PAD=next_power_of_2(chunks),
        MOST_SEEN=MOST_SEEN, num_warps=1, **options,
    )  # fmt: skip
    return tokens
