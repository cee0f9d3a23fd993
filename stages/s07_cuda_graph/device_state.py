"""What the device knows of each running request, so that a decode step needs nothing from the host."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from stages.s01_forward.generation import Generation
from stages.s07_cuda_graph.sampling_columns import MOST_SEEN, SamplingColumns

DUMMY_SLOT = 0  # padding rows belong to it: it has no block but the dummy, and its length stays 0
INTS = ("last_token", "length", "top_k", "seed_low", "seed_high")
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
COLUMNS = {name: place for place, name in enumerate(INTS + FLOATS)}


class DeviceState:
    """One int32 tensor: each running request has a *slot*, an entry in every column and a row of the block table.

    `last_token` [S] was sampled last and is not in the cache yet; `length` [S] counts the tokens before it. Both move
    on by themselves, within the step. What only the host knows (who joins, with which parameters; which blocks it got)
    comes as edits, pairs of an index into `flat` and a value, gathered here and sent all at once. A float is its bits.
    """

    def __init__(self, num_slots: int, blocks_per_slot: int, vocab_size: int, device: torch.device) -> None:
        self.num_slots, self.blocks_per_slot = num_slots + 1, blocks_per_slot  # with the dummy
        S, split = self.num_slots, self.num_slots * len(COLUMNS)
        self.flat = torch.zeros(split + S * blocks_per_slot, dtype=torch.int32, device=device)
        columns = dict(zip(COLUMNS, self.flat[:split].view(-1, S), strict=True))  # [S] each
        self.last_token, self.length = columns.pop("last_token"), columns.pop("length")
        columns.update({name: columns[name].view(torch.float32) for name in FLOATS})
        self.history = torch.zeros(S, vocab_size, dtype=torch.int16, device=device)
        self.sampling = SamplingColumns(**columns, history=self.history)
        self.block_tables = self.flat[split:].view(S, blocks_per_slot)
        self.sampling.top_p.fill_(1.0)
        self.sampling.repetition.fill_(1.0)
        self.edits: dict[int, int] = {}  # of columns: index into `flat` -> value
        self.new_blocks: dict[int, tuple[int, list[int]]] = {}  # of tables: slot -> a number, its blocks from there on

    def edit(self, name: str, slot: int, value: float) -> None:
        """Stage a new value for a column."""
        self.edits[COLUMNS[name] * self.num_slots + slot] = float_bits(value) if name in FLOATS else int(value)

    def edit_blocks(self, slot: int, first: int, blocks: list[int]) -> None:
        """Stage a slot's block table from number `first` on; what was staged of it from there on is void."""
        begin, staged = self.new_blocks.get(slot, (first, []))
        self.new_blocks[slot] = min(begin, first), staged[: max(first - begin, 0)] + blocks

    def take_edits(self) -> tuple[np.ndarray, np.ndarray]:
        """The staged edits, once: where and what, int32."""
        edits, self.edits = self.edits, {}
        tables, self.new_blocks = self.new_blocks, {}
        where, blocks = [np.fromiter(edits.keys(), np.int32, len(edits))], array("I")  # quicker than a list to convert
        for slot, (first, new) in tables.items():
            start = len(COLUMNS) * self.num_slots + slot * self.blocks_per_slot + first
            where.append(np.arange(start, start + len(new), dtype=np.int32))
            blocks.fromlist(new)
        what = np.fromiter(edits.values(), np.int32, len(edits)), np.frombuffer(blocks, np.int32)
        return np.concatenate(where), np.concatenate(what)

    def edit_sampling(self, slot: int, generation: Generation, on_host: bool) -> None:
        """Stage how a request wants its tokens chosen; one whose tokens the host chooses is greedy here."""
        params, seed = generation.params, generation.seed & 0xFFFF_FFFF_FFFF_FFFF
        plain = on_host or params.greedy
        top_k, filters = params.top_k, (params.temperature, params.top_p, params.min_p)
        top_k, filters = (0, (0.0, 1.0, 0.0)) if plain else (min(top_k, 2**31 - 1), filters)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        penalties = (1.0, 0.0, 0.0) if on_host else penalties
        # All columns from `top_k` on, in their order; the seed is two of them.
        values = struct.pack("<iQ6f", top_k, seed, *filters, *penalties)
        columns = range(COLUMNS["top_k"] * self.num_slots + slot, len(COLUMNS) * self.num_slots, self.num_slots)
        self.edits.update(zip(columns, struct.unpack("<9i", values), strict=True))
        if penalties != (1.0, 0.0, 0.0):
            self.write_history(slot, generation)

    def write_history(self, slot: int, generation: Generation) -> None:
        """Which tokens a slot's request has seen: 1 for one of its prompt, 2 for each time in its output."""
        device, row = self.history.device, self.history[slot].zero_()
        row[torch.tensor(generation.prompt_token_ids, device=device)] = 1
        if generation.token_ids:
            made = torch.tensor(generation.token_ids, device=device)
            times = torch.zeros(len(row), dtype=torch.int32, device=device)
            times.index_add_(0, made, torch.ones_like(made).int())
            row += (2 * times.clamp(max=MOST_SEEN // 2)).to(row.dtype)

    def count_tokens(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tokens that the host chose for a request with penalties join its history."""
        for token_id in token_ids:
            self.history[slot, token_id] = (self.history[slot, token_id] + 2).clamp(max=MOST_SEEN)


def float_bits(value: float) -> int:
    """A number's bits as fp32, read as a signed 32-bit integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
