"""The host's half of paged attention: which program works on which queries and keys.

A kernel launch is a grid of programs, and the grid must be known before the launch. Everything here follows from
lengths that the host already has, so a plan costs no look at device memory, and one plan serves every layer of a step.

Two cuts turn a ragged batch into even work:

* queries into *tiles*: `block_m` rows of one sequence and one KV head, so that all heads which share the KV head
  (grouped-query attention) read each key once;
* keys into *splits*: a decode step of one long sequence has a single tile per KV head, too few to fill a GPU. Each
  split attends over its own `keys_per_split` keys, and a second, small kernel merges them (flash decoding, Dao et al.
  2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.s03_paged_kv.tile_sizes import SHORT_ROWS, AttentionShape, TileSizes, pick_split, pick_tiles

__all__ = ["AttentionShape", "KernelPlan", "Launch", "check_lengths", "make_plan"]


@dataclass(frozen=True)
class Launch:
    """One launch of the kernel: `num_tiles` x KV heads x `num_splits` programs.

    `tile_map` is int32 [2, num_tiles] on the device: the row of each tile (-1: an empty tile that only pads the grid)
    and its first query within that row. None means that tile i is the whole of row i, which holds in every decode step.
    A split has at least `keys_per_split` keys; of a row that is longer than all splits together, an even share.
    """

    sizes: TileSizes
    num_tiles: int
    queries_per_tile: int
    tile_map: torch.Tensor | None
    keys_per_split: int
    num_splits: int


@dataclass(frozen=True)
class KernelPlan:
    """The launches of one step: short rows (decode, speculative) and long ones (prefill) want different tiles."""

    shape: AttentionShape
    num_rows: int
    launches: tuple[Launch, ...]


def check_lengths(q_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
    """A row needs a query and at least as many keys as queries; only a padding row (1 query) may have no key at all."""
    if len(q_lens) != len(seq_lens):
        raise ValueError(f"{len(q_lens)} query lengths but {len(seq_lens)} sequence lengths")
    for row, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
        padding = q_len == 1 and seq_len == 0
        if not padding and not 1 <= q_len <= seq_len:
            raise ValueError(f"row {row}: {q_len} queries with {seq_len} keys; need 1 <= queries <= keys")


def make_plan(
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    shape: AttentionShape,
    *,
    tile_multiple: int = 1,
    short_sizes: TileSizes | None = None,
    long_sizes: TileSizes | None = None,
    keys_per_split: int | None = None,
) -> KernelPlan:
    """Plans one step for all layers, from host lists only.

    `seq_lens` may be upper bounds (a CUDA graph is captured with the largest lengths it must serve): they decide the
    number of splits, while the kernel reads the true lengths on the device. `tile_multiple` pads every tile map with
    empty tiles. The last three arguments override what would be picked: for tests and for tuning.
    Raises ValueError for lengths that cannot be.
    """
    check_lengths(q_lens, seq_lens)
    short = [row for row, q_len in enumerate(q_lens) if q_len * shape.group <= SHORT_ROWS]
    long = [row for row, q_len in enumerate(q_lens) if q_len * shape.group > SHORT_ROWS]
    launches = []
    for rows, sizes in ((short, short_sizes), (long, long_sizes)):
        if not rows:
            continue
        longest = max(max(seq_lens[row] for row in rows), 1)
        query_rows = max(q_lens[row] for row in rows) * shape.group
        sizes = sizes or pick_tiles(shape, len(rows), query_rows, longest)
        if sizes.block_m < shape.group:
            raise ValueError(f"{shape.group} query heads per KV head do not fit a tile of {sizes.block_m} rows")
        queries_per_tile = min(sizes.block_m // shape.group, max(q_lens[row] for row in rows))
        whole_rows = len(rows) == len(q_lens) and max(q_lens) <= queries_per_tile and tile_multiple == 1
        if whole_rows:
            num_tiles, tile_map = len(rows), None
        else:
            tile_map = _map_tiles(rows, q_lens, seq_lens, queries_per_tile, tile_multiple, block_table.device)
            num_tiles = tile_map.shape[1]
        keys = keys_per_split or pick_split(shape, num_tiles * shape.num_kv_heads, longest)
        keys = -(-keys // sizes.block_n) * sizes.block_n  # a program takes whole tiles of keys
        launches.append(Launch(sizes, num_tiles, queries_per_tile, tile_map, keys, -(-longest // keys)))
    return KernelPlan(shape, len(q_lens), tuple(launches))


def _map_tiles(
    rows: Sequence[int],
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    queries_per_tile: int,
    tile_multiple: int,
    device: torch.device,
) -> torch.Tensor:
    """int32 [2, tiles]: row and first query, the tile with most keys first, so that none starts late and ends last."""
    tiles = [
        (seq_lens[row] - q_lens[row] + min(start + queries_per_tile, q_lens[row]), row, start)
        for row in rows
        for start in range(0, q_lens[row], queries_per_tile)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    tiles += [(0, -1, 0)] * (-len(tiles) % tile_multiple)
    host = torch.tensor([[row for _, row, _ in tiles], [start for _, _, start in tiles]], dtype=torch.int32)
    if device.type == "cuda":  # pinned, so that the copy does not stop the host
        return host.pin_memory().to(device, non_blocking=True)
    return host
