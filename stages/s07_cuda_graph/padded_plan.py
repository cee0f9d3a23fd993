"""The attention kernel's launches for a step of padded size: they follow from the size, never from lengths."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stages.s03_paged_kv.attention_plan import KernelPlan, Launch
from stages.s03_paged_kv.tile_sizes import MAX_SPLITS, PROCESSORS, SHORT_ROWS, AttentionShape, TileSizes, pick_tiles
from stages.s07_cuda_graph.chunk_tiles import CHUNK_TILES, LEAST_QUERIES
from stages.s07_cuda_graph.step_inputs import StepInputs, StepSize

LEAST_KEYS = 128  # of a split
COMMON_TILES = TileSizes(64, 64, 4, 3, True)  # queries of all rows, common keys
COMMON_SPLITS = 8  # at most: each leaves D numbers in fp32 for every row and head, which the merge reads


@dataclass(frozen=True)
class ChunkPlan(KernelPlan):
    """Rows of one token as ever, if there may be any; `chunks`, the others, by `chunk_tiles.chunk_attention`."""

    chunks: Launch


@dataclass(frozen=True)
class CommonPlan(KernelPlan):
    """A decode step whose rows begin with the same blocks, `num_blocks` [1] on the device; `common`: those, by
    `common_kernel`. The only launch: what each row has of its own.
    """

    common: Launch
    num_blocks: Tensor


def prompt_tiles(shape: AttentionShape, longest: int) -> TileSizes:
    """Tiles of rows with several tokens, for sequences of up to `longest` tokens."""
    return pick_tiles(shape, 1, max(longest * shape.group, SHORT_ROWS + 1), longest)


def mixed_size(
    tokens: int, rows: int, shape: AttentionShape, longest: int, chunks: TileSizes | None = None
) -> StepSize:
    """A size with room for every way to cut `tokens` into at most `rows` rows.

    chunks: `chunk_tiles`. Their kernel does not split keys, so it waits for tokens enough to fill the GPU without.
    """
    if tokens * shape.num_heads < LEAST_QUERIES:
        chunks = None
    queries = chunks.block_m if chunks else prompt_tiles(shape, longest).block_m // shape.group
    tiles = -(-tokens // queries) + rows
    return StepSize(tokens, rows, long_tiles=tiles, queries_per_tile=queries, chunks=bool(chunks))


def padded_plan(inputs: StepInputs, shape: AttentionShape, longest: int) -> KernelPlan:
    """One launch for rows with one token, or few; in a mixed step a second for the others. `longest`: max_model_len.

    Where a decode step has no more programs than processors, all start at once, in whatever order: it needs no map.
    """
    size, queries = inputs.size, max(inputs.size.queries, 1)
    if size.common:
        return common_plan(inputs, shape, longest)
    all_at_once = size.queries and size.rows * shape.num_kv_heads <= PROCESSORS
    tile_map = None if all_at_once else inputs.short_map
    launches = [] if size.only_chunks else [short_launch(size.rows, queries, tile_map, shape, longest)]
    if size.chunks:
        tiles = CHUNK_TILES[size.queries_per_tile]
        chunks = Launch(tiles, size.long_tiles, size.queries_per_tile, inputs.long_map, longest, 1)
        return ChunkPlan(shape, size.rows, tuple(launches), chunks)
    if size.long_tiles:
        long = prompt_tiles(shape, longest)
        launches.append(launch(long, size.long_tiles, size.queries_per_tile, inputs.long_map, shape, longest))
    return KernelPlan(shape, size.rows, tuple(launches))


def common_plan(inputs: StepInputs, shape: AttentionShape, longest: int) -> CommonPlan:
    """Tiles of all rows' queries over the common keys; rows, often short, over their own, without halves for balance.

    Larger keys than were measured take the tiles of prompts, which fit in shared memory.
    """
    rows = inputs.size.rows
    sizes = COMMON_TILES if shape.key_bytes <= 256 else prompt_tiles(shape, longest)
    tiles = -(-rows * shape.group // sizes.block_m)
    common = launch(sizes, tiles, 1, None, shape, longest, most=COMMON_SPLITS)
    own = launch(pick_tiles(shape, rows, shape.group, longest), rows, 1, inputs.short_map, shape, longest)
    return CommonPlan(shape, rows, (own,), common, inputs.common)


def short_launch(rows: int, queries: int, tile_map: Tensor | None, shape: AttentionShape, longest: int) -> Launch:
    """Rows that are one tile each, of up to `queries` tokens."""
    sizes = pick_tiles(shape, rows, queries * shape.group, longest)
    # With one to three programs for each processor, halves of rows share the work more evenly: 5 to 10 % faster there.
    halves = rows * shape.num_kv_heads < 3 * PROCESSORS
    return launch(sizes, rows, queries, tile_map, shape, longest, least=1 + halves)


def launch(
    sizes: TileSizes,
    num_tiles: int,
    queries: int,
    tile_map: Tensor | None,
    shape: AttentionShape,
    longest: int,
    least: int = 1,
    most: int = MAX_SPLITS,
) -> Launch:
    """Splits enough to fill the GPU, 2 programs per processor, `least` to `most`. Each row divides its keys by them."""
    most = min(most, -(-longest // LEAST_KEYS))
    splits = max(1, min(max(round(2 * PROCESSORS / (num_tiles * shape.num_kv_heads)), least), most))
    keys = -(-LEAST_KEYS // sizes.block_n) * sizes.block_n  # whole tiles of keys
    return Launch(sizes, num_tiles, queries, tile_map, keys, splits)
