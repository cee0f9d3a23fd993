"""The inputs of one step at fixed addresses: what the host sends, and what the device makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stages.s04_continuous_batching.plan import Plan
from stages.s07_cuda_graph.device_state import DUMMY_SLOT, DeviceState
from stages.s07_cuda_graph.steady import GroupPlan

ON_DEVICE = -1  # in place of a token id: the newest token of the row, which only the device may know yet
NO_ROW = -1  # an empty tile of the attention kernel


@dataclass(frozen=True)
class StepSize:
    """Tokens and rows of a step, padded ones included.

    queries: no row has more tokens, and all of them sample: 1 in a decode step, more where guesses are verified (stage
    08). 0: rows have any number of tokens, and sample after their last. long_tiles: then, room for the attention tiles
    of rows with several tokens, each of `queries_per_tile`; 0 where the attention plan is made anew for every step.
    chunks: a kernel for chunks takes them; only_chunks: there are no other rows. common: in a decode step,
    `common_kernel` takes what all rows begin with.
    """

    tokens: int
    rows: int
    queries: int = 0
    long_tiles: int = 0
    queries_per_tile: int = 1
    chunks: bool = False
    only_chunks: bool = False
    common: bool = False

    @property
    def decode(self) -> bool:
        """Is each row one token?"""
        return self.queries == 1

    @property
    def samples(self) -> int:
        """Tokens that come out."""
        return self.tokens if self.queries else self.rows


class StepInputs:
    """Memory for one size of step. The host sends `packed` in one piece; `fill` derives all the rest on the device."""

    def __init__(self, size: StepSize, blocks_per_row: int, device: torch.device) -> None:
        self.size, T, R = size, size.tokens, size.rows
        parts = (R, R + 1, size.samples, T, 2 * R, 2 * size.long_tiles, int(size.common))
        self.packed = torch.empty(sum(parts), dtype=torch.int32, device=device)
        views = self.packed.split(parts)
        self.slots, self.cu_q, self.sample_slots = views[0], views[1], views[2]  # [R], [R + 1], [N]
        self.ids = views[3]  # [T], or ON_DEVICE
        self.short_map, self.long_map = views[4].view(2, -1), views[5].view(2, -1)  # row and first query of each tile
        self.common = views[6]  # [1] where there are any: blocks that all rows begin with
        self.input_ids = torch.empty(T, dtype=torch.int64, device=device)
        self.positions, self.slot_mapping = torch.empty_like(self.input_ids), torch.empty_like(self.input_ids)
        self.seq_lens = torch.empty(R, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(R, blocks_per_row, dtype=torch.int32, device=device)


def pack(plan: Plan, slots: list[int], size: StepSize, common: int = 0) -> np.ndarray:
    """A plan as `StepInputs.packed`, int32: its parts, in order of the views, as long as the size says.

    Padding rows sit in the dummy slot; padding tokens belong to the first of them, so a step with fewer tokens than its
    size needs one. A row that samples with one token takes it from the device (`ON_DEVICE`); the ids of all others are
    the host's. `sample_slots`: the slot of a row that samples, else the dummy; an entry per row, or, if `size.queries`
    is set, one for each of its tokens. `decode_tiles` and `tile_maps` make what comes then. Where the size has room for
    it, `common` comes last.
    """
    T, R, rows = size.tokens, size.rows, plan.rows
    padded = np.full(R, DUMMY_SLOT, np.int32)
    padded[: len(rows)] = slots
    if size.decode:
        cu_q, ids = np.arange(R + 1, dtype=np.int32), np.full(T, ON_DEVICE, np.int32)
        blocks = np.full(int(size.common), common, np.int32)
        return np.concatenate((padded, cu_q, padded, ids, decode_tiles(plan, R).ravel(), blocks))
    cu_q = np.full(R + 1, T, np.int32)
    cu_q[: len(rows) + 1] = np.cumsum([0, *(row.span.num_new for row in rows)])
    ids, sampling = np.zeros(T, np.int32), np.full(size.samples, DUMMY_SLOT, np.int32)
    for number, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        start, end = int(cu_q[number]), int(cu_q[number + 1])
        single = row.samples and row.span.num_new == 1
        ids[start:end] = ON_DEVICE if single else row.token_ids
        if row.samples:
            sampling[slice(start, end) if size.queries else number] = slot
    short, long = tile_maps(plan, size)
    return np.concatenate((padded, cu_q, sampling, ids, short.ravel(), long.ravel()))


def tile_maps(plan: Plan, size: StepSize) -> tuple[np.ndarray, np.ndarray]:
    """For the attention kernel: [2, R] of rows that are one tile, [2, long_tiles] of the others, most keys first."""
    most = size.queries or 1  # tokens of a row that is one tile
    short = longest_first({n: row.span.end for n, row in enumerate(plan.rows) if row.span.num_new <= most}, size.rows)
    long = np.zeros((2, size.long_tiles), np.int32)
    long[0] = NO_ROW
    if size.long_tiles:
        tiles = [
            (-row.span.start - first, number, first)
            for number, row in enumerate(plan.rows)
            if row.span.num_new > most
            for first in range(0, row.span.num_new, size.queries_per_tile)
        ]
        for place, (_, number, first) in enumerate(sorted(tiles)):
            long[:, place] = number, first
    return short, long


def decode_tiles(plan: Plan, num_rows: int) -> np.ndarray:
    """The same, [2, R], where each row is one token. Of a group, no row need be made for it."""
    lengths = plan.lengths if isinstance(plan, GroupPlan) else [row.span.end for row in plan.rows]
    return longest_first(dict(enumerate(lengths)), num_rows)


def longest_first(lengths: dict[int, int], num_rows: int) -> np.ndarray:
    """Tiles [2, num_rows] of rows with so many keys each: the last programs to start are then the shortest ones."""
    tiles = np.zeros((2, num_rows), np.int32)
    tiles[0] = NO_ROW
    tiles[0, : len(lengths)] = sorted(lengths, key=lambda row: -lengths[row])
    return tiles


def fill(inputs: StepInputs, state: DeviceState, block_size: int) -> None:
    """Each token's id, position and slot in the cache, each row's length and blocks; then every length moves on.

    In plain torch; `state_kernels.py` has it as one kernel. Padding tokens stand at position 0 of the dummy block, and
    the dummy slot's length stays 0. A newest token of -1 (none could be chosen) is computed as token 0. All goes into
    the tensors that `inputs` has: a graph knows their addresses.
    """
    slots, cu_q, T = inputs.slots.long(), inputs.cu_q.long(), inputs.size.tokens
    real = slots != DUMMY_SLOT  # [R]
    start, count = state.length[slots].long(), cu_q.diff()  # [R]
    inputs.seq_lens.copy_(torch.where(real, start + count, 0))
    inputs.block_table.copy_(state.block_tables[slots])
    row = torch.repeat_interleave(count, output_size=T)  # [T]: the row of each token
    position = torch.where(real[row], start[row] + torch.arange(T, device=slots.device) - cu_q[row], 0)
    newest = state.last_token[slots].clamp(min=0)[row]
    inputs.input_ids.copy_(torch.where(inputs.ids == ON_DEVICE, newest, inputs.ids))
    inputs.positions.copy_(position)
    block = inputs.block_table[row, position // block_size].long()
    inputs.slot_mapping.copy_(block * block_size + position % block_size)
    state.length[slots] = inputs.seq_lens  # of the dummy slot: 0
