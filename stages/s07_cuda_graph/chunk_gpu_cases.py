"""Cases for chunks on a GPU: real tiles and heads for both kernels, and all that is ragged for the Hopper kernel."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from stages.s07_cuda_graph.chunk_cases import ChunkCase
from stages.s07_cuda_graph.chunk_tiles import HOPPER_TILES, TRITON_TILES

QUERIES = (2, 5, 15, 63, 64, 65, 127, 128, 129, 300)  # around the tiles' edges
LAUNCHES = 200


def large_cases() -> Iterator[ChunkCase]:
    """Both kernels over real shapes of heads; then `ragged_cases`."""
    for sizes in (TRITON_TILES, HOPPER_TILES):
        for kv_heads, group in ((8, 2), (2, 6), (4, 7), (1, 1)):
            for dtype in (torch.bfloat16, torch.float16):
                for dim in (64, 128):
                    shape = dict(num_kv_heads=kv_heads, group=group, head_dim=dim, dtype=dtype, sizes=sizes)
                    yield ChunkCase((700, 1, 333, 2, 64), (700, 50, 1333, 1000, 64), **shape)  # type: ignore[arg-type]
                    yield ChunkCase((65, 2048, 127), (4160, 2048, 128), **shape)  # type: ignore[arg-type]
    yield from ragged_cases()


def ragged_cases() -> Iterator[ChunkCase]:
    """Rows shorter than a tile, any number of older keys and of heads in a group, every size of block, many rows."""
    for group, dim in ((1, 128), (2, 64), (3, 128), (6, 64), (7, 128), (8, 64)):
        yield hopper_case(QUERIES, (0, 1, 7, 63, 64, 65, 127, 128, 129, 200), group, dim)
        yield hopper_case((1, 1, 1), (8, 0, 130), group, dim)  # nothing but empty tiles
        yield hopper_case((300, 2), (16384, 9000), group, dim)
    for block_size in (8, 32, 64, 128):
        yield hopper_case(QUERIES, (1, 127, 33, 0, 64, 500, 129, 8, 16, 31), group=3, block_size=block_size)
    yield many_rows()


def racing_cases() -> Iterator[ChunkCase]:
    """For `differing`: short tiles, which follow one another quickly; long ones; both beside each other."""
    yield many_rows()
    yield hopper_case((2048, 2048, 700), (2048, 0, 100), group=2)
    yield hopper_case((1024, 130, 64, 900, 2, 333, 640, 40), (0, 5000, 127, 0, 40, 1000, 16, 0), group=7)


def many_rows(rows: int = 230) -> ChunkCase:
    """Rows of 2 to 40 tokens, every tenth longer, behind up to 300 older ones."""
    rng = Random(0)
    queries = tuple(rng.randint(2, 40) if n % 10 else rng.randint(41, 300) for n in range(rows))
    return hopper_case(queries, tuple(rng.choice((0, rng.randint(1, 300))) for _ in range(rows)), group=2)


def hopper_case(
    queries: tuple[int, ...], old: tuple[int, ...], group: int, head_dim: int = 128, block_size: int = 16
) -> ChunkCase:
    """Three KV heads in bf16; `old` keys before each row's own."""
    kv_lens = tuple(a + b for a, b in zip(queries, old, strict=True))
    return ChunkCase(queries, kv_lens, 3, group, head_dim, torch.bfloat16, HOPPER_TILES, block_size)
