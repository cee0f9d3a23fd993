"""What the kernel for chunks is held to: exact attention, with NaN wherever a row must not look.

The same cases run in Triton's interpreter (test_chunk_kernel.py) and on a GPU (`python -m reference.gpu_checks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.s03_paged_kv.attention_cases import Case, exact_attention, make_case
from stages.s03_paged_kv.attention_plan import Launch
from stages.s03_paged_kv.tile_sizes import TileSizes
from stages.s07_cuda_graph.padded_plan import CHUNK_TILES

PADDING = 3  # tokens after the last row
UNTOUCHED = 7.0
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

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads} x {self.group} heads of {self.head_dim}"
        return f"{self.q_lens} of {self.kv_lens}, {heads}, {str(self.dtype).removeprefix('torch.')}"

    def run(self, device: str = "cpu") -> float:
        """The largest error of the rows with several queries; raises ValueError if any other element was touched."""
        from stages.s07_cuda_graph.chunk_kernel import chunk_attention

        case = make_case(
            self.q_lens, self.kv_lens, num_kv_heads=self.num_kv_heads, group=self.group, head_dim=self.head_dim,
            dtype=self.dtype, device=device,
        )  # fmt: skip
        packed = pack_step(case)
        heads, kv_heads = self.num_kv_heads * self.group, self.num_kv_heads
        q, k, v = packed.split((heads, kv_heads, kv_heads), dim=1)
        out = torch.full(q.shape, UNTOUCHED, dtype=self.dtype, device=device)
        chunk_attention(
            q, k, v, case.k_cache, case.v_cache, case.block_table, case.seq_lens, case.cu_q, self.launch(device),
            case.scale, out,
        )  # fmt: skip
        mine = torch.tensor([count > 1 for count in self.q_lens for _ in range(count)], device=device)
        ours, others = out[: len(mine)][mine], torch.cat((out[: len(mine)][~mine], out[len(mine) :]))
        if not bool((others == UNTOUCHED).all()):
            raise ValueError("a row was written that is not the kernel's")
        return (ours.double() - exact_attention(case)[mine]).abs().max().item()

    def launch(self, device: str) -> Launch:
        """Tiles of the rows with several queries, most keys first, and two empty ones."""
        queries = self.sizes.block_m
        tiles = sorted(
            (count - kv_len - first, row, first)
            for row, (count, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True))
            if count > 1
            for first in range(0, count, queries)
        )
        rows, firsts = [row for _, row, _ in tiles] + [-1, -1], [first for *_, first in tiles] + [0, 0]
        tile_map = torch.tensor([rows, firsts], dtype=torch.int32, device=device)
        return Launch(self.sizes, len(rows), queries, tile_map, 0, 1)


def pack_step(case: Case) -> Tensor:
    """q, k and v of the step in one tensor [T + padding, Hq + 2 Hkv, D], as the projection gives them.

    The keys of the step are NaN in the cache, where nobody must read them; the padding is NaN, too.
    """
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


def small_cases() -> Iterator[ChunkCase]:
    """For the interpreter: fresh rows and chunks, ragged at every edge, groups that are no power of two."""
    yield ChunkCase((20, 1, 37), (20, 9, 60), num_kv_heads=1, group=3)
    yield ChunkCase((33,), (64,), num_kv_heads=1, group=1)
    yield ChunkCase((34, 5), (34, 16), num_kv_heads=1, group=7)
    yield ChunkCase((2, 32, 2), (18, 32, 2), num_kv_heads=3, group=1)


def large_cases() -> Iterator[ChunkCase]:
    """For a GPU: the real tiles, real shapes of heads."""
    for kv_heads, group in ((8, 2), (2, 6), (4, 7), (1, 1)):
        for dtype in (torch.bfloat16, torch.float16):
            for dim in (64, 128):
                shape = dict(num_kv_heads=kv_heads, group=group, head_dim=dim, dtype=dtype, sizes=CHUNK_TILES)
                yield ChunkCase((700, 1, 333, 2, 64), (700, 50, 1333, 1000, 64), **shape)  # type: ignore[arg-type]
                yield ChunkCase((65, 2048, 127), (4160, 2048, 128), **shape)  # type: ignore[arg-type]
