"""SwiGLU's middle in Triton: one read of gate and up, one write of their product."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.s03_paged_kv.store_kv import launch_options
from stages.s03_paged_kv.tile_sizes import next_power_of_2


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, stride_row, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: `COLUMNS` columns of one row. silu is rounded before it is multiplied, as in torch."""
    dtype = out_ptr.dtype.element_ty
    parts: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up_ptr + row * stride_row + column, mask=column < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride_row + SIZE + column, mask=column < SIZE, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    out = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, out.to(dtype), mask=column < SIZE)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`layers.silu_mul`: gate_up [..., 2I] -> [..., I], contiguous."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up, side by side, have an even number of columns, not {gate_up.shape[-1]}")
    size = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * size)
    if rows.stride(1) != 1:
        raise ValueError(f"gate_up has strides {gate_up.stride()}: rows without gaps are needed")
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    columns = min(next_power_of_2(size), 1024)
    _silu_mul_kernel[(len(rows) * -(-size // columns),)](
        rows, out, rows.stride(0), SIZE=size, COLUMNS=columns, num_warps=max(columns // 256, 1),
        **launch_options(rows.device),
    )  # fmt: skip
    return out
