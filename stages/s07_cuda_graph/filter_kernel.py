"""Top-k, top-p and min-p in Triton, without sorting: where to cut each row.

A row is cut at a logit, the *floor*, and among the tokens whose logit equals the floor at a token id: a token stays if
its logit is above the floor, or equal to it and its id below the limit. That is what a stable sort would keep, ties
included: top-k keeps all equals of the k-th, top-p the first ids among equals.

The floor is found by bisection over the logits. A pass over the whole row costs much, so two passes gather the few
hundred largest logits first, and the bisection runs over these, unless they turn out too many or too light.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.store_kv import launch_options
from stages.s03_paged_kv.tile_sizes import next_power_of_2
from stages.s07_cuda_graph.filter_passes_kernel import gather, measure, nth_equal, search, survey, ties
from stages.s07_cuda_graph.row_kernel import SIZES, Sizes, load_penalties
from stages.s07_cuda_graph.sampling_columns import SamplingColumns

NEIGHBOURS = 128  # logits of which the first pass notes the largest


@triton.jit
def _cut(entries, bottom, top, rate, top_k, top_p, total, TILE: tl.constexpr):
    """Top-k, then top-p, over entries not below `bottom`: the floor, and the last place that stays among its equals.

    total: the weight of all logits. The place is -1 if all equals stay.
    """
    floor = bottom
    place = -1
    if top_k > 0:
        floor = search(entries, floor, top, 0.0, top_k.to(tl.float32), TILE)
    if top_p < 1.0:
        if top_k > 0:
            total, _, _ = measure(entries, floor, top, rate, TILE)
        floor = search(entries, floor, top, rate, top_p * total, TILE)
        above, equal = ties(entries, floor, top, rate, TILE)
        # The j-th of the equals, from 0, stays if above + j * each < top_p * total; one always does.
        each = tl.exp(rate * (floor - top))
        most = tl.maximum(tl.ceil((top_p * total - above) / each), 1.0)
        if most < equal:
            place = nth_equal(entries, floor, most.to(tl.int32), TILE)
    return floor, place


@triton.jit
def _filter_kernel(
    floor_ptr, limit_ptr, groups_ptr, values_ptr, ids_ptr, logits_ptr, slot_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, repetition_ptr, presence_ptr, frequency_ptr, history_ptr, V, stride_row, stride_history, NUM_GROUPS,
    TILE: tl.constexpr, NEIGHBOURS: tl.constexpr, GROUPS_PAD: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    top_k = tl.where(top_k < V, top_k, 0)
    tl.store(floor_ptr + row, float("-inf"))
    tl.store(limit_ptr + row, V)
    if (temperature <= 0) | ((top_k <= 0) & (top_p >= 1.0) & (min_p <= 0)):
        return
    penalties = load_penalties(slot, repetition_ptr, presence_ptr, frequency_ptr, history_ptr, stride_history)
    entries = (logits_ptr + row * stride_row, V, penalties)
    groups_ptr += row * NUM_GROUPS
    top, bottom = survey(entries, groups_ptr, TILE, NEIGHBOURS)
    if (top == float("inf")) | (top == float("-inf")):  # no choice is possible, whatever stays
        return
    rate = 1.0 / temperature
    floor, limit = bottom, V
    if (top_k > 0) | (top_p < 1.0):
        tl.debug_barrier()  # the groups' largest logits are written by now
        nothing = (1.0, 0.0, 0.0, False, history_ptr)  # penalties
        # At least n logits are as large as the n-th largest of the groups' largest. Half the groups for top-p: the
        # large logits of independent groups number two or three times that.
        start_at = bottom
        wanted = tl.where(top_k > 0, top_k, NUM_GROUPS // 2)
        if (V > CANDIDATES) & (wanted <= NUM_GROUPS):
            maxima = (groups_ptr, NUM_GROUPS, nothing)
            start_at = search(maxima, bottom, top, 0.0, wanted.to(tl.float32), GROUPS_PAD)
        values_ptr += row * CANDIDATES
        ids_ptr += row * CANDIDATES
        found, weight, total = gather(entries, start_at, top, rate, values_ptr, ids_ptr, TILE, CANDIDATES)
        if (found <= CANDIDATES) & ((top_k > 0) | (weight >= top_p * total)):
            tl.debug_barrier()  # the candidates are written by now
            gathered = (values_ptr, found, nothing)
            floor, place = _cut(gathered, start_at, top, rate, top_k, top_p, total, CANDIDATES)
            if place >= 0:
                limit = tl.load(ids_ptr + place) + 1
        else:
            floor, place = _cut(entries, bottom, top, rate, top_k, top_p, total, TILE)
            if place >= 0:
                limit = place + 1
    if min_p > 0:
        least = top + temperature * tl.log(min_p)
        if least > floor:
            floor, limit = least, V
    tl.store(floor_ptr + row, floor)
    tl.store(limit_ptr + row, limit)


def filter_rows(
    logits: torch.Tensor, slots: torch.Tensor, columns: SamplingColumns, sizes: Sizes = SIZES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where to cut each row of logits [N, V]: floors fp32 [N] and limits int32 [N] (token ids, among equals).

    Rows without top-k, top-p and min-p, greedy and broken rows get (-inf, V).
    """
    N, V = logits.shape
    groups = triton.cdiv(V, NEIGHBOURS)

    def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    floors, limits = scratch(torch.float32, N), scratch(torch.int32, N)
    _filter_kernel[(N,)](
        floors, limits, scratch(torch.float32, N, groups), scratch(torch.float32, N, sizes.candidates),
        scratch(torch.int32, N, sizes.candidates), logits, slots, columns.temperature, columns.top_k, columns.top_p,
        columns.min_p, columns.repetition, columns.presence, columns.frequency, columns.history, V, logits.stride(0),
        columns.history.stride(0), groups, TILE=sizes.tile, NEIGHBOURS=NEIGHBOURS, GROUPS_PAD=next_power_of_2(groups),
        CANDIDATES=sizes.candidates, num_warps=16, maxnreg=64, **launch_options(logits.device),
    )  # fmt: skip
    return floors, limits
