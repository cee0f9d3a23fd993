"""Which tiles the attention kernel uses for which shape: a table that was measured, and two rules."""

from dataclasses import dataclass, replace

MAX_SPLITS = 64  # bounds the merge's work and memory, whatever the context length
SHORT_ROWS = 64  # (query, head) rows up to which a sequence counts as short: it fits one small tile


@dataclass(frozen=True)
class AttentionShape:
    """What stays the same for the life of a cache. `element_size` is that of the cache's dtype, in bytes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    element_size: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def key_bytes(self) -> int:
        """Of one key of one head in a tile, whose side must be a power of two."""
        return next_power_of_2(self.head_dim) * self.element_size


@dataclass(frozen=True)
class TileSizes:
    """How one program of the kernel is shaped: query rows x keys per iteration, warps, loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    unmasked_part: bool  # keys that all queries of the tile see in a loop of their own, without a mask


@dataclass(frozen=True)
class TileTable:
    """Tile sizes for keys of one size. Short rows get a `block_m` of their own, a power of two that holds them."""

    few: TileSizes  # fewer programs than 3 per processor: larger tiles keep more bytes in flight
    many: TileSizes
    prompt: TileSizes
    long_prompt: TileSizes
    long_from: int  # keys from which a prompt is long: then whole tiles outweigh the diagonal's half-empty ones


# By the bytes of one padded key: head_dim rounded up to a power of two, times the element size. Up to 256 bytes from a
# sweep on an H200 (`python -m stages.s03_paged_kv.tune_kernel`); above, what its shared memory holds.
TILES = {
    128: TileTable(
        few=TileSizes(16, 128, 4, 2, False),
        many=TileSizes(16, 128, 4, 2, False),
        prompt=TileSizes(128, 32, 4, 2, True),
        long_prompt=TileSizes(128, 64, 8, 3, True),
        long_from=1025,
    ),
    256: TileTable(
        few=TileSizes(16, 128, 4, 3, False),
        many=TileSizes(16, 64, 4, 3, False),
        prompt=TileSizes(128, 32, 4, 2, True),
        long_prompt=TileSizes(128, 128, 8, 3, True),
        long_from=2049,
    ),
    512: TileTable(
        few=TileSizes(16, 32, 4, 3, False),
        many=TileSizes(16, 32, 4, 3, False),
        prompt=TileSizes(64, 32, 4, 2, True),
        long_prompt=TileSizes(64, 32, 4, 2, True),
        long_from=1,
    ),
    1024: TileTable(
        few=TileSizes(16, 16, 4, 2, False),
        many=TileSizes(16, 16, 4, 2, False),
        prompt=TileSizes(32, 16, 4, 2, True),
        long_prompt=TileSizes(32, 16, 4, 2, True),
        long_from=1,
    ),
}
PROCESSORS = 132  # of an H200


def pick_tiles(shape: AttentionShape, rows: int, query_rows: int, longest: int) -> TileSizes:
    """Tile sizes for `rows` sequences, the longest of `query_rows` (query, head) rows and `longest` keys."""
    tiles = TILES[min(max(shape.key_bytes, 128), 1024)]
    if query_rows > SHORT_ROWS:
        return tiles.prompt if longest < tiles.long_from else tiles.long_prompt
    sizes = tiles.few if rows * shape.num_kv_heads < 3 * PROCESSORS else tiles.many
    return replace(sizes, block_m=max(16, next_power_of_2(query_rows)))


def pick_split(shape: AttentionShape, programs: int, longest: int) -> int:
    """Keys per split, at least 128: enough splits for 2 programs per processor, or 4 if their keys are small."""
    wanted = PROCESSORS * (4 if shape.key_bytes <= 128 else 2)
    splits = min(round(wanted / programs), MAX_SPLITS)
    return max(-(-longest // splits), 128) if splits > 1 else longest


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
