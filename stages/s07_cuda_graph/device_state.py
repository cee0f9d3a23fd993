"""What the device knows of each running request, so that a decode step needs nothing from the host."""

from __future__ import annotations

import struct
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
        self.edits: dict[int, int] = {}  # index into `flat` -> value

    def edit(self, name: str, slot: int, value: float) -> None:
        """Stage a new value for a column."""
        self.edits[COLUMNS[name] * self.num_slots + slot] = float_bits(value) if name in FLOATS else int(value)

    def edit_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Stage entries of a slot's block table, from number `first` on."""
        start = self.num_slots * len(COLUMNS) + slot * self.blocks_per_slot + first
        self.edits.update(zip(range(start, start + len(blocks)), blocks, strict=True))

    def take_edits(self) -> tuple[np.ndarray, np.ndarray]:
        """The staged edits, once: where and what, int32."""
        edits, self.edits = self.edits, {}
        return np.fromiter(edits.keys(), np.int32, len(edits)), np.fromiter(edits.values(), np.int32, len(edits))

    def edit_sampling(self, slot: int, generation: Generation, on_host: bool) -> None:
        """Stage how a request wants its tokens chosen; one whose tokens the host chooses is greedy here."""
        params, seed = generation.params, generation.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.edit("seed_low", slot, signed(seed & 0xFFFF_FFFF))
        self.edit("seed_high", slot, signed(seed >> 32))
        plain = on_host or params.greedy
        self.edit("temperature", slot, 0.0 if plain else params.temperature)
        self.edit("top_k", slot, 0 if plain else min(params.top_k, 2**31 - 1))
        self.edit("top_p", slot, 1.0 if plain else params.top_p)
        self.edit("min_p", slot, 0.0 if plain else params.min_p)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        penalties = (1.0, 0.0, 0.0) if on_host else penalties
        for name, value in zip(("repetition", "presence", "frequency"), penalties, strict=True):
            self.edit(name, slot, value)
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


def signed(bits: int) -> int:
    """32 bits as a signed integer."""
    return bits - 2**32 if bits >= 2**31 else bits
