"""Attention for chunks of prompts on a Hopper GPU, in Gluon: Triton's lower level, where one says which warp does what.

`chunk_kernel.py` computes the same, in a third of the lines. There every warp loads, multiplies and takes exponentials
in turn, and the tensor cores wait for the rest. Here a program has three parts which work at the same time:

* one warp *loads*. It asks the copy engine (TMA) for tiles of keys and values, a few ahead of those who need them;
* two *warpgroups*, four warps each, *multiply*: 64 queries each, with tiles that both share. So a key that comes from
  L2 meets 128 queries.

They meet at barriers in shared memory. `full` of a tile: its bytes are there. `empty`: both warpgroups have done with
it. The products are asynchronous, and their order within a warpgroup is FlashAttention-3's (Shah et al., 2024): while
the weights of one tile meet its values, the softmax of the next tile is under way.

A program takes one *item* after another, a tile of the map (128 queries of a row) for one head, so that the loads of
the next begin while the last products of this one run. Where a row has no more than 64 queries left, the warpgroups
take two heads of one group instead, and the other half of the group's items is empty.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s07_cuda_graph.hopper_load_kernel import key_tiles, load, read_item, share


@gluon.jit
def _mask(score, i, old_tiles, old, my_first, seen, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Keys that a query must not see become -inf. seen: tiles of the step's own keys that all queries see whole."""
    LAYOUT: gl.constexpr = score.type.layout
    if (i >= old_tiles + seen) | ((i == old_tiles - 1) & (old % BLOCK_N != 0)):
        query = my_first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
        key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        limit = gl.where(i < old_tiles, old - i * BLOCK_N, query + 1 - (i - old_tiles) * BLOCK_N)
        score = gl.where(key[None, :] < limit[:, None], score, float("-inf"))
    return score


@gluon.jit
def _clear_values(v_tiles, stage, i, old_tiles, old, queries):
    """What follows the last key of the cache or of the row may be NaN, and 0 * NaN is NaN: 16 keys at a time to zero.

    Both warpgroups do it, each before its own product, and write the same bytes, so neither needs to wait for the
    other. The tensor cores read shared memory by another way than stores go (the async proxy), and the copy engine will
    write by that way: so each thread fences its stores, and the four warps meet before their product.
    """
    STAGES: gl.constexpr = v_tiles.shape[0]
    BLOCK_N: gl.constexpr = v_tiles.shape[1]
    PANELS: gl.constexpr = v_tiles.shape[2] // 64
    PIECES: gl.constexpr = BLOCK_N // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    there = gl.where(i < old_tiles, old - i * BLOCK_N, queries - (i - old_tiles) * BLOCK_N)
    if there < BLOCK_N:
        pieces = v_tiles._reinterpret(v_tiles.dtype, [STAGES * PANELS * PIECES, 16, 64], v_tiles.layout)
        for piece in range(there // 16, PIECES):
            key = piece * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
            for panel in gl.static_range(PANELS):
                part = pieces.index((stage * PANELS + panel) * PIECES + piece)
                part.store(gl.where((key < there)[:, None], part.load(LAYOUT), 0.0))
        fence_async_shared()


@gluon.jit
def _stay(x):
    """x >= 0, and a way out of the kernel that is never taken: what x is computed from stays in front of later waits.

    Without it the compiler would wait for the products first and take all exponentials after, when nothing hides them.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0fBF800000; @p exit; mov.b32 $0, $1; }", "=r,r", [x], dtype=gl.float32,
        is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _attend(
    q, k_tiles, v_tiles, empty_q, full_k, empty_k, full_v, empty_v, number, n, old_tiles, old, queries, my_first, scale,
):  # fmt: skip
    """64 queries over `n` tiles of keys -> weighted sum of the values [BLOCK_M, D], sum of the weights [BLOCK_M].

    number: how many tiles of keys the program had before; it says in which stage a tile lies, and in which phase.

    A tile is given back by one thread for all four warps. They meet in front of `mbarrier.arrive` (the compiler sees to
    that, and test_hopper_compiled.py to the compiler), and each has waited for the product that read the tile: from
    then on the copy engine may write over it. Only products read tiles like that. A plain load may still be under way
    when its thread arrives, which is why the queries are not kept in registers and their tile given back at once.
    """
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    BLOCK_M: gl.constexpr = q.shape[0]
    HEAD_DIM: gl.constexpr = q.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)  # stay in the registers in which they were computed
    seen = my_first // BLOCK_N
    stage = number % STAGES
    mbarrier.wait(full_k.index(stage), number // STAGES & 1)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
    score = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(empty_k.index(stage), count=1)
    score = _mask(score, 0, old_tiles, old, my_first, seen, BLOCK_M, BLOCK_N)
    row_max = gl.max(score, 1) * scale  # every query sees a key of the first tile: never -inf
    weight = gl.exp2(score * scale - row_max[:, None])
    row_sum = gl.sum(weight, 1)
    weights = gl.convert_layout(weight.to(v_tiles.dtype), WEIGHTS)
    acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, layout=RESULT)
    for i in range(1, n):
        last, last_phase = stage, number // STAGES & 1
        number += 1
        stage = number % STAGES
        mbarrier.wait(full_k.index(stage), number // STAGES & 1)
        score = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(full_v.index(last), last_phase)
        _clear_values(v_tiles, last, i - 1, old_tiles, old, queries)
        acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive(empty_k.index(stage), count=1)
        score = _mask(score, i, old_tiles, old, my_first, seen, BLOCK_M, BLOCK_N)  # from here on under the product
        new_max = gl.maximum(row_max, gl.max(score, 1) * scale)
        weight = gl.exp2(score * scale - new_max[:, None])
        rescale = gl.exp2(row_max - new_max)
        row_sum = _stay(row_sum * rescale + gl.sum(weight, 1))
        row_max = new_max
        # In PTX the new weights stand in front of the wait because it names them; the machine code heeds `_stay` alone.
        acc, weights = warpgroup_mma_wait(0, deps=[acc, gl.convert_layout(weight.to(v_tiles.dtype), WEIGHTS)])
        mbarrier.arrive(empty_v.index(last), count=1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, RESULT))[:, None]
    mbarrier.arrive(empty_q, count=1)  # the next item's queries come under the last product
    mbarrier.wait(full_v.index(stage), number // STAGES & 1)
    _clear_values(v_tiles, stage, n - 1, old_tiles, old, queries)
    acc = warpgroup_mma(weights, v_tiles.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty_v.index(stage), count=1)
    return acc, gl.convert_layout(row_sum, gl.SliceLayout(1, RESULT))


@gluon.jit
def _multiply(HALF: gl.constexpr, tiles, full, empty, work, out_ptr, scale):
    """One of the two warpgroups: its 64 queries of all of the program's items."""
    q_tiles, k_tiles, v_tiles = tiles
    full_q, full_k, full_v = full
    empty_q, empty_k, empty_v = empty
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    BLOCK_M: gl.constexpr = q_tiles.shape[1]
    HEAD_DIM: gl.constexpr = q_tiles.shape[2]
    num_heads, group = work[4], work[5]
    items, number = 0, 0  # as the loading warp counts them
    turn = 0
    item = read_item(turn, work)
    while item[0] >= 0:
        turn += 1
        following = read_item(turn, work)
        _, first, head, start, queries, old = item
        kv_head, paired, old_tiles, n = key_tiles(first, head, queries, old, group, BLOCK_M, BLOCK_N)
        if n > 0:
            my_head, my_first = share(HALF, first, head, kv_head, paired, group, BLOCK_M)
            mine = old_tiles + (gl.minimum(my_first + BLOCK_M, queries) + BLOCK_N - 1) // BLOCK_N
            mine = gl.where(my_head < (kv_head + 1) * group, mine, 0)  # an odd group has no partner for its last head
            mbarrier.wait(full_q, items & 1)
            items += 1
            if mine > 0:
                acc, row_sum = _attend(
                    q_tiles.index(HALF), k_tiles, v_tiles, empty_q, full_k, empty_k, full_v, empty_v, number, mine,
                    old_tiles, old, queries, my_first, scale)  # fmt: skip
                acc = acc * (1.0 / row_sum)[:, None]
                query = my_first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, acc.type.layout))
                dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, acc.type.layout))
                place = ((start + query).to(gl.int64) * num_heads + my_head) * HEAD_DIM
                out = acc.to(out_ptr.dtype.element_ty)
                gl.store(out_ptr + place[:, None] + dim[None, :], out, mask=(query < queries)[:, None])
            else:
                mbarrier.arrive(empty_q, count=1)
            for unused in range(number + mine, number + n):  # the other warpgroup's: wait, and give them back
                stage, phase = unused % STAGES, unused // STAGES & 1
                mbarrier.wait(full_k.index(stage), phase)
                mbarrier.arrive(empty_k.index(stage), count=1)
                mbarrier.wait(full_v.index(stage), phase)
                mbarrier.arrive(empty_v.index(stage), count=1)
            number += n
        item = following


@gluon.jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` barriers, each of which completes a phase after so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.jit(
    do_not_specialize=["stride_table", "num_tiles", "num_heads", "group"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "cu_q_ptr", "tile_map_ptr"],  # compiled once
)
def hopper_chunk_kernel(
    q_rows, k_rows, v_rows, k_pages, v_pages, out_ptr, table_ptr, seq_lens_ptr, cu_q_ptr, tile_map_ptr, scale,
    stride_table, num_tiles, num_heads, group, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A program for each processor: it goes through the items index, index + programs, ... to the first empty tile."""
    if PDL:
        # Lengths, queries and keys come from this step, so nothing is read before. The first four warps wait for all:
        # the others begin behind this. What comes next finds room only where a program has ended.
        gdc_wait()
        gdc_launch_dependents()
    tiles = (
        gl.allocate_shared_memory(q_rows.dtype, [2, BLOCK_M, HEAD_DIM], q_rows.layout),
        gl.allocate_shared_memory(k_rows.dtype, [STAGES, BLOCK_N, HEAD_DIM], k_rows.layout),
        gl.allocate_shared_memory(v_rows.dtype, [STAGES, BLOCK_N, HEAD_DIM], v_rows.layout),
    )
    full = (_barriers(1, 1).index(0), _barriers(STAGES, 1), _barriers(STAGES, 1))
    empty = (_barriers(1, 2).index(0), _barriers(STAGES, 2), _barriers(STAGES, 2))
    fence_async_shared()
    work = (tile_map_ptr, cu_q_ptr, seq_lens_ptr, num_tiles, num_heads, group)
    gl.warp_specialize(
        [
            (_multiply, (0, tiles, full, empty, work, out_ptr, scale)),
            (_multiply, (1, tiles, full, empty, work, out_ptr, scale)),
            (load, (
                q_rows, k_rows, v_rows, k_pages, v_pages, tiles, full, empty, work, table_ptr, stride_table,
                BLOCK_SIZE)),
        ],
        [4, 1],  # warps of the second and the third; the first takes the four with which the kernel is launched
        [240, 24],  # registers of each of their threads
    )  # fmt: skip
