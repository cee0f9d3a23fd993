"""RMSNorm in Triton, with or without the addition to the residual stream: one launch that reads each row once."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.store_kv import launch_options
from stages.s03_paged_kv.tile_sizes import next_power_of_2

TILE = 1024  # elements that a program should hold at least, once there are rows enough for all processors
MANY_ROWS = 4096


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, num_rows, eps, stride_x, stride_residual, PARTS: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: `ROWS` whole rows. It rounds where torch does: the sum, the normed row, and the product."""
    dtype = out_ptr.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, SIZE_PAD)[None, :]
    exists = (row < num_rows) & (column < SIZE)
    if PDL:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)  # no kernel writes it: asked for early
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + column, mask=exists, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + (part * num_rows + row) * stride_x + column, mask=exists, other=0.0)
    if residual_ptr is not None:
        target = residual_ptr + row * stride_residual + column
        total = (tl.load(target, mask=exists, other=0.0).to(tl.float32) + x).to(dtype)
        tl.store(target, total, mask=exists)
        x = total.to(tl.float32)
    mean_square = tl.sum(x * x, axis=1, keep_dims=True) / SIZE
    normed = (x * tl.rsqrt(mean_square + eps)).to(dtype)
    out = weight.to(tl.float32) * normed.to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, out.to(dtype), mask=exists)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`layers.rms_norm`: x [..., H], weight [H] of one dtype -> [..., H], contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return _launch(rows, None, weight, eps).view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layers.add_rms_norm`: x, residual [T, H], weight [H] of one dtype -> (normed [T, H], `residual` itself).

    The sum is written over `residual`. x may come in parts, of which the sum is meant: [parts, T, H] in fp32.
    """
    in_parts = x.ndim == 3 and x.dtype == torch.float32 and x.is_contiguous()
    fits = residual.shape == x.shape[-2:] and (in_parts or residual.dtype == x.dtype and x.ndim == 2)
    if not fits or residual.stride(1) != 1:
        raise ValueError(
            f"residual {tuple(residual.shape)} of {residual.dtype} with strides {residual.stride()} does not fit "
            f"x {tuple(x.shape)} of {x.dtype}: equal shapes and dtypes, and rows without gaps, are needed"
        )
    return _launch(x.flatten(0, -2), residual, weight, eps, len(x) if in_parts else 1), residual


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, parts: int = 1
) -> torch.Tensor:
    """x [parts * T, H] -> [T, H]."""
    num_rows, size = len(x) // parts, x.shape[1]
    dtype = x.dtype if residual is None else residual.dtype
    if weight.shape != (size,) or weight.dtype != dtype or x.stride(1) != 1:
        raise ValueError(
            f"weight {tuple(weight.shape)} of {weight.dtype} does not fit x {tuple(x.shape)} of {x.dtype} with strides "
            f"{x.stride()}: one weight per column, equal dtypes, and rows without gaps, are needed"
        )
    out = torch.empty((num_rows, size), dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    size_pad = next_power_of_2(size)
    many = num_rows >= MANY_ROWS
    rows = max(TILE // size_pad, 1) if many else 1
    share = 512 if many else 256  # elements of a warp: with few rows, more warps wait for memory side by side
    _norm_kernel[(-(-num_rows // rows),)](
        x, residual, weight, out, num_rows, eps, x.stride(0), 0 if residual is None else residual.stride(0),
        PARTS=parts, SIZE=size, SIZE_PAD=size_pad, ROWS=rows, num_warps=min(max(rows * size_pad // share, 1), 16),
        **launch_options(x.device),
    )  # fmt: skip
    return out
