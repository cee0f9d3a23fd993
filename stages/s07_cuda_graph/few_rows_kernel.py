"""The matrix product of `one_row_kernel.py` for 2 to 16 tokens: the same ideas, on the tensor cores."""

# mypy: disable-error-code="assignment, var-annotated"
# (Triton unrolls loops over tuples that grow, which Python's types do not allow.)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s07_cuda_graph.one_row_kernel import fetch_ahead, load_row, load_weights, swiglu, tile_rows


@triton.jit
def _load_x(pointers, exists, col, K: tl.constexpr, WHOLE: tl.constexpr):
    """A chunk of x [SLICES, SLICE, ROWS] as it lies in memory."""
    if WHOLE:
        return tl.load(pointers, mask=exists, other=0.0, cache_modifier=".cg")
    return tl.load(pointers, mask=exists & (col < K), other=0.0, cache_modifier=".cg")


@triton.jit
def _prepare(x, gain, scale, squares, NORM: tl.constexpr, dtype: tl.constexpr):
    """A chunk of x as the product takes it, and the sums of squares [SLICES, ROWS] with its own added."""
    if NORM:
        x = x.to(tl.float32)
        squares += tl.sum(x * x, 1)
        x = x * scale * gain
    return x.to(dtype), squares


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x_ptr, gain_ptr, weight_ptr, bias_ptr, out_ptr, ahead_ptr, eps, rows, stride_x, ROWS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    EARLY: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GLU: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to ROWS tokens: the tensor cores multiply a tile of weights with all of x. Each of SLICES warps takes its own
    columns of every chunk, as one batch of the product, and the slices are summed at the end: else all warps of so
    small a tile would do the same work."""
    if PDL:
        gdc_launch_dependents()
    OUT: tl.constexpr = BLOCK_N // (1 + GLU)
    SLICE: tl.constexpr = BLOCK_K // SLICES
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    NORM_FIRST: tl.constexpr = NORM and dtype == tl.float16  # g x may be too large for it
    PRECISION: tl.constexpr = "tf32x3" if dtype == tl.float32 else "tf32"
    row = tile_rows(N, BLOCK_N, GLU)
    col = tl.arange(0, SLICES)[:, None] * SLICE + tl.arange(0, SLICE)[None, :]  # [SLICES, SLICE]
    w_col = col[:, None, :]
    x_col = col[:, :, None]
    w_tile = weight_ptr + row[None, :, None] * K + w_col  # [SLICES, BLOCK_N, SLICE]
    weights = ()
    gains = ()
    for i in tl.static_range(EARLY):
        chunk = i * BLOCK_K
        weights = weights + (load_weights(w_tile + chunk, chunk + w_col, K, WHOLE),)
        if NORM:
            gains = gains + (load_row(gain_ptr + chunk + x_col, chunk + x_col, K, WHOLE),)
    if BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    if AHEAD > 0:
        fetch_ahead(ahead_ptr, AHEAD, (N + OUT - 1) // OUT)

    if PDL:  # from here on x and out are what the kernels in front made them
        gdc_wait()
    token = tl.arange(0, ROWS)
    exists = (token < rows)[None, None, :]
    x_tile = x_ptr + token[None, None, :] * stride_x + x_col  # [SLICES, SLICE, ROWS]
    squares = tl.zeros([SLICES, ROWS], tl.float32)
    scale = 1.0
    if NORM_FIRST:
        for i in range(CHUNKS):
            x = _load_x(x_tile + i * BLOCK_K, exists, i * BLOCK_K + x_col, K, WHOLE).to(tl.float32)
            squares += tl.sum(x * x, 1)
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, None, :]
    xs = ()
    for i in tl.static_range(EARLY):
        xs = xs + (_load_x(x_tile + i * BLOCK_K, exists, i * BLOCK_K + x_col, K, WHOLE),)
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    target = out_ptr + token[None, :] * N + n[:, None]  # [OUT, ROWS]
    stored = (token < rows)[None, :] & (n < N)[:, None]
    if ADD:
        old = tl.load(target, mask=stored, other=0.0, cache_modifier=".cg").to(tl.float32)
    acc = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
    # The chunks that were not asked for early go first: their loads are under way while the early ones are multiplied.
    for i in range(EARLY, CHUNKS):
        chunk = i * BLOCK_K
        w = load_weights(w_tile + chunk, chunk + w_col, K, WHOLE)
        x = _load_x(x_tile + chunk, exists, chunk + x_col, K, WHOLE)
        gain = 1.0
        if NORM:
            gain = load_row(gain_ptr + chunk + x_col, chunk + x_col, K, WHOLE)
        x, squares = _prepare(x, gain, scale, squares, NORM, dtype)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    for i in tl.static_range(EARLY):
        gain = 1.0
        if NORM:
            gain = gains[i]
        x, squares = _prepare(xs[i], gain, scale, squares, NORM, dtype)
        acc = tl.dot(weights[i], x, acc, input_precision=PRECISION)
    y = tl.sum(acc, 0)  # [BLOCK_N, ROWS]
    if NORM and not NORM_FIRST:
        y = y * tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
    if BIAS:
        y += bias[:, None]
    if GLU:
        y = swiglu(tl.permute(tl.reshape(y, [OUT, 2, ROWS]), [0, 2, 1]))
    if ADD:
        y += old
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=stored)
