"""A matrix product for one token, in Triton: its time is that of reading the weights once, so all here serves that.

Every program owns some rows of the weight, and the whole of their columns. It asks for the first of them before it
waits for the kernel in front (weights never change), so that memory is busy while that one ends. What stands around
the product is done by the same program: the RMSNorm of its input, bias, SwiGLU, and the sum with the residual stream.

RMSNorm commutes with the product but for its weight: W norm(x) = (W (g x)) / rms(x), so nothing waits for the rms.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (Triton unrolls loops over tuples that grow, which Python's types do not allow.)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

AHEAD_PIECE = tl.constexpr(4096)


@triton.jit
def tile_rows(N: tl.constexpr, BLOCK_N: tl.constexpr, GLU: tl.constexpr):
    """The rows of the weight in this program's tile. GLU: a row of gate, its row of up, the next of gate, and so on.

    A tile that ends past N takes the last row again, so that no load needs a mask; nothing of it is stored.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GLU:
        row = tl.minimum(row // 2, N - 1) + row % 2 * N
    else:
        row = tl.minimum(row, N - 1)
    return row.to(tl.int64)


@triton.jit
def load_weights(pointers, col, K: tl.constexpr, WHOLE: tl.constexpr):
    """Weights are read once: the first to leave the caches. Only a ragged last chunk needs a mask."""
    if WHOLE:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=col < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_row(pointers, col, K: tl.constexpr, WHOLE: tl.constexpr):
    """Part of an activation or of a norm's weight, in fp32; past L1, which may hold what an earlier kernel saw."""
    if WHOLE:
        return tl.load(pointers, cache_modifier=".cg").to(tl.float32)
    return tl.load(pointers, mask=col < K, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def fetch_ahead(ptr, BYTES: tl.constexpr, PROGRAMS: tl.constexpr):
    """Bring BYTES at ptr from memory into L2: a hint, nothing waits for it. Each program asks for an equal share, in
    pieces of AHEAD_PIECE bytes or more, one to a thread: many small ones would take longer than they save."""
    THREADS: tl.constexpr = num_threads()
    SHARE: tl.constexpr = (BYTES // 16 + PROGRAMS - 1) // PROGRAMS * 16
    PIECE: tl.constexpr = max((SHARE // 16 + THREADS - 1) // THREADS * 16, AHEAD_PIECE)
    offset = tl.arange(0, THREADS) * PIECE
    start = tl.program_id(0).to(tl.int64) * SHARE + offset
    size = tl.minimum(tl.minimum(SHARE - offset, PIECE), BYTES // 16 * 16 - start).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [ptr.to(tl.int64) + start, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def swiglu(pairs):
    """silu(gate) * up of [..., 2]."""
    gate, up = tl.split(pairs)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def one_row_kernel(
    x_ptr, gain_ptr, weight_ptr, bias_ptr, out_ptr, ahead_ptr, eps, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, GLU: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: multiply and add, BLOCK_N rows of the weight a program. Chunks of x [1, BLOCK_K] have the layout of
    the weights that they multiply, so that nothing moves between threads before the last sum."""
    if PDL:
        gdc_launch_dependents()
    OUT: tl.constexpr = BLOCK_N // (1 + GLU)
    VECTOR: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth  # what a thread loads at once
    row = tile_rows(N, BLOCK_N, GLU)
    col = tl.arange(0, BLOCK_K)[None, :]
    tile = weight_ptr + row[:, None] * K + col
    weights = ()
    gains = ()
    for i in tl.static_range(EARLY):
        chunk = i * BLOCK_K
        weights = weights + (load_weights(tile + chunk, chunk + col, K, chunk + BLOCK_K <= K),)
        if NORM:
            gains = gains + (load_row(gain_ptr + chunk + col, chunk + col, K, chunk + BLOCK_K <= K),)
    if BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    if AHEAD > 0:
        fetch_ahead(ahead_ptr, AHEAD, (N + OUT - 1) // OUT)

    if PDL:  # from here on x and out are what the kernels in front made them
        gdc_wait()
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    if ADD:
        old = tl.load(out_ptr + n, mask=n < N, other=0.0, cache_modifier=".cg").to(tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    squares = tl.zeros([1, BLOCK_K // VECTOR], tl.float32)
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        chunk = i * BLOCK_K
        x = load_row(x_ptr + chunk + col, chunk + col, K, chunk + BLOCK_K <= K)
        if NORM:
            squares += tl.sum(tl.reshape(x * x, [1, BLOCK_K // VECTOR, VECTOR]), 2)
            if i < EARLY:
                x = x * gains[i]
            else:
                x = x * load_row(gain_ptr + chunk + col, chunk + col, K, chunk + BLOCK_K <= K)
        if i < EARLY:
            w = weights[i]
        else:
            w = load_weights(tile + chunk, chunk + col, K, chunk + BLOCK_K <= K)
        acc += tl.sum(tl.reshape(w.to(tl.float32) * x, [BLOCK_N, BLOCK_K // VECTOR, VECTOR]), 2)
    y = tl.sum(acc, 1)  # [BLOCK_N]
    if NORM:
        y = y * tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
    if BIAS:
        y += bias
    if GLU:
        y = swiglu(tl.reshape(y, [OUT, 2]))
    if ADD:
        y += old
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
