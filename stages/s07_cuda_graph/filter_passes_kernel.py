"""The passes of the filter kernel over a list of logits: one row, or what was gathered of it.

A list is a tuple `entries`: the pointer to its first entry, its length, and the penalties (see `load_logits`).
"""

import triton
import triton.language as tl

from stages.s07_cuda_graph.row_kernel import load_logits

STAGES = tl.constexpr(3)  # tiles under way at once: the next ones are fetched while one is looked at


@triton.jit
def survey(entries, groups_ptr, TILE: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """First pass: the largest and the least finite logit, and the largest of each group of tokens."""
    row_ptr, length, penalties = entries
    ROWS: tl.constexpr = TILE // NEIGHBOURS
    top = tl.full([ROWS], float("-inf"), tl.float32)
    bottom = tl.full([ROWS, NEIGHBOURS], float("inf"), tl.float32)
    for start in tl.range(0, length, TILE, num_stages=STAGES):
        at = start + tl.arange(0, ROWS)[:, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, :]
        x = load_logits(row_ptr, at, at < length, penalties)  # [ROWS, NEIGHBOURS]
        largest = tl.max(x, 1)
        group = start // NEIGHBOURS + tl.arange(0, ROWS)
        tl.store(groups_ptr + group, largest, mask=group < tl.cdiv(length, NEIGHBOURS))
        top = tl.maximum(top, largest)
        bottom = tl.minimum(bottom, tl.where(x > float("-inf"), x, float("inf")))
    return tl.max(top, 0), tl.min(tl.min(bottom, 1), 0)


@triton.jit
def gather(entries, start_at, top, rate, values_ptr, ids_ptr, TILE: tl.constexpr, CANDIDATES: tl.constexpr):
    """Second pass: the logits >= start_at with their token ids, in order; their number, their and everyone's weight."""
    row_ptr, length, penalties = entries
    found = 0
    weight = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, length, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        x = load_logits(row_ptr, at, at < length, penalties)
        hit = x >= start_at
        each = tl.exp(rate * (x - top))
        total += each
        weight += tl.where(hit, each, 0.0)
        here = tl.sum(hit.to(tl.int32), 0)
        if (here > 0) & (found < CANDIDATES):
            place = found + tl.cumsum(hit.to(tl.int32), 0) - 1
            room = hit & (place < CANDIDATES)
            tl.store(values_ptr + place, x, mask=room)
            tl.store(ids_ptr + place, at, mask=room)
        found += here
    return found, tl.sum(weight, 0), tl.sum(total, 0)


@triton.jit
def measure(entries, pivot, top, rate, TILE: tl.constexpr):
    """Of the entries >= pivot: the sum of exp(rate * (x - top)), and the least; and the largest of the others."""
    row_ptr, length, penalties = entries
    weight = tl.zeros([TILE], tl.float32)
    least = tl.full([TILE], float("inf"), tl.float32)
    below = tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, length, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        x = load_logits(row_ptr, at, at < length, penalties)
        above = x >= pivot
        weight += tl.where(above, tl.exp(rate * tl.maximum(x - top, -3e38)), 0.0)  # 0 * -inf would be NaN
        least = tl.minimum(least, tl.where(above, x, float("inf")))
        below = tl.maximum(below, tl.where(above, float("-inf"), x))
    return tl.sum(weight, 0), tl.min(least, 0), tl.max(below, 0)


@triton.jit
def search(entries, low, top, rate, target, TILE: tl.constexpr):
    """The largest entry v with sum(exp(rate * (x - top)) for x >= v) >= target; `low` (finite) if none above it.

    Rate 0 counts entries. Each pass moves a bound to the next entry, so what is left shrinks faster than by halves.
    """
    high = top
    while low < high:
        middle = 0.5 * low + 0.5 * high
        middle = tl.where(middle > low, middle, high)  # nothing lies between them: is it the upper one?
        weight, least, below = measure(entries, middle, top, rate, TILE)
        enough = weight >= target
        low, high = tl.where(enough, least, low), tl.where(enough, high, tl.maximum(below, low))
    return low


@triton.jit
def ties(entries, floor, top, rate, TILE: tl.constexpr):
    """The weight of the entries above the floor, and how many are equal to it."""
    row_ptr, length, penalties = entries
    weight = tl.zeros([TILE], tl.float32)
    equal = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, length, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        x = load_logits(row_ptr, at, at < length, penalties)
        weight += tl.where(x > floor, tl.exp(rate * (x - top)), 0.0)
        equal += (x == floor).to(tl.int32)
    return tl.sum(weight, 0), tl.sum(equal, 0)


@triton.jit
def nth_equal(entries, value, n, TILE: tl.constexpr):
    """Where the n-th entry (from 1) that is equal to the value stands."""
    row_ptr, length, penalties = entries
    place = 0
    seen = 0
    for start in tl.range(0, length, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        equal = (load_logits(row_ptr, at, at < length, penalties) == value).to(tl.int32)
        here = tl.sum(equal, 0)
        if (seen < n) & (n <= seen + here):
            place = tl.max(tl.where((equal > 0) & (seen + tl.cumsum(equal, 0) == n), at, 0), 0)
        seen += here
    return place
