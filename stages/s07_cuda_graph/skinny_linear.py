"""y = act(W norm(x) + b) + residual for few tokens: which kernel, which tile, one launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.s03_paged_kv.tile_sizes import next_power_of_2

MOST_ROWS = 16
EARLY_REGISTERS = 96  # of a thread, for weights that are asked for before the wait: the rest is for the arithmetic
EARLY_BYTES = 32 << 10  # the same of a program of several rows, whose weights go to shared memory
WHOLE_BYTES = 96 << 10  # a tile that is no larger is asked for as a whole


@dataclass(frozen=True)
class Tile:
    """How one program is shaped: rows of the weight x columns of 2 bytes per chunk, and its warps."""

    block_n: int
    block_k: int
    num_warps: int


# By (rows of x at most, rows of the weight, columns): `python -m stages.s07_cuda_graph.tune_few_rows` on an H200; for
# one row, six of them by the time of a whole step, where a launch runs beside its neighbours.
TILES: dict[tuple[int, int, int], Tile] = {
    (1, 4096, 1024): Tile(8, 1024, 2),  # Qwen3-0.6B
    (8, 4096, 1024): Tile(32, 256, 4),
    (16, 4096, 1024): Tile(32, 256, 4),
    (1, 1024, 2048): Tile(4, 1024, 4),
    (8, 1024, 2048): Tile(16, 512, 4),
    (16, 1024, 2048): Tile(16, 512, 8),
    (1, 6144, 1024): Tile(16, 1024, 4),
    (8, 6144, 1024): Tile(32, 256, 4),
    (16, 6144, 1024): Tile(32, 256, 4),
    (1, 1024, 3072): Tile(4, 1024, 2),
    (8, 1024, 3072): Tile(16, 512, 8),
    (16, 1024, 3072): Tile(16, 512, 8),
    (1, 151936, 1024): Tile(8, 1024, 2),
    (8, 151936, 1024): Tile(16, 512, 4),
    (16, 151936, 1024): Tile(32, 256, 4),
    (1, 2048, 1536): Tile(8, 512, 2),  # Qwen2.5-1.5B
    (8, 2048, 1536): Tile(16, 512, 4),
    (16, 2048, 1536): Tile(32, 256, 4),
    (1, 1536, 1536): Tile(8, 512, 2),
    (8, 1536, 1536): Tile(16, 512, 4),
    (16, 1536, 1536): Tile(32, 256, 4),
    (1, 17920, 1536): Tile(8, 1024, 2),
    (8, 17920, 1536): Tile(16, 512, 4),
    (16, 17920, 1536): Tile(32, 256, 4),
    (1, 1536, 8960): Tile(4, 1024, 4),
    (8, 1536, 8960): Tile(16, 1024, 8),
    (16, 1536, 8960): Tile(16, 1024, 8),
    (1, 151936, 1536): Tile(8, 1024, 2),
    (8, 151936, 1536): Tile(16, 512, 4),
    (16, 151936, 1536): Tile(16, 512, 4),
    (1, 4608, 3584): Tile(8, 512, 2),  # Qwen2.5-7B
    (8, 4608, 3584): Tile(32, 256, 4),
    (16, 4608, 3584): Tile(32, 256, 4),
    (1, 3584, 3584): Tile(4, 512, 2),
    (8, 3584, 3584): Tile(16, 512, 4),
    (16, 3584, 3584): Tile(32, 512, 8),
    (1, 37888, 3584): Tile(8, 1024, 2),
    (8, 37888, 3584): Tile(32, 256, 4),
    (16, 37888, 3584): Tile(32, 256, 4),
    (1, 3584, 18944): Tile(8, 1024, 2),
    (8, 3584, 18944): Tile(16, 512, 4),
    (16, 3584, 18944): Tile(32, 512, 8),
    (1, 152064, 3584): Tile(8, 512, 2),
    (8, 152064, 3584): Tile(32, 256, 4),
    (16, 152064, 3584): Tile(32, 256, 4),
}
# Rows of x up to which a shape is faster than in cuBLAS, where measured: alone, by `tune_few_rows`. For one projection
# of the 1.5B that was one row; by the whole step (`bench_few_rows`) the model is faster up to eight.
PAYS_TO: dict[tuple[int, int], int] = {
    (4096, 1024): 16,
    (1024, 2048): 16,
    (6144, 1024): 16,
    (1024, 3072): 16,
    (151936, 1024): 1,
    (2048, 1536): 16,
    (1536, 1536): 16,
    (17920, 1536): 8,
    (1536, 8960): 8,
    (151936, 1536): 1,
    (4608, 3584): 1,
    (3584, 3584): 8,
    (37888, 3584): 8,
    (3584, 18944): 16,
    (152064, 3584): 8,
}


def pays(rows: int, n: int, k: int) -> bool:
    """Whether this beats cuBLAS and the kernels around it, for a weight [n, k]; from a table, never from data."""
    return rows <= PAYS_TO.get((n, k), 1)


def pick_tile(rows: int, n: int, k: int) -> Tile:
    """The tile for `rows` tokens and a weight [n, k]: measured, or a rule for shapes that nobody measured."""
    kind = _row_slots(rows)
    if (kind, n, k) in TILES:
        return TILES[kind, n, k]
    if kind == 1:
        return Tile(8, 1024 if k % 1024 == 0 else 512, 2)
    wide = n < 8192 and k <= 3072 and k % 1024 == 0
    return Tile(16 if n < 8192 else 32, 1024 if wide else 512, 8)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    glu: bool = False,
    ahead: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """[residual +] act([norm](x) W^T [+ bias]) of x [R, K] with R <= 16 and weight [N, K]; returns [R, N].

    `norm_weight` [K]: x goes through RMSNorm with this weight and `eps` first. `glu`: the weight holds gate and up,
    [2I, K], and the result is silu(gate) * up [R, I]. `residual` [R, N] is added *and written*: it is what is returned.
    All in the dtype of the weight; sums and what follows them in fp32, the result rounded once. (Of several rows, a
    normed x is rounded too, before it meets the tensor cores.) `ahead`: a weight that a later call reads and that fits
    the L2 cache: on its way there while this call waits (GPU only). `tile` overrides what would be picked.

    What a kernel in front wrote is read after it ended; weights, norm weights and biases may be read before that.
    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    _check(x, weight, bias, norm_weight, residual, glu)
    rows, n = len(x), weight.shape[0] // (1 + glu)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if residual is None else residual
    flags = (norm_weight is not None, bias is not None, residual is not None, glu)
    ahead_bytes = 0 if ahead is None else ahead.nbytes
    kernel, options = _launch(_row_slots(rows), weight.shape, x.dtype, x.device, flags, ahead_bytes, tile)
    gain, shift, ahead = (weight if each is None else each for each in (norm_weight, bias, ahead))
    kernel(x, gain, weight, shift, out, ahead, eps, *(() if rows == 1 else (rows, x.stride(0))), **options)
    return out


def _row_slots(rows: int) -> int:
    """The rows of x that a kernel is compiled for."""
    return 1 if rows == 1 else 8 if rows <= 8 else 16


@functools.cache
def _launch(
    slots: int,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    flags: tuple[bool, bool, bool, bool],
    ahead_bytes: int,
    tile: Tile | None,
) -> tuple[Any, dict[str, Any]]:
    """The kernel with its grid, and its compile-time arguments: the same for every layer and step."""
    from stages.s03_paged_kv.store_kv import launch_options
    from stages.s07_cuda_graph.few_rows_kernel import few_rows_kernel
    from stages.s07_cuda_graph.one_row_kernel import one_row_kernel

    norm, bias, add, glu = flags
    tile = tile or pick_tile(slots, *shape)
    n, k = shape[0] // (1 + glu), shape[1]
    options: dict[str, Any] = dict(launch_options(device))
    block_k = min(tile.block_k * 2 // dtype.itemsize, max(next_power_of_2(k), 16 * tile.num_warps))
    chunks = -(-k // block_k)
    tile_bytes = tile.block_n * block_k * dtype.itemsize
    if slots == 1:
        early = EARLY_REGISTERS * 4 * 32 * tile.num_warps // tile_bytes
    else:
        early = chunks if chunks * tile_bytes <= WHOLE_BYTES else EARLY_BYTES // tile_bytes
        options |= {"ROWS": slots, "SLICES": tile.num_warps}
    options |= {"N": n, "K": k, "BLOCK_N": tile.block_n, "BLOCK_K": block_k, "EARLY": min(max(early, 1), chunks)}
    options |= {"NORM": norm, "BIAS": bias, "ADD": add, "GLU": glu, "num_warps": tile.num_warps}
    options["AHEAD"] = ahead_bytes if options["PDL"] else 0
    kernel = one_row_kernel if slots == 1 else few_rows_kernel
    return kernel[(-(-shape[0] // tile.block_n),)], options


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None, glu: bool
) -> None:
    if x.ndim != 2 or not 1 <= len(x) <= MOST_ROWS or weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)}: need [1 to {MOST_ROWS}, K] and [N, K]")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"x {x.stride()} needs a last stride of 1, weight {weight.stride()} must be contiguous")
    n, k = weight.shape
    if glu and n % 2:
        raise ValueError(f"weight {list(weight.shape)} cannot hold gate and up: its rows are no even number")
    wanted = (
        ("bias", bias, (n,)),
        ("norm_weight", norm_weight, (k,)),
        ("residual", residual, (len(x), n // (1 + glu))),
    )
    for name, tensor, shape in wanted:
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(f"{name} {list(tensor.shape)} {tensor.stride()} must be {list(shape)} and contiguous")
    if any(t is not None and t.dtype != weight.dtype for t in (x, bias, norm_weight, residual)):
        raise ValueError(f"x, bias, norm_weight and residual must have the weight's dtype, {weight.dtype}")
    if residual is not None and residual.data_ptr() == x.data_ptr():
        raise ValueError("residual must not be x: parts of it would be overwritten before all have been read")
