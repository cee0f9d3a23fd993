"""The loading warp of `hopper_chunk_kernel.py`, and the items that its three parts go through in the same order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def read_item(turn, work):
    """Row of an item (-1: there are no more), its first query, head; the row's first token, queries, older keys."""
    tile_map_ptr, cu_q_ptr, seq_lens_ptr, num_tiles, num_heads, _ = work
    # Tiles come in order of their keys. So every other turn goes backwards: who had the longest gets the shortest.
    place, programs = gl.program_id(0), gl.num_programs(0)
    index = turn * programs + gl.where(turn & 1 == 0, place, programs - 1 - place)
    tile = gl.minimum(index // num_heads, num_tiles - 1)
    row = gl.load(tile_map_ptr + tile)
    first = gl.load(tile_map_ptr + num_tiles + tile)
    there = gl.maximum(row, 0)
    start = gl.load(cu_q_ptr + there)
    queries = gl.load(cu_q_ptr + there + 1) - start
    old = gl.load(seq_lens_ptr + there) - queries
    return gl.where(index < num_tiles * num_heads, row, -1), first, index % num_heads, start, queries, old


@gluon.jit
def key_tiles(first, head, queries, old, group, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """KV head of an item; do the warpgroups take two heads; tiles of older keys; of all keys (0: nothing to do)."""
    kv_head = head // group
    paired = queries - first <= BLOCK_M
    old_tiles = (old + BLOCK_N - 1) // BLOCK_N
    tiles = old_tiles + (gl.minimum(first + 2 * BLOCK_M, queries) + BLOCK_N - 1) // BLOCK_N
    served = paired & (2 * (head - kv_head * group) >= group)  # by an item before it
    return kv_head, paired, old_tiles, gl.where(served, 0, tiles)


@gluon.jit
def share(HALF: gl.constexpr, first, head, kv_head, paired, group, BLOCK_M: gl.constexpr):
    """Head and first query of one of the two warpgroups."""
    first_head = kv_head * group
    my_head = gl.where(paired, 2 * head - first_head + HALF, head)
    return my_head, gl.where(paired, first, first + HALF * BLOCK_M)


@gluon.jit
def _load_tile(
    rows, pages, tiles, full, empty, number, i, old_tiles, start, column, table_ptr, last_block,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Asks for the item's i-th tile of keys or of values, the `number`-th of this program, once its place is empty."""
    STAGES: gl.constexpr = tiles.shape[0]
    BLOCK_N: gl.constexpr = tiles.shape[1]
    HEAD_DIM: gl.constexpr = tiles.shape[2]
    PANELS: gl.constexpr = HEAD_DIM // 64  # a tile lies in panels of 64 columns, 128 bytes, as the tensor cores read it
    PAGES: gl.constexpr = BLOCK_N // BLOCK_SIZE
    stage = number % STAGES
    mbarrier.wait(empty.index(stage), (number // STAGES & 1) ^ 1)  # for the first round a new barrier counts as empty
    mbarrier.expect(full.index(stage), BLOCK_N * HEAD_DIM * 2)
    if i < old_tiles:
        parts = tiles._reinterpret(tiles.dtype, [STAGES * PANELS * PAGES, 1, BLOCK_SIZE, 64], pages.layout)
        for page in gl.static_range(PAGES):
            block = gl.load(table_ptr + gl.minimum(i * PAGES + page, last_block))
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    pages, [block, 0, column + panel * 64], full.index(stage),
                    parts.index((stage * PANELS + panel) * PAGES + page))  # fmt: skip
    else:  # the step's own lie in one piece
        tma.async_copy_global_to_shared(
            rows, [start + (i - old_tiles) * BLOCK_N, column], full.index(stage), tiles.index(stage))  # fmt: skip


@gluon.jit
def load(
    q_rows, k_rows, v_rows, k_pages, v_pages, tiles, full, empty, work, table_ptr, stride_table,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The loading warp: all tiles of all of the program's items, in the order in which they are needed."""
    q_tiles, k_tiles, v_tiles = tiles
    full_q, full_k, full_v = full
    empty_q, empty_k, empty_v = empty
    BLOCK_M: gl.constexpr = q_tiles.shape[1]
    HEAD_DIM: gl.constexpr = q_tiles.shape[2]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    group = work[5]
    items, number = 0, 0  # so far: items with something to do; tiles of keys
    turn = 0
    item = read_item(turn, work)
    while item[0] >= 0:
        turn += 1
        following = read_item(turn, work)  # on its way while this one is worked on
        row, first, head, start, queries, old = item
        kv_head, paired, old_tiles, n = key_tiles(first, head, queries, old, group, BLOCK_M, BLOCK_N)
        if n > 0:
            mbarrier.wait(empty_q, (items & 1) ^ 1)
            mbarrier.expect(full_q, 2 * BLOCK_M * HEAD_DIM * 2)
            for half in gl.static_range(2):
                my_head, my_first = share(half, first, head, kv_head, paired, group, BLOCK_M)
                tma.async_copy_global_to_shared(
                    q_rows, [start + my_first, my_head * HEAD_DIM], full_q, q_tiles.index(half))  # fmt: skip
            items += 1
            column = kv_head * HEAD_DIM
            last_block = gl.maximum(old - 1, 0) // BLOCK_SIZE  # a ragged tile takes it again, and masks it
            table = table_ptr + row.to(gl.int64) * stride_table
            for i in range(n):
                _load_tile(
                    k_rows, k_pages, k_tiles, full_k, empty_k, number, i, old_tiles, start, column, table, last_block,
                    BLOCK_SIZE)  # fmt: skip
                _load_tile(
                    v_rows, v_pages, v_tiles, full_v, empty_v, number, i, old_tiles, start, column, table, last_block,
                    BLOCK_SIZE)  # fmt: skip
                number += 1
        item = following
