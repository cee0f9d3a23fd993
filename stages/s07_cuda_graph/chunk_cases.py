"""What the kernels for chunks are held to: exact attention, with NaN wherever a row must not look.

Small cases run in Triton's interpreter (test_chunk_kernel.py), those of chunk_gpu_cases.py on a GPU (`python -m
reference.gpu_checks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.s03_paged_kv.attention_cases import Case, exact_attention, make_case
from stages.s03_paged_kv.attention_plan import Launch
from stages.s03_paged_kv.tile_sizes import TileSizes
from stages.s07_cuda_graph.chunk_tiles import chunk_attention

PADDING = 3  # tokens after the last row
EMPTY = 2  # tiles
UNTOUCHED = 7.0
NO_BLOCK = 77_777_777  # in a block table, where it says nothing
ALLOWED = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class ChunkCase:
    """A step: queries and keys of each row. Rows of one query are another kernel's."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    sizes: TileSizes = TileSizes(32, 16, 4, 2, True)
    block_size: int = 16

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads} x {self.group} heads of {self.head_dim}"
        many = len(self.q_lens) > 12
        rows = f"{len(self.q_lens)} rows" if many else f"{self.q_lens} of {self.kv_lens}"
        return f"{rows}, {heads}, {self.compiled}"

    @property
    def compiled(self) -> str:
        """What the kernel is compiled for: cases with the same need it only once."""
        tiles = f"tiles of {self.sizes.block_m} x {self.sizes.block_n}, blocks of {self.block_size}"
        return f"{str(self.dtype).removeprefix('torch.')}, D {self.head_dim}, {tiles}"

    def run(self, device: str = "cpu") -> float:
        """The largest error of the rows with several queries; raises ValueError if any other element was touched."""
        case, q, k, v, out = self.make(device)
        attend, lengths = chunk_attention(self.sizes), (case.seq_lens, case.cu_q)
        attend(q, k, v, *old_keys(case), *lengths, self.launch(device), case.scale, out)
        mine = torch.tensor([count > 1 for count in self.q_lens for _ in range(count)], device=device)
        ours, others = out[: len(mine)][mine], torch.cat((out[: len(mine)][~mine], out[len(mine) :]))
        if not bool((others == UNTOUCHED).all()):
            raise ValueError("a row was written that is not the kernel's")
        errors = (ours.double() - exact_attention(case)[mine]).abs().flatten()
        return errors.max().item() if len(errors) else 0.0

    def differing(self, launches: int, device: str = "cuda") -> int:
        """How many of so many launches, each with its tiles in another order, differ from the first in any bit.

        Who works beside whom, and when, changes with the order; what is computed does not. So a tile that is read too
        early or written over too soon shows, be it now and then.
        """
        case, q, k, v, out = self.make(device)
        attend, where = chunk_attention(self.sizes), (*old_keys(case), case.seq_lens, case.cu_q)
        launch, rng = self.launch(device), torch.Generator(device).manual_seed(0)
        assert launch.tile_map is not None
        first, differing = None, torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(launches):
            attend(q, k, v, *where, launch, case.scale, out.fill_(UNTOUCHED))
            first = out.clone() if first is None else first
            differing += (out != first).any()
            order = torch.randperm(launch.num_tiles - EMPTY, device=device, generator=rng)
            launch.tile_map[:, : len(order)] = launch.tile_map[:, order]
        return int(differing)

    def make(self, device: str) -> tuple[Case, Tensor, Tensor, Tensor, Tensor]:
        """A random step: the case, its q, k, v [T + padding, heads, D], and an output as large as q."""
        case = make_case(
            self.q_lens, self.kv_lens, num_kv_heads=self.num_kv_heads, group=self.group, head_dim=self.head_dim,
            block_size=self.block_size, dtype=self.dtype, device=device,
        )  # fmt: skip
        heads, kv_heads = self.num_kv_heads * self.group, self.num_kv_heads
        q, k, v = pack_step(case).split((heads, kv_heads, kv_heads), dim=1)
        return case, q, k, v, torch.full(q.shape, UNTOUCHED, dtype=self.dtype, device=device)

    def launch(self, device: str) -> Launch:
        """Tiles of the rows with several queries, most keys first, and then the empty ones."""
        queries = self.sizes.block_m
        tiles = sorted(
            (count - kv_len - first, row, first)
            for row, (count, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True))
            if count > 1
            for first in range(0, count, queries)
        )
        rows, firsts = [row for _, row, _ in tiles] + [-1] * EMPTY, [first for *_, first in tiles] + [0] * EMPTY
        tile_map = torch.tensor([rows, firsts], dtype=torch.int32, device=device)
        return Launch(self.sizes, len(rows), queries, tile_map, 0, 1)


def pack_step(case: Case) -> Tensor:
    """q, k and v of the step in one tensor [T + padding, Hq + 2 Hkv, D], as the projection gives them; NaN behind."""
    tokens, heads, dim = case.q.shape
    kv_heads, block_size = case.k_cache.shape[2], case.k_cache.shape[1]
    packed = case.q.new_full((tokens + PADDING, heads + 2 * kv_heads, dim), float("nan"))
    packed[:tokens, :heads] = case.q
    at = 0
    for row, (count, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        position = torch.arange(kv_len - count, kv_len, device=case.q.device)
        block, place = case.block_table[row, position // block_size].long(), position % block_size
        packed[at : at + count, heads : heads + kv_heads] = case.k_cache[block, place]
        packed[at : at + count, heads + kv_heads :] = case.v_cache[block, place]
        at += count
    return packed


def old_keys(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Caches and block table with older keys alone: NaN where the step's own belong, and no block where only they are.

    An engine has written them there before it attends; but who reads them there pays for it.
    """
    k_cache, v_cache, table = case.k_cache.clone(), case.v_cache.clone(), case.block_table.clone()
    block_size = k_cache.shape[1]
    for row, (count, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        position = torch.arange(kv_len - count, kv_len, device=table.device)
        place = case.block_table[row, position // block_size].long(), position % block_size
        k_cache[place] = v_cache[place] = float("nan")
        table[row, -(-(kv_len - count) // block_size) :] = NO_BLOCK
    return k_cache, v_cache, table


def small_cases() -> Iterator[ChunkCase]:
    """For the interpreter: fresh rows and chunks, ragged at every edge, groups that are no power of two."""
    yield ChunkCase((20, 1, 37), (20, 9, 60), num_kv_heads=1, group=3)
    yield ChunkCase((33,), (64,), num_kv_heads=1, group=1)
    yield ChunkCase((34, 5), (34, 16), num_kv_heads=1, group=7)
    yield ChunkCase((2, 32, 2), (18, 32, 2), num_kv_heads=3, group=1)
